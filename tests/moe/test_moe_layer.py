"""The layer equals the dense oracle, in values and gradients, over any number of expert shards."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dualpipe_jax.jaxprs import COLLECTIVES, count
from moe.config import MoEConfig
from moe.layer import init_moe, moe
from moe.reference import dense_moe

TOLERANCE = 1e-5  # float32; sums over experts and rows in another order
D, SEQ, ROWS = 16, 8, 4
CONFIG = MoEConfig(d_ff=12, num_experts=8, top_k=2, block_size=4)
SIGMOID = dataclasses.replace(
    CONFIG, scoring="sigmoid", top_k=3, num_groups=4, top_groups=2, route_scale=2.5, num_shared_experts=2
)


def problem(config, dtype=jnp.float32):
    params = init_moe(jax.random.key(0), D, config)
    x = jax.random.normal(jax.random.key(1), (ROWS, SEQ, D)).astype(dtype)
    return params, x


def specs_of(params):
    return {
        name: jax.tree.map(lambda _, n=name: P("ep") if n == "experts" else P(), tree) for name, tree in params.items()
    }


def on_shards(config, params, x, ep, wrap=lambda f: f):
    """((y, dropped), (dparams, dx)) of sum(y * sin(arange)), computed on `ep` expert shards."""
    mesh = jax.make_mesh((ep,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = specs_of(params)
    weight = jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)

    def body(params, x, weight):
        def f(params, x):
            y, stats = moe(params, x, config, "ep" if ep > 1 else None)
            return y, stats

        y, vjp, stats = jax.vjp(wrap(f), params, x, has_aux=True)
        dparams, dx = vjp(weight.astype(y.dtype))
        names = {n: () if n == "experts" else ("ep",) for n in dparams}
        dparams = {n: jax.lax.psum(t, names[n]) if names[n] else t for n, t in dparams.items()}
        return y, jax.tree.map(lambda s: jax.lax.psum(s, "ep"), stats), dparams, dx

    run = jax.shard_map(
        body, mesh=mesh, in_specs=(specs, P("ep"), P("ep")), out_specs=(P("ep"), P(), specs, P("ep")), check_vma=False
    )
    return jax.jit(run)(params, x, weight)


def oracle(config, params, x):
    weight = jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
    y, vjp = jax.vjp(lambda p, x: dense_moe(p, x, config), params, x)
    return y, vjp(weight)


def assert_close(got, want, tolerance=TOLERANCE):
    scale = max(float(jnp.max(jnp.abs(want))), 1e-6)
    np.testing.assert_allclose(np.asarray(got) / scale, np.asarray(want) / scale, rtol=0, atol=tolerance)


def assert_equals_oracle(config, params, x, ep):
    y, stats, dparams, dx = on_shards(config, params, x, ep)
    want_y, (want_dparams, want_dx) = oracle(config, params, x)
    assert_close(y, want_y)
    assert_close(dx, want_dx)
    jax.tree.map(assert_close, dparams, want_dparams)
    assert int(stats.dropped) == 0
    assert int(stats.counts.sum()) == x.shape[0] * x.shape[1] * config.top_k
    return stats, dparams


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("config", [CONFIG, SIGMOID], ids=["softmax", "sigmoid-groups"])
def test_equals_the_dense_oracle(config, ep):
    assert_equals_oracle(config, *problem(config), ep)


@pytest.mark.parametrize("target", [[0, 1], [5]], ids=["one rank's experts", "one expert"])
def test_all_tokens_to_one_place(target):
    """Case 11: the step ends, other experts' gradients are exactly 0, nothing is lost."""
    config = dataclasses.replace(CONFIG, top_k=len(target), normalize_weights=False)
    params, x = problem(config)
    params["router"]["bias"] = jnp.zeros(8).at[jnp.array(target)].set(100.0)
    stats, dparams = assert_equals_oracle(config, params, x, 4)
    others = [e for e in range(8) if e not in target]
    for leaf in jax.tree.leaves(dparams["experts"]):
        assert not np.any(np.asarray(leaf)[np.array(others)])
        assert np.all(np.isfinite(leaf))
    assert stats.counts.tolist() == [ROWS * SEQ if e in target else 0 for e in range(8)]


def test_capacity_counts_what_it_drops():
    """Case 11: dropped is exactly max(0, assigned - capacity), summed over pairs of ranks."""
    config = dataclasses.replace(CONFIG, capacity_factor=0.5)
    params, x = problem(config)
    params["router"]["bias"] = jnp.zeros(8).at[jnp.array([0, 1])].set(100.0)  # all to rank 0 of 4
    _, stats, _, _ = on_shards(config, params, x, 4)
    tokens = ROWS * SEQ // 4
    capacity = 2  # ceil(0.5 * 8 tokens * 2 choices / 4 ranks)
    assert int(stats.dropped) == 4 * (tokens - capacity) * 2  # both choices of a token go with its one copy


def test_generous_capacity_drops_nothing():
    config = dataclasses.replace(CONFIG, capacity_factor=4.0)
    assert_equals_oracle(config, *problem(config), 4)


def test_recomputation_chooses_the_same_experts():
    """Case 16: identical logits for all experts; gradients with and without recomputation agree."""
    params, x = problem(CONFIG)
    params["router"]["weight"] = jnp.zeros((D, 8))
    plain = on_shards(CONFIG, params, x, 2)
    again = on_shards(CONFIG, params, x, 2, wrap=jax.checkpoint)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), plain, again)
    assert plain[1].counts.tolist() == [ROWS * SEQ, ROWS * SEQ, 0, 0, 0, 0, 0, 0]  # ties go to the lower index


def test_bfloat16_keeps_its_dtype_and_routes_in_float32():
    params, x = problem(CONFIG, jnp.bfloat16)
    low = {**params, **{n: jax.tree.map(lambda a: a.astype(jnp.bfloat16), params[n]) for n in ("experts", "shared")}}
    y, stats, dparams, dx = on_shards(CONFIG, low, x, 2)
    assert y.dtype == dx.dtype == jnp.bfloat16
    assert dparams["router"]["weight"].dtype == jnp.float32
    assert dparams["experts"]["down"].dtype == jnp.bfloat16
    assert stats.balance_loss.dtype == jnp.float32
    exact = on_shards(CONFIG, params, x.astype(jnp.float32), 2)
    assert stats.counts.tolist() == exact[1].counts.tolist()
    assert_close(y.astype(jnp.float32), exact[0], 0.03)  # a few roundings to 8 bits


def test_number_of_exchanges():
    """Two all-to-alls out, one back; three for the gradients; none on one shard."""
    params, x = problem(CONFIG)
    for ep, expected in ((1, 0), (2, 6)):
        mesh = jax.make_mesh((ep,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))

        def body(params, x, ep=ep):
            y, vjp = jax.vjp(lambda p, x: moe(p, x, CONFIG, "ep" if ep > 1 else None)[0], params, x)
            return vjp(y)

        run = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(specs_of(params), P("ep")),
            out_specs=(specs_of(params), P("ep")),
            check_vma=False,
        )
        assert count(jax.make_jaxpr(run)(params, x).jaxpr, COLLECTIVES) == expected
