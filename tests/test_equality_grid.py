"""Correct means equal: loss, every gradient and the gradient's norm of every schedule and mesh are the reference's.

The model has everything that can go wrong at once: a dense first layer, experts, an uneven number of layers, masked
targets, auxiliary losses, tied or untied embeddings. Gradients are compared before clipping.
"""

import dataclasses
import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dualpipe_jax import PipelineParams, build, make_mesh, pipeline_value_and_grad, reference_value_and_grad
from dualpipe_jax.config import ModelConfig
from dualpipe_jax.model.model import Model, expert_specs, with_weights
from dualpipe_jax.model.partition import from_pipeline, from_stages, partition, to_pipeline, to_stages
from moe.config import MoEConfig

# float32: sums over microbatches, shards, experts and ranks in another order.
TOLERANCE = 1e-5
SEQ, VOCAB = 8, 13
NUM_SEQUENCES = 32  # by which auxiliary losses are divided: here only a scale
MOE = MoEConfig(
    d_ff=8, num_experts=4, top_k=2, block_size=4, balance_loss_weight=0.1, z_loss_weight=0.01, scoring="sigmoid"
)
CONFIG = ModelConfig(
    vocab_size=VOCAB, d_model=16, num_layers=9, num_heads=2, num_kv_heads=1, d_ff=12, num_dense_layers=1, moe=MOE
)


def num_layers_for(stages):
    return stages + 1  # the first stage has the dense layer and one more, the others one: uneven


@cache
def model_of(config, num_sequences, axis, recompute):
    return Model(config, num_sequences, SEQ, axis, recompute)


@cache
def parameters(config):
    params = jax.jit(model_of(config, 1, None, False).init)(jax.random.key(0))
    # Of size one: in front of a norm, an embedding of size 0.02 would magnify every rounding fifty times.
    return {**params, "embedding": {"table": 50.0 * params["embedding"]["table"]}}


def batch_of(sequences):
    """[sequences, SEQ] tokens and targets, a third of the targets and one whole sequence ignored."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (sequences, SEQ), dtype=np.int32)
    targets = np.where(rng.random((sequences, SEQ)) < 0.3, -1, np.roll(tokens, -1, axis=1)).astype(np.int32)
    targets[-1] = -1
    return {"tokens": tokens, "targets": targets}


def cut(batch, microbatches):
    return with_weights({k: jnp.asarray(v.reshape(microbatches, -1, SEQ)) for k, v in batch.items()})


@cache
def reference_fn(config):
    """Unpipelined, on one device."""
    model = model_of(config, NUM_SEQUENCES, None, False)
    stages = partition(config.num_layers, model.num_dense, 1)
    fns = model.stage_fns(stages)
    params = to_stages(parameters(config), stages)
    run = jax.jit(lambda batch: reference_value_and_grad(fns, *params, batch))

    def value_and_grad(batch):
        (loss, (stats, _)), grads = run(batch)
        return loss, from_stages(*grads, stages), stats[0]

    return value_and_grad


@cache
def reference(config, sequences):
    """The sum over sequences, in float64: so one program serves batches of all sizes."""
    batch = cut(batch_of(sequences), sequences)
    total = None
    for i in range(sequences):
        one = jax.tree.map(np.float64, reference_fn(config)(jax.tree.map(lambda a, i=i: a[i : i + 1], batch)))
        total = one if total is None else jax.tree.map(np.add, total, one)
    return total


def assert_close(path, got, want):
    scale = max(float(np.max(np.abs(want))), 1e-8)
    worst = float(np.max(np.abs(np.asarray(got) - np.asarray(want)))) / scale
    assert worst <= TOLERANCE, f"{jax.tree_util.keystr(path)}: relative difference {worst:.2e}"


def check(name, pp, microbatches, ep=1, dp=1, recompute=False, config=CONFIG, form="operations", **options):
    """Compare for a number of microbatches, or for several that share a compiled program."""
    counts = (microbatches,) if isinstance(microbatches, int) else microbatches
    schedules = [build(name, num_ranks=pp, num_microbatches=m, **options) for m in counts]
    placement = schedules[0].placement
    config = dataclasses.replace(config, num_layers=num_layers_for(placement.num_stages))
    model = model_of(config, NUM_SEQUENCES, "ep" if ep > 1 else None, recompute)
    stages = partition(config.num_layers, model.num_dense, placement.num_stages)
    params = to_pipeline(parameters(config), stages, placement)
    grad_fn = jax.jit(
        pipeline_value_and_grad(
            model.stage_fns(stages),
            schedules,
            mesh=make_mesh(pp, dp, ep),
            stage_specs=expert_specs(params.stages[0]),
            form=form,
        )
    )
    for which, m in enumerate(counts):
        want = reference(config, m * ep * dp)
        # To the host at once: operation by operation, sharded arrays would make many small programs with collectives
        # run side by side, and emulated devices may then wait for each other until XLA gives up.
        given = params, roomy(cut(batch_of(m * ep * dp), m), max(counts)), which
        (loss, aux), grads = jax.device_get(grad_fn(*given))
        assert isinstance(grads, PipelineParams)
        compare(loss, from_pipeline(grads, stages, placement), aux, want)
    grad_fn.clear_cache()  # or programs of a whole grid would fill the memory


def roomy(batch, microbatches):
    """The batch with microbatches at its end that would spoil every result, were they read."""
    missing = microbatches - len(batch["weights"])
    spoilt = {"tokens": 0, "targets": 0, "weights": np.nan}
    return {k: jnp.pad(v, ((0, missing), (0, 0), (0, 0)), constant_values=spoilt[k]) for k, v in batch.items()}


def compare(loss, got, aux, reference):
    want_loss, want, want_stats = reference
    assert_close((), loss, want_loss)
    jax.tree_util.tree_map_with_path(assert_close, got, want)
    assert_close((), optax.tree.norm(got), optax.tree.norm(jax.tree.map(jnp.float32, want)))
    counts = np.concatenate([np.asarray(s["counts"]).reshape(-1, MOE.num_experts) for s in aux.stages])
    np.testing.assert_array_equal(sorted(counts[counts.sum(-1) > 0].tolist()), sorted(want_stats["counts"].tolist()))


def minimum(name, pp):
    return {"1f1b": 1, "dualpipe": 2 * pp, "dualpipe_v": 2 * pp}[name]


def microbatch_counts(name, pp):
    """The fewest, an odd number above the ranks (even where two directions share it), and twice the ranks."""
    odd = pp + 1 + pp % 2 if name == "1f1b" else 2 * pp + 1
    return tuple(sorted({minimum(name, pp), odd + (name == "dualpipe"), 2 * pp + 2}))


def grid():
    """Every schedule, mesh and recomputation, each with all numbers of microbatches."""
    for name, pp, ep, dp, recompute in itertools.product(
        ("1f1b", "dualpipe", "dualpipe_v"), (1, 2, 4), (1, 2, 4), (1, 2), (False, True)
    ):
        if pp * ep * dp <= 8 and not (name == "dualpipe" and pp == 1):
            yield name, pp, microbatch_counts(name, pp), ep, dp, recompute


QUICK = [
    ("1f1b", 1, 1, 1, 1, False),
    ("1f1b", 4, 5, 2, 1, False),
    ("dualpipe", 2, 4, 2, 2, False),
    ("dualpipe", 4, 10, 2, 1, True),
    ("dualpipe", 4, 8, 1, 2, False),
    ("dualpipe_v", 1, 3, 4, 2, False),
    ("dualpipe_v", 2, 5, 4, 1, False),
    ("dualpipe_v", 4, 9, 1, 2, True),
    ("1f1b", 2, (1, 3, 6), 1, 2, False),
]
ids = lambda case: "-".join(map(str, case)).replace(", ", "_")  # noqa: E731


def test_the_reference_may_be_cut():
    """Nothing cut at all gives the same as the sum over sequences."""
    config = dataclasses.replace(CONFIG, num_layers=3)
    loss, grads, stats = reference_fn(config)(cut(batch_of(4), 1))
    want_loss, want, want_stats = reference(config, 4)
    assert_close((), loss, want_loss)
    jax.tree_util.tree_map_with_path(assert_close, grads, want)
    np.testing.assert_array_equal(stats["counts"], want_stats["counts"])


@pytest.mark.parametrize("case", QUICK, ids=ids)
def test_equals_reference(case):
    check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in grid() if case not in QUICK], ids=ids)
def test_equals_reference_everywhere(case):
    check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "interleaved_1f1b", "zb_h1", "zb_v", "v_min", "auto"])
def test_other_schedules(name):
    """The other builders and the search, with experts; `tests/executor` has all of them with a smaller model."""
    options = {"stages_per_rank": 2} if name in ("interleaved_1f1b", "auto") else {}
    check(name, 2, 4, 2, 1, True, **options)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
def test_the_form_for_accelerators(name):
    """Switch and straight-line code, run on CPU; few layers, since XLA:CPU compiles each cell anew."""
    check(name, 2, 12, 2, 1, form="cells", slot_rule="steady")


def test_tied_embedding():
    """Case 10: the gradient is that of both uses, once."""
    check("dualpipe", 2, 4, 2, config=dataclasses.replace(CONFIG, tied_embeddings=True))
    check("1f1b", 2, 2, config=dataclasses.replace(CONFIG, tied_embeddings=True))


def test_zeroing_the_last_layer_changes_the_loss():
    """Case 2: every layer exists."""
    config = dataclasses.replace(CONFIG, num_layers=5)
    schedule = build("dualpipe_v", num_ranks=2, num_microbatches=4)
    model = model_of(config, 4, None, False)
    stages = partition(5, model.num_dense, 4)
    grad_fn = jax.jit(pipeline_value_and_grad(model.stage_fns(stages), schedule, mesh=make_mesh(2)))
    params, batch = parameters(config), cut(batch_of(4), 4)
    losses = []
    for layer in (None, 0, 1, 2, 3):
        changed = [
            jax.tree.map(lambda a, off=i == layer: a * (1.0 - off), tree) for i, tree in enumerate(params["layers"])
        ]
        losses.append(
            float(grad_fn(to_pipeline({**params, "layers": changed}, stages, schedule.placement), batch)[0][0])
        )
    assert len({round(loss, 5) for loss in losses}) == 5
