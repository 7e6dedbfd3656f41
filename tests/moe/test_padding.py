"""Padding tokens go to no routed expert, and leave everything else as if they were not there."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe.config import MoEConfig
from moe.layer import init_moe, moe

TOLERANCE = 1e-6  # float32; the same sums over rows, in other blocks
ROWS, SEQ, D, REAL = 2, 6, 8, 4
CONFIG = MoEConfig(d_ff=8, num_experts=4, block_size=4, capacity_factor=None)
VALID = np.broadcast_to(np.arange(SEQ) < REAL, (ROWS, SEQ))
X = np.random.default_rng(0).standard_normal((ROWS, SEQ, D)).astype(np.float32)


def objective(params, x, valid, axis=None, config=CONFIG):
    """A sum over valid tokens and all statistics' losses."""
    y, stats = moe(params, x, config, axis, valid)
    keep = jnp.ones(x.shape[:2]) if valid is None else valid.astype(jnp.float32)
    return jnp.sum(y**2 * keep[:, :, None]) + stats.balance_loss + 0.1 * stats.z_loss, (y, stats)


run = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))
without_shared = jax.jit(
    lambda params, x, valid: moe(params, x, dataclasses.replace(CONFIG, num_shared_experts=0), valid=valid)
)


@pytest.fixture(scope="module")
def params():
    return jax.jit(init_moe, static_argnums=(1, 2))(jax.random.key(0), D, CONFIG)


def test_padding_changes_nothing(params):
    """Case 3: loss, every gradient and the counts equal those of the shorter sequences alone."""
    (loss, (y, stats)), (dparams, dx) = run(params, X, VALID)
    (want_loss, (want_y, want_stats)), (want_dparams, want_dx) = run(params, X[:, :REAL], None)
    np.testing.assert_allclose(loss, want_loss, rtol=TOLERANCE)
    np.testing.assert_allclose(y[:, :REAL], want_y, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(dx[:, :REAL], want_dx, rtol=0, atol=10 * TOLERANCE)
    assert not np.any(dx[:, REAL:])
    for got, want in zip(jax.tree.leaves(dparams), jax.tree.leaves(want_dparams), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * float(1 + np.max(np.abs(want))))
    assert stats.counts.tolist() == want_stats.counts.tolist()
    assert int(stats.counts.sum()) == ROWS * REAL * CONFIG.top_k


def test_padding_gets_no_routed_expert(params):
    y, stats = without_shared(params, X, VALID)
    assert not np.any(y[:, REAL:])
    assert np.all(np.any(y[:, :REAL], axis=-1))
    assert int(stats.dropped) == 0


def test_nothing_but_padding_is_finite(params):
    (loss, (_, stats)), grads = run(params, X, np.zeros_like(VALID))
    assert float(loss) == 0.0
    assert not np.any(stats.counts)
    assert not any(np.any(g) for g in jax.tree.leaves(grads))


def test_padding_takes_no_room_on_other_ranks(params):
    """Dropped counts valid tokens only: with room for the real ones of each sender, none is lost."""
    config = dataclasses.replace(CONFIG, capacity_factor=REAL / SEQ)

    def body(params, x, valid):
        _, stats = moe(params, x, config, "ep", valid)
        return jax.lax.psum(stats.dropped, "ep")

    specs = {name: jax.tree.map(lambda _, n=name: P("ep") if n == "experts" else P(), params[name]) for name in params}
    mesh = jax.make_mesh((2,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    call = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(specs, P("ep"), P("ep")), out_specs=P(), check_vma=False))
    # All to rank 0, so that each sender needs a place for each of its tokens.
    params = {**params, "router": {**params["router"], "bias": jnp.array([9.0, 9.0, 0.0, 0.0])}}
    assert int(call(params, X, VALID)) == 0
    assert int(call(params, X, np.ones_like(VALID))) == ROWS * (SEQ - REAL) * CONFIG.top_k
