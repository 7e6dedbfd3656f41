"""What the compiled program does with the buffers: nothing but update them in place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax import PipelineParams, StageFns, build, make_mesh, pipeline_value_and_grad, stack_stages
from dualpipe_jax.schedule import lower


@pytest.fixture(autouse=True)
def _optimized():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


WIDTH, ROWS = 32, 8


def stage(params, shared, x, microbatch):
    for w in params["w"]:
        x = x + jnp.tanh(x @ w)
    return x


def compiled(schedule, layers=3):
    grad_fn, *args = problem(schedule, layers)
    return jax.jit(grad_fn).lower(*args).compile()


def problem(schedule, layers=3):
    """(gradient function, params, batch)."""
    placement = schedule.placement
    stages = [{"w": [jnp.full((WIDTH, WIDTH), 0.01)] * layers} for _ in range(placement.num_stages)]
    params = PipelineParams(stack_stages(stages, placement), {})
    batch = {"x": jnp.ones((schedule.num_microbatches, ROWS, WIDTH))}
    fns = StageFns(lambda shared, m: m["x"], stage, lambda shared, y, m: jnp.sum(y * y))
    mesh = make_mesh(placement.num_ranks)
    return pipeline_value_and_grad(fns, schedule, mesh=mesh), params, batch


def copied_bytes_in_loops(program):
    """Bytes of float buffers that `copy` instructions move each time a computation other than the entry runs."""
    computation, total = "", 0
    for line in program.as_text().splitlines():
        if re.match(r"^(ENTRY )?%?[\w.-]+ .*\{$", line):
            computation = line.split()[0]
        found = re.search(r"= f32\[([\d,]+)\]\S* copy\(", line)
        if found and computation != "ENTRY":
            total += 4 * int(np.prod([int(d) for d in found.group(1).split(",")]))
    return total


def residual_bytes(schedule):
    table = lower(schedule)
    slots = table.num_residual_slots[0] + table.num_weight_residual_slots[0]
    return slots * ROWS * WIDTH * 4  # at least one activation in each slot


def test_residuals_are_not_copied():
    """More microbatches in flight need more slots; the bytes that a tick copies stay those of the inboxes."""
    small, large = (build("1f1b", num_ranks=r, num_microbatches=16) for r in (2, 8))
    growth = residual_bytes(large) - residual_bytes(small)
    assert growth > 8 * ROWS * WIDTH * 4
    assert copied_bytes_in_loops(compiled(large)) - copied_bytes_in_loops(compiled(small)) < growth / 4


def test_temporary_memory_does_not_grow_with_microbatches():
    """1F1B keeps P activations whatever M is; only the rank's part of the table grows, an int32 for each column."""
    schedules = [build("1f1b", num_ranks=4, num_microbatches=m) for m in (8, 64)]
    few, many = (compiled(s).memory_analysis().temp_size_in_bytes for s in schedules)
    ticks = [len(lower(s).forward_stage) for s in schedules]
    assert many - few <= (ticks[1] - ticks[0]) * 4 * 40


def test_no_matmul_runs_outside_its_operation():
    """XLA would hoist a 0/1-trip loop's matmuls into the tick, where they run every time; the barrier keeps them in."""
    program = compiled(build("1f1b", num_ranks=2, num_microbatches=4)).as_text()
    bodies = {block.split(" ", 1)[0]: block for block in re.split(r"\n(?=\S)", program)}
    matmul = re.compile(r"custom-call.*matmul| dot\(")
    fused = {name for name, body in bodies.items() if "fused" in name and matmul.search(body)}
    ticks = [body for name, body in bodies.items() if name != "ENTRY" and body.count(" while(") >= 2]
    assert len(ticks) == 1  # the one computation with a loop for each operation
    assert sum(bool(matmul.search(body)) for body in bodies.values()) >= 3  # forward, input and weight gradient
    assert not matmul.search(ticks[0])
    assert not fused & set(re.findall(r"calls=(%[\w.-]+)", ticks[0]))


@pytest.mark.parametrize("form", ["operations", "cells"])
@pytest.mark.parametrize("name", ["1f1b", "zb_v", "dualpipe", "dualpipe_v"])
def test_memory_is_the_plan(name, form):
    """Buffers in their planned slots, and what the largest operation (or cell) needs when it is compiled alone."""
    schedule = build(name, num_ranks=2, num_microbatches=8)
    _, params, batch = problem(schedule)
    fns = StageFns(lambda shared, m: m["x"], stage, lambda shared, y, m: jnp.sum(y * y))
    grad_fn = pipeline_value_and_grad(fns, schedule, mesh=make_mesh(2), form=form)
    planned = grad_fn.memory_plan(params, batch).total + max(grad_fn.cell_bytes(params, batch).values())
    analysis = jax.jit(grad_fn).lower(params, batch).compile().memory_analysis()
    table = 4 * 40 * len(lower(schedule).forward_stage)  # a rank's part of it
    assert analysis.temp_size_in_bytes <= 1.05 * planned + table
