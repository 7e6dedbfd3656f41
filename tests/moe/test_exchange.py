"""One message carries tokens, indices and weights unrounded; a number of ranks that cannot be is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe.dispatch import dispatch, layout

RANKS, T, K, E, D = 2, 4, 2, 4, 3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_tokens_indices_and_weights_arrive_unrounded(dtype):
    """Bfloat16 tokens do not round the float32 weights beside them, nor their gradients; NaN and infinity pass."""
    rng = np.random.default_rng(0)
    idx = np.stack([rng.permutation(E)[:K] for _ in range(RANKS * T)]).astype(np.int32)
    x = jnp.asarray(rng.standard_normal((RANKS * T, D)), dtype).at[0].set(jnp.array([jnp.nan, jnp.inf, -1e-30], dtype))
    weights = jnp.asarray(rng.uniform(size=idx.shape), jnp.float32)

    def body(idx, x, weights):
        handle = layout(idx, E, RANKS, T)
        received, back = jax.vjp(lambda x, w: dispatch(x, w, handle, "ep"), x, weights)
        no_gradient = np.zeros(received.idx.shape, jax.dtypes.float0)
        return received, back(received._replace(idx=no_gradient))

    mesh = jax.make_mesh((RANKS,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    received, (_, dweights) = jax.jit(run)(idx, x, weights)
    assert (received.x.dtype, received.weights.dtype) == (dtype, jnp.float32)
    owner = idx // (E // RANKS)
    for rank in range(RANKS):
        tokens, local, gates = (a.reshape(RANKS, RANKS * T, -1)[rank] for a in received)
        here = np.any(owner == rank, axis=1)
        order = [t for sender in np.split(np.arange(RANKS * T), RANKS) for t in sender if here[t]]
        arrived = np.asarray(local).max(axis=1) >= 0
        np.testing.assert_array_equal(np.float32(tokens)[arrived], np.float32(x)[order])
        np.testing.assert_array_equal(np.asarray(gates)[arrived], np.asarray(weights)[order])
    copies = np.stack([np.any(owner == rank, axis=1) for rank in range(RANKS)]).sum(axis=0)
    np.testing.assert_array_equal(dweights, weights * copies[:, None].astype(np.float32))


def test_experts_must_divide_over_the_ranks():
    with pytest.raises(ValueError, match=r"num_experts=8 .* num_ranks=3; the nearest valid num_ranks is 2"):
        layout(jnp.zeros((2, 1), jnp.int32), 8, 3, 2)
