"""One step: equal with and without a pipeline, masked or not finite data, tied embeddings, precision, compiled once."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from dualpipe_jax.train import canonical
from moe.router import update_bias

# float32: sums over microbatches and ranks in another order.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def alone():
    """No pipeline."""
    return tiny_run.trainer_of(tiny_run.config("1f1b", 1))


@pytest.fixture(scope="module")
def piped():
    return tiny_run.trainer_of(tiny_run.config())


def steps(trainer, *host_batches):
    """(state, metrics of each step) from a fresh state."""
    state, measured = trainer.init(), []
    for batch in host_batches:
        state, metrics = trainer.step(state, tiny_run.put(trainer, batch))
        measured.append(jax.device_get(metrics))
    return state, measured


def masked(where, microbatches=4):
    """`tiny_run.batch` with the targets at `where` ignored."""
    batch = tiny_run.batch(microbatches)
    return {**batch, "targets": np.where(where, -1, batch["targets"]).astype(np.int32)}


def half():
    return np.random.default_rng(1).random((4, 2, tiny_run.SEQ)) < 0.5


def first_microbatch():
    return np.broadcast_to(np.arange(4)[:, None, None] == 0, (4, 2, tiny_run.SEQ))


@pytest.mark.parametrize("where", [False, half(), first_microbatch()], ids=["all", "half", "one-microbatch-masked"])
def test_loss_and_norm_are_those_without_a_pipeline(alone, piped, where):
    """Cases 19 and 21: the norm is before clipping; the mean is over valid tokens of the whole batch."""
    (a,), (b,) = (steps(trainer, masked(where))[1] for trainer in (alone, piped))
    assert a.grad_norm > 0
    np.testing.assert_allclose(b.loss, a.loss, rtol=TOLERANCE)
    np.testing.assert_allclose(b.grad_norm, a.grad_norm, rtol=TOLERANCE)
    assert b.dropped_tokens == a.dropped_tokens == 0
    assert b.expert_load_max_over_mean == a.expert_load_max_over_mean


def test_a_masked_microbatch_does_not_touch_the_others(piped):
    """Case 21: its tokens do not matter, and the mean is over the other targets."""
    batch, others = masked(first_microbatch()), masked(first_microbatch())
    others["tokens"] = np.where(first_microbatch(), 101, others["tokens"]).astype(np.int32)
    (a,), (b,) = steps(piped, batch)[1], steps(piped, others)[1]
    assert a.loss == b.loss
    assert a.grad_norm == b.grad_norm
    assert 5 < a.loss < 6.5, "an untrained model's loss on bytes, ln 256 = 5.5, whatever the share of valid targets"


def test_all_targets_ignored(piped):
    """Case 21: loss 0, no gradient; parameters decay, and the others (and the moments) stay."""
    before = canonical(piped, piped.init())
    state, measured = steps(piped, *[masked(True)] * 5)
    assert [(m.loss, m.grad_norm, bool(m.finite)) for m in measured] == [(0, 0, True)] * 5
    after = canonical(piped, state)
    kept = np.prod([1 - 0.5 * m.learning_rate for m in measured])
    assert kept < 1 - 1e-4, "far above float32's rounding"
    for (path, new), (_, old) in zip(*map(jax.tree_util.tree_leaves_with_path, (after.params, before.params))):  # noqa: B905
        name = path[-1].key
        if name != "bias":  # the router's follows the load, targets or not
            factor = 1.0 if name in ("scale", "table") else kept
            np.testing.assert_allclose(new, np.asarray(old) * np.float32(factor), rtol=1e-6, err_msg=str(path))
    moments = [leaf for leaf in jax.tree.leaves(after.optimizer) if leaf.ndim]
    assert moments
    assert all(not np.any(leaf) for leaf in moments)


# ---------------------------------------------------------------- tied embeddings


def assert_one_set_of_values(state):
    """Wherever a part of an array is on several devices, it has the same bits on all of them."""
    compared = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        parts = {}
        for shard in leaf.addressable_shards:
            parts.setdefault(str(shard.index), []).append(np.array(shard.data).tobytes())
        assert all(len(set(copies)) == 1 for copies in parts.values()), jax.tree_util.keystr(path)
        compared += sum(len(copies) > 1 for copies in parts.values())
    assert compared


def check_tied(alone, trainer):
    """Case 10: one set of values after 5 steps, those of the model without a pipeline; counted once."""
    batches = [tiny_run.batch(4, seed) for seed in range(5)]
    (want, a), (state, b) = steps(alone, *batches), steps(trainer, *batches)
    assert_one_set_of_values(state)
    # An update is a ratio of moments: where gradients are almost 0 their rounding shows. Steps are up to 4e-4 long.
    want_table, table = (canonical(t, s).params["embedding"]["table"] for t, s in ((alone, want), (trainer, state)))
    np.testing.assert_allclose(table, want_table, atol=1e-5)
    np.testing.assert_allclose([m.grad_norm for m in b], [m.grad_norm for m in a], rtol=1e-4)
    params = canonical(trainer, state).params
    assert "projection" not in params["head"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == sum(
        leaf.size for leaf in jax.tree.leaves(canonical(alone, want).params)
    )


def test_tied_embedding(alone, piped):
    check_tied(alone, piped)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), [("1f1b", 2), ("dualpipe_v", 4), ("dualpipe", 3)])
def test_tied_embedding_with_other_schedules(name, layers):
    alone, trainer = (
        tiny_run.trainer_of(tiny_run.config(*where, num_layers=layers)) for where in (("1f1b", 1), (name, 2))
    )
    check_tied(alone, trainer)


# ---------------------------------------------------------------- not finite


def assert_skipped(trainer, state, batch):
    before = tiny_run.bits((state.params, state.optimizer, state.key))
    done = int(state.step)
    state, metrics = trainer.step(state, tiny_run.put(trainer, batch))
    assert not bool(metrics.finite)
    after = tiny_run.bits((state.params, state.optimizer, state.key))
    assert [path for path in before if before[path] != after[path]] == []
    assert int(state.step) == done + 1
    return state


def test_nan_from_one_microbatch_is_skipped(piped):
    """Case 26: one rank sees it; all leave parameters and moments as they were, and the next step is a good one."""
    bad = tiny_run.batch()
    bad["tokens"][2, 0, 3] = 300  # beyond the table: its embedding is NaN
    state, _ = steps(piped, tiny_run.batch())
    state = assert_skipped(piped, state, bad)
    found = piped.find_non_finite(state, tiny_run.put(piped, bad))
    assert (found.phase, found.piece, found.rank, found.microbatch) == ("forward", "first", 1, 2)  # direction 1
    assert (found.parameters, found.batch) == ((), ())
    state, metrics = piped.step(state, tiny_run.put(piped, tiny_run.batch(4, 1)))
    want, wanted = steps(piped, tiny_run.batch(), tiny_run.batch(4, 1))
    assert tiny_run.differing((state.params, state.optimizer), (want.params, want.optimizer)) == []
    assert metrics.learning_rate == wanted[-1].learning_rate, "the rate that was applied"


def test_nan_in_a_middle_layer_is_skipped(piped):
    """Case 26: in one weight of the second stage."""
    state, _ = steps(piped, tiny_run.batch())
    (stage,) = state.params.stages
    weight = stage["layers"][0]["attention"]["out"]
    stage["layers"][0]["attention"]["out"] = jax.device_put(weight.at[1, 0, 0].set(np.inf), weight.sharding)
    state = assert_skipped(piped, state, tiny_run.batch())
    found = piped.find_non_finite(state, tiny_run.put(piped, tiny_run.batch()))
    assert (found.phase, found.piece, found.stage, found.rank, found.microbatch) == ("forward", "stage", 1, 1, 0)
    assert found.parameters == ("stages[1]['layers'][0]['attention']['out']",)
    assert piped.find_non_finite(piped.init(), tiny_run.put(piped, tiny_run.batch())) is None


@pytest.mark.slow
def test_nan_in_an_expert_is_found_where_experts_are_sharded():
    """The first microbatch whose tokens choose it; the experts are not gathered, and all-to-alls run."""
    trainer = tiny_run.trainer_of(tiny_run.config("dualpipe_v", 2, 2, num_layers=4))
    state, batch = trainer.init(), tiny_run.put(trainer, tiny_run.batch())
    assert trainer.find_non_finite(state, batch) is None
    experts = state.params.stages[1]["layers"][0]["moe"]["experts"]  # rank 0 has the last stage, 3, in slot 1
    name = next(iter(experts))
    experts[name] = jax.device_put(experts[name].at[0, 1].set(np.nan), experts[name].sharding)
    state = assert_skipped(trainer, state, tiny_run.batch())
    found = trainer.find_non_finite(state, batch)
    assert (found.phase, found.piece, found.stage, found.rank) == ("forward", "stage", 3, 0)
    assert found.parameters == (f"stages[3]['layers'][0]['moe']['experts']['{name}']",)


# ---------------------------------------------------------------- precision


def test_router_bias_of_a_starved_expert():
    """Case 15: float32 keeps growing by 0.001 where bfloat16 would stop at 0.5; float32 rounds each of 1,000 sums."""
    counts = jnp.array([0, 10, 10, 10], jnp.int32)
    bias = jax.jit(lambda b: jax.lax.fori_loop(0, 1000, lambda _, b: update_bias(b, counts, 0.001), b))(jnp.zeros(4))
    assert bias.dtype == jnp.float32
    np.testing.assert_allclose(bias, [1, -1, -1, -1], atol=1e-4)


@pytest.fixture(scope="module")
def half_precision():
    return tiny_run.trainer_of(tiny_run.config("1f1b", 1, dtype="bfloat16"))


def test_bfloat16_computes_and_float32_keeps(alone, half_precision):
    """Losses within 2% after a few steps; all that is kept from step to step is float32, and moves."""
    batches = [tiny_run.batch(4, seed) for seed in range(5)]
    _, a = steps(alone, *batches)
    # JAX cannot lower the gradient of its own bfloat16 attention with strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        state, b = steps(half_precision, *batches)
    np.testing.assert_allclose([m.loss for m in b], [m.loss for m in a], rtol=0.02)
    assert b[0].loss != a[0].loss, "it does compute in bfloat16"
    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in floats} == {jnp.dtype(jnp.float32)}
    # The router computes in float32 but reads what bfloat16 attention made: of 128 tokens a few near ties may flip.
    loads = [[m.expert_load_max_over_mean for m in run] for run in (b, a)]
    np.testing.assert_allclose(*loads, atol=0.15)


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "layers"),
    [
        ("1f1b", 4, 4, 30),
        ("dualpipe", 4, 8, 30),
        ("dualpipe_v", 4, 8, 30),
        pytest.param("dualpipe_v", 16, 32, 80, marks=pytest.mark.slow),
    ],
)
def test_no_layer_is_lost(schedule, ranks, microbatches, layers):
    """Case 2: as many parameters as without a pipeline, whether layers divide by stages or not; nothing is compiled."""
    piped = layer_shapes(layers, schedule, ranks, microbatches)
    assert len(piped["layers"]) == layers
    assert piped == layer_shapes(layers, "1f1b", 1, 1)


@cache
def layer_shapes(layers, schedule, ranks, microbatches):
    config = tiny_run.config(schedule, ranks, microbatches=microbatches, num_layers=layers)
    trainer = tiny_run.trainer_of(config)
    return jax.eval_shape(trainer.canonical, trainer.param_shapes)


def test_the_last_layer_counts(piped):
    """Case 2: without its output weights the loss is another."""
    state = piped.init()
    *first, last = canonical(piped, state).params["layers"]
    cut = jax.tree.map(jnp.zeros_like, last)
    params = piped.arranged({**canonical(piped, state).params, "layers": [*first, cut]})
    params = jax.device_put(params, piped.state_shardings.params)
    _, metrics = piped.step(state._replace(params=params), tiny_run.put(piped, tiny_run.batch()))
    assert abs(metrics.loss - steps(piped, tiny_run.batch())[1][0].loss) > 1e-3


# ---------------------------------------------------------------- compilation


def test_compiled_once_and_donated(piped):
    before = piped.init()
    state, _ = piped.step(before, tiny_run.put(piped, tiny_run.batch()))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    for seed in range(3):
        state, _ = piped.step(state, tiny_run.put(piped, tiny_run.batch(4, seed)))
    assert piped.step._cache_size() == 1
    assert jax.tree.map(lambda a: a.sharding, state) == piped.state_shardings
