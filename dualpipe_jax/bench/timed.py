"""A pipeline whose stages wait instead of work, so that schedules can be timed on fewer cores than ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dualpipe_jax.executor import PipelineParams, StageFns, make_mesh, pipeline_value_and_grad
from dualpipe_jax.hand_written import hand_written
from dualpipe_jax.schedule import Costs, Schedule
from dualpipe_jax.schedule.costs import cost_at


def timed_step(schedule: Schedule, seconds: Costs) -> Callable[[], float]:
    """A compiled step of the real executor in which F, I and W of a stage take the given time, and no processor.

    Args:
        schedule: as many devices as it has ranks must be there; see `emulate`.
        seconds: of each stage; only forward, backward_input and backward_weight count.

    Returns:
        A function that runs a step and returns the seconds that it took.
    """
    placement = schedule.placement
    stages = [_Waiting(*(cost_at(cost, s) for cost in _times(seconds))) for s in range(placement.num_stages)]
    fns = StageFns(lambda _, m: m["x"], stages, lambda _, y, m: jnp.sum(y))
    owned = 1 if placement.num_directions == 2 else placement.slots
    params = PipelineParams(tuple(jnp.ones((placement.num_ranks, 1)) for _ in range(owned)), {})
    batch = {"x": jnp.ones((schedule.num_microbatches, 1, 8))}
    grad_fn = pipeline_value_and_grad(fns, schedule, mesh=make_mesh(placement.num_ranks))
    step = jax.jit(grad_fn).lower(params, batch).compile()

    def run() -> float:
        began = time.perf_counter()
        jax.block_until_ready(step(params, batch))
        return time.perf_counter() - began

    return run


def _times(costs: Costs) -> tuple[float | tuple[float, ...], ...]:
    return costs.forward, costs.backward_input, costs.backward_weight


class _Waiting:
    """A stage that hands on what it gets, after a while. Stages of equal times are one kind."""

    def __init__(self, forward: float, backward_input: float, backward_weight: float) -> None:
        self.seconds = forward, backward_input, backward_weight

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Waiting) and self.seconds == other.seconds

    def __hash__(self) -> int:
        return hash(self.seconds)

    def __call__(self, params: jax.Array, shared: None, x: jax.Array, microbatch: None) -> jax.Array:
        forward, backward_input, backward_weight = self.seconds

        def run(w: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return _after(forward, x), None

        def run_input(w: jax.Array, kept: None, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
            return _after(backward_input, dy), dy

        def run_weight(w: jax.Array, kept: None, cut: jax.Array) -> jax.Array:
            return _after(backward_weight, cut)[0, :1]

        return hand_written(run, run_input, run_weight)(params, x)


def _after(seconds: float, x: jax.Array) -> jax.Array:
    """x, when the time is over."""
    return jax.pure_callback(partial(_sleep, seconds), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def _sleep(seconds: float, x: jax.Array) -> np.ndarray:
    time.sleep(seconds)
    return np.asarray(x)
