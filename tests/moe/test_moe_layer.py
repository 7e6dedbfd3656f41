"""The layer equals the dense oracle, in values and gradients, over any number of expert shards."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dualpipe_jax.jaxprs import COLLECTIVES, count
from moe.config import MoEConfig
from moe.layer import MoEStats, init_moe, moe
from moe.reference import dense_moe
from moe.router import expert_counts, route, sequence_balance_loss, z_loss

TOLERANCE = 1e-5  # float32; sums over experts and rows in another order
D, SEQ, ROWS = 16, 4, 8
CONFIG = MoEConfig(d_ff=12, num_experts=8, top_k=2, block_size=4)
SIGMOID = dataclasses.replace(
    CONFIG, scoring="sigmoid", top_k=3, num_groups=4, top_groups=2, route_scale=2.5, num_shared_experts=2
)
X = np.random.default_rng(1).standard_normal((ROWS, SEQ, D)).astype(np.float32)
DY = np.sin(np.arange(X.size, dtype=np.float32)).reshape(X.shape)
make_params = jax.jit(init_moe, static_argnums=(1, 2))


@functools.cache
def some_params(num_shared_experts):
    return make_params(jax.random.key(0), D, dataclasses.replace(CONFIG, num_shared_experts=num_shared_experts))


def params_of(config, favoured=()):
    """Parameters whose bias sends every token to the favoured experts."""
    params = some_params(config.num_shared_experts)
    bias = np.where(np.isin(np.arange(8), favoured), 100.0, 0.0).astype(np.float32)
    return {**params, "router": {**params["router"], "bias": bias}}


def specs_of(params):
    return {
        name: jax.tree.map(lambda _, n=name: P("ep") if n == "experts" else P(), tree) for name, tree in params.items()
    }


@functools.cache
def sharded(config, ep, recompute=False):
    """(params, x, dy) to (y, stats, dparams, dx) on `ep` expert shards; compiled once for the tests that share it."""
    specs = specs_of(params_of(config))

    def body(params, x, dy):
        def f(params, x):
            return moe(params, x, config, "ep" if ep > 1 else None)

        y, vjp, stats = jax.vjp(jax.checkpoint(f) if recompute else f, params, x, has_aux=True)
        dparams, dx = vjp(dy)
        dparams = {n: tree if n == "experts" else jax.lax.psum(tree, "ep") for n, tree in dparams.items()}
        return y, jax.tree.map(lambda s: jax.lax.psum(s, "ep"), stats), dparams, dx

    return jax.jit(
        jax.shard_map(
            body,
            mesh=jax.make_mesh((ep,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,)),
            in_specs=(specs, P("ep"), P("ep")),
            out_specs=(P("ep"), P(), specs, P("ep")),
            check_vma=False,
        )
    )


@functools.cache
def dense(config):
    """The same from the oracle; statistics over the batch as a whole."""

    def run(params, x, dy):
        y, vjp = jax.vjp(lambda p, x: dense_moe(p, x, config), params, x)
        routing = route(x.reshape(-1, D), params["router"]["weight"], params["router"]["bias"], config)
        counts = expert_counts(routing.topk_idx, config.num_experts)
        stats = MoEStats(counts, jnp.int32(0), sequence_balance_loss(routing, ROWS), z_loss(routing))
        return y, stats, *vjp(dy)

    return jax.jit(run)


def assert_close(got, want, tolerance=TOLERANCE):
    scale = max(float(np.max(np.abs(want))), 1e-6)
    np.testing.assert_allclose(np.asarray(got) / scale, np.asarray(want) / scale, rtol=0, atol=tolerance)


def assert_equals_oracle(config, params, ep):
    got, want = sharded(config, ep)(params, X, DY), dense(config)(params, X, DY)
    jax.tree.map(assert_close, got, want)
    _, stats, dparams, _ = got
    assert stats.counts.tolist() == want[1].counts.tolist()
    assert int(stats.dropped) == 0
    return stats, dparams


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("config", "ep"),
    [
        pytest.param(CONFIG, 1, id="softmax-1"),
        pytest.param(CONFIG, 2, id="softmax-2"),
        pytest.param(CONFIG, 4, id="softmax-4"),
        pytest.param(SIGMOID, 1, id="sigmoid-groups-1", marks=slow),
        pytest.param(SIGMOID, 2, id="sigmoid-groups-2", marks=slow),
        pytest.param(SIGMOID, 4, id="sigmoid-groups-4"),
        pytest.param(dataclasses.replace(CONFIG, top_k=8), 8, id="all-experts-8", marks=slow),
    ],
)
def test_equals_the_dense_oracle(config, ep):
    """Values, every gradient, and statistics, however the batch and the experts are sharded."""
    stats, _ = assert_equals_oracle(config, params_of(config), ep)
    assert int(stats.counts.sum()) == ROWS * SEQ * config.top_k


@pytest.mark.parametrize("target", [(0, 1), (5,)], ids=["one rank's experts", "one expert"])
def test_all_tokens_to_one_place(target):
    """Case 11: the step ends, other experts' gradients are exactly 0, nothing is lost."""
    config = CONFIG if len(target) == 2 else dataclasses.replace(CONFIG, top_k=1, normalize_weights=False)
    stats, dparams = assert_equals_oracle(config, params_of(config, target), 4)
    others = [e for e in range(8) if e not in target]
    for leaf in jax.tree.leaves(dparams["experts"]):
        assert not np.any(np.asarray(leaf)[others])
        assert np.all(np.isfinite(leaf))
    assert stats.counts.tolist() == [ROWS * SEQ if e in target else 0 for e in range(8)]


LIMITED = dataclasses.replace(CONFIG, capacity_factor=1.75)  # 7 = 1.75 * 8 tokens * 2 choices / 4 ranks


def test_capacity_counts_what_it_drops():
    """Case 11: dropped is exactly max(0, assigned - capacity), summed over pairs of ranks; the others keep theirs."""
    params = params_of(CONFIG, (0, 1))  # all 8 tokens of each of 4 shards to rank 0
    y, stats, _, _ = sharded(LIMITED, 4)(params, X, DY)
    assert int(stats.dropped) == 4 * (8 - 7) * 2  # both choices of a token go with its one copy
    assert stats.counts.tolist() == [ROWS * SEQ] * 2 + [0] * 6
    everything = dense(CONFIG)(params, X, DY)[0]
    shared_only = dense(CONFIG)({**params, "experts": jax.tree.map(np.zeros_like, params["experts"])}, X, DY)[0]
    last_of_shard = np.arange(ROWS * SEQ).reshape(ROWS, SEQ, 1) % 8 == 7
    assert_close(y, np.where(last_of_shard, shared_only, everything))


def test_enough_capacity_drops_nothing():
    got, want = (sharded(c, 4)(params_of(CONFIG), X, DY) for c in (LIMITED, CONFIG))
    assert int(got[1].dropped) == 0
    jax.tree.map(assert_close, got, want)


def test_recomputation_chooses_the_same_experts():
    """Case 16: identical logits for all experts; gradients with and without recomputation agree."""
    params = params_of(CONFIG)
    params["router"]["weight"] = np.zeros((D, 8), np.float32)
    plain, again = (sharded(CONFIG, 2, recompute)(params, X, DY) for recompute in (False, True))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), again, plain)
    assert plain[1].counts.tolist() == [ROWS * SEQ, ROWS * SEQ, 0, 0, 0, 0, 0, 0]  # ties go to the lower index


def test_bfloat16_keeps_its_dtype_and_routes_in_float32():
    params, x, dy = params_of(CONFIG), jnp.asarray(X, jnp.bfloat16), jnp.asarray(DY, jnp.bfloat16)
    low = {**params, **{n: jax.tree.map(lambda a: a.astype(jnp.bfloat16), params[n]) for n in ("experts", "shared")}}
    y, stats, dparams, dx = sharded(CONFIG, 2)(low, x, dy)
    assert y.dtype == dx.dtype == jnp.bfloat16
    assert dparams["router"]["weight"].dtype == jnp.float32
    assert dparams["experts"]["down"].dtype == jnp.bfloat16
    assert stats.balance_loss.dtype == jnp.float32
    exact_y, exact_stats, exact_dparams, _ = sharded(CONFIG, 2)(params, np.asarray(x, np.float32), DY)
    assert stats.counts.tolist() == exact_stats.counts.tolist()
    low_precision = 0.03  # a few roundings to 8 bits
    assert_close(y.astype(jnp.float32), exact_y, low_precision)
    jax.tree.map(lambda a, b: assert_close(a.astype(jnp.float32), b, low_precision), dparams, exact_dparams)


@pytest.mark.parametrize(("ep", "expected"), [(1, 0), (2, 4)])
def test_number_of_exchanges(ep, expected):
    """One all-to-all out, one back, two for the gradients; none on one shard."""
    params = params_of(CONFIG)

    def body(params, x):
        y, vjp = jax.vjp(lambda p, x: moe(p, x, CONFIG, "ep")[0], params, x)
        return vjp(y)

    run = jax.shard_map(
        body,
        mesh=jax.make_mesh((ep,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=(specs_of(params), P("ep")),
        out_specs=(specs_of(params), P("ep")),
        check_vma=False,
    )
    assert count(jax.make_jaxpr(run)(params, X).jaxpr, COLLECTIVES) == expected
