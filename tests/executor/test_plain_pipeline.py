"""The executor on a small plain-JAX model: every schedule equals the unpipelined reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax import (
    LastOutput,
    PipelineParams,
    StageFns,
    StageOutput,
    build,
    make_mesh,
    pipeline_value_and_grad,
    reference_value_and_grad,
    stack_stages,
    unstack_stages,
)
from dualpipe_jax.schedule import MOE_COSTS, Action, Kind, Memory, Placement, Schedule, lower, search

# float32: sums over microbatches and shards in another order.
TOLERANCE = 1e-5
VOCAB, WIDTH, ROWS, SEQ = 11, 8, 4, 3


def first(shared, microbatch):
    return jnp.take(shared["embedding"], microbatch["tokens"], axis=0)


def stage(params, shared, x, microbatch):
    del microbatch
    y = x + jnp.tanh(x @ params["w"] + params["b"][None, None]) @ shared["mix"]
    return StageOutput(y, 1e-3 * jnp.sum(y**2), {"rows": jnp.int32(y.shape[0])})


def wide_stage(params, shared, x, microbatch):
    """Another kind of stage: other code, other residuals."""
    y = jnp.sin(x @ params["w"]) @ params["w"].T + x
    return StageOutput(stage(params, shared, y, microbatch).y, 0.0, {"rows": jnp.int32(y.shape[0])})


def last(shared, y, microbatch):
    logits = y @ shared["embedding"].T  # tied
    losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, microbatch["tokens"][..., None], -1)[..., 0]
    return LastOutput(jnp.sum(losses), {"tokens": jnp.int32(losses.size)})


def problem(num_stages, num_microbatches, rows=ROWS):
    keys = jax.random.split(jax.random.key(0), num_stages + 3)
    stages = [
        {"w": jax.random.normal(k, (WIDTH, WIDTH)) / 3, "b": jax.random.normal(k, (WIDTH,)), "unused": jnp.ones(2)}
        for k in keys[3:]
    ]
    shared = {
        "embedding": jax.random.normal(keys[0], (VOCAB, WIDTH)),
        "mix": jax.random.normal(keys[1], (WIDTH, WIDTH)) / 3,
    }
    batch = {"tokens": jax.random.randint(keys[2], (num_microbatches, rows, SEQ), 0, VOCAB)}
    return stages, shared, batch


def assert_close(got, want):
    scale = max(float(jnp.max(jnp.abs(want))), 1e-6)
    np.testing.assert_allclose(np.asarray(got) / scale, np.asarray(want) / scale, rtol=0, atol=TOLERANCE)


def check(name, ranks, microbatches, dp=1, ep=1, fns=None, form="operations", **options):
    check_schedule(build(name, num_ranks=ranks, num_microbatches=microbatches, **options), dp, ep, fns, form)


def check_schedule(schedule, dp=1, ep=1, fns=None, form="operations"):
    ranks, microbatches = schedule.placement.num_ranks, schedule.num_microbatches
    fns = fns or StageFns(first, stage, last)
    stages, shared, batch = problem(schedule.placement.num_stages, microbatches)
    mesh = make_mesh(ranks, dp, ep)
    grad_fn = pipeline_value_and_grad(fns, schedule, mesh=mesh, form=form)
    params = PipelineParams(stack_stages(stages, schedule.placement), shared)
    (loss, aux), grads = jax.device_get(jax.jit(grad_fn)(params, batch))
    (want_loss, _), want = jax.jit(lambda *a: reference_value_and_grad(fns, *a))(stages, shared, batch)
    assert_close(loss, want_loss)
    got = (unstack_stages(grads.stages, schedule.placement), grads.shared)
    jax.tree.map(assert_close, got, want)
    for tree in got[0]:
        assert not np.any(np.asarray(tree["unused"]))  # exact 0
    assert int(aux.last["tokens"]) == microbatches * ROWS * SEQ
    rows = [s["rows"] for s in unstack_stages(aux.stages, schedule.placement)]
    assert [int(r) for r in rows] == [microbatches * ROWS] * schedule.placement.num_stages


@pytest.mark.parametrize("form", ["operations", "cells"])
@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"),
    [
        ("1f1b", 1, 2),
        ("1f1b", 2, 1),
        ("1f1b", 4, 3),
        ("1f1b", 4, 9),
        ("dualpipe", 2, 4),
        ("dualpipe", 4, 10),
        ("dualpipe_v", 1, 2),
        ("dualpipe_v", 2, 5),
        ("dualpipe_v", 4, 8),
    ],
)
def test_equals_reference(name, ranks, microbatches, form):
    """Cases 1 and 10: every number of microbatches that the builder takes; a tied embedding."""
    check(name, ranks, microbatches, form=form)


@pytest.mark.parametrize(
    "name", ["gpipe", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "wave", "auto"]
)
def test_every_other_builder(name):
    """A schedule is data: what builds is run by the same executor."""
    options = {"stages_per_rank": 2} if name in ("interleaved_1f1b", "wave", "auto") else {}
    check(name, 2, 4, **options)
    check(name, 4, 8, form="operations", slot_rule="steady" if name == "zb_v" else "depth", **options)


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "dualpipe_v"])
def test_data_axes(name):
    check(name, 2, 4, dp=2, ep=2)


@pytest.mark.parametrize("form", ["operations", "cells"])
def test_different_kinds_of_stage(form):
    check("1f1b", 4, 6, fns=StageFns(first, [wide_stage, stage, wide_stage, stage], last), form=form)
    check("dualpipe", 4, 8, fns=StageFns(first, [wide_stage, stage, stage, stage], last), form=form)


def test_straight_line_segments():
    """A long steady state has ticks that are the same cell on all ranks, and runs them without a branch."""
    for name, cycle in (("dualpipe_v", 2), ("dualpipe", 2), ("gpipe", 1)):
        schedule = build(name, num_ranks=2, num_microbatches=16, slot_rule="steady")
        patterns = [len(segment.patterns) for segment in lower(schedule).segments if segment.uniform]
        assert cycle in patterns, patterns
        check(name, 2, 16, form="cells", slot_rule="steady")


def test_traced_once():
    schedule = build("dualpipe", num_ranks=2, num_microbatches=4)
    traces = []

    def counted(*args):
        traces.append(1)
        return stage(*args)

    fns = StageFns(first, counted, last)
    stages, shared, batch = problem(2, 4)
    params = PipelineParams(stack_stages(stages, schedule.placement), shared)
    step = jax.jit(pipeline_value_and_grad(fns, schedule, mesh=make_mesh(2)))
    step(params, batch)
    step(params, jax.tree.map(lambda a: a + 0, batch))
    assert len(traces) == 1


def test_psum_over_data_shards():
    """Case 9: w = 1, data 0..3 on 4 devices, loss = sum w x: gradient 6 on 1, 2 and 4 shards."""

    def product(params, shared, x, microbatch):
        return x * params["w"]

    fns = StageFns(lambda shared, m: m["x"], product, lambda shared, y, m: jnp.sum(y))
    schedule = build("1f1b", num_ranks=1, num_microbatches=1)
    batch = {"x": jnp.arange(4.0).reshape(1, 4)}
    for dp, ep in ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2)):
        grad_fn = pipeline_value_and_grad(fns, schedule, mesh=make_mesh(1, dp, ep))
        params = PipelineParams(({"w": jnp.ones(1)},), {})
        (loss, _), grads = jax.jit(grad_fn)(params, batch)
        assert float(loss) == 6.0
        assert float(grads.stages[0]["w"][0]) == 6.0


def test_errors_before_compiling():
    schedule = build("1f1b", num_ranks=2, num_microbatches=3)
    fns = StageFns(first, stage, last)
    stages, shared, batch = problem(2, 3)
    params = PipelineParams(stack_stages(stages, schedule.placement), shared)
    with pytest.raises(ValueError, match=r'axis "pp" of that size'):
        pipeline_value_and_grad(fns, schedule, mesh=make_mesh(4))
    with pytest.raises(ValueError, match="needs 16 devices, found 8"):
        make_mesh(8, 2)
    with pytest.raises(ValueError, match="dim 0 must be the schedule's 3 microbatches"):
        pipeline_value_and_grad(fns, schedule, mesh=make_mesh(2))(params, problem(2, 4)[2])
    with pytest.raises(ValueError, match="3 stages given, the placement has 2"):
        stack_stages(problem(3, 3)[0], schedule.placement)
    with pytest.raises(ValueError, match="1 stage functions given, the schedule has 2 stages"):
        pipeline_value_and_grad(StageFns(first, [stage], last), schedule, mesh=make_mesh(2))
    narrowing = StageFns(first, lambda p, s, x, m: x[..., :4], last)
    with pytest.raises(ValueError, match="must return what it takes"):
        jax.jit(pipeline_value_and_grad(narrowing, schedule, mesh=make_mesh(2)))(params, batch)
    vector = StageFns(first, stage, lambda s, y, m: y[0, 0])
    with pytest.raises(ValueError, match="must return a scalar loss"):
        jax.jit(pipeline_value_and_grad(vector, schedule, mesh=make_mesh(2)))(params, batch)


def test_a_mesh_of_ranks_only():
    """A user's own mesh may have no data axis at all."""
    schedule = build("dualpipe", num_ranks=2, num_microbatches=4)
    fns = StageFns(first, stage, last)
    stages, shared, batch = problem(2, 4)
    mesh = jax.make_mesh((2,), ("pp",), axis_types=(jax.sharding.AxisType.Auto,))
    params = PipelineParams(stack_stages(stages, schedule.placement), shared)
    (loss, _), _ = jax.jit(pipeline_value_and_grad(fns, schedule, mesh=mesh))(params, batch)
    (want, _), _ = jax.jit(lambda *a: reference_value_and_grad(fns, *a))(stages, shared, batch)
    assert_close(loss, want)


def test_ranks_in_different_slots_share_straight_code():
    """Searched schedules for experts' costs run pairs on all ranks, of whichever of their stages."""
    placement = Placement("loop", 2, 3)
    schedule = search([placement], 12, MOE_COSTS, Memory(6.0)).schedule
    segments = lower(schedule).segments
    free = [s for s in segments if s.uniform and any(o.slot is None for p in s.patterns for o in p)]
    assert sum(s.stop - s.start for s in free) > 12
    check_schedule(schedule, form="cells")


def test_a_cell_may_hold_a_forward_and_its_own_backward():
    """Cells read before they write, but not what they make themselves."""
    placement = Placement("loop", 1, 1)
    cells = tuple((Action(Kind.F, 0, 0, m), Action(Kind.B, 0, 0, m)) for m in range(3))
    check_schedule(Schedule("chained", placement, 3, (cells,)), form="cells")
