"""`pipeline_value_and_grad`: one `shard_map` program that runs any schedule, or any of several; see `program`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dualpipe_jax import residuals
from dualpipe_jax.executor import buffers
from dualpipe_jax.executor.cells import COLUMNS, State
from dualpipe_jax.executor.memory import MemoryPlan
from dualpipe_jax.executor.mesh import PIPELINE_AXIS
from dualpipe_jax.executor.program import Aux, Form, PipelineParams, Program
from dualpipe_jax.executor.specs import Specs, batch_specs, check_batch, check_no_typed_keys
from dualpipe_jax.executor.stages import StageFns
from dualpipe_jax.residuals import Policy
from dualpipe_jax.schedule import Schedule

PyTree = Any
_REPLICATED = PartitionSpec()


@dataclass(frozen=True, eq=False)
class GradFn:
    """What `pipeline_value_and_grad` returns: `grad_fn(params, batch) -> ((loss, aux), grads)`, for `jax.jit`."""

    program: Program
    stage_specs: Specs
    shared_specs: Specs
    batch_spec: PyTree

    def __call__(
        self, params: PipelineParams, batch: PyTree, which: jax.Array | int = 0
    ) -> tuple[tuple[jax.Array, Aux], PipelineParams]:
        check_no_typed_keys({"params": params, "batch": batch})
        check_batch(batch, self.program.num_microbatches)
        specs, owned = self._param_specs(params), PartitionSpec(PIPELINE_AXIS)
        run = jax.shard_map(
            lambda params, batch, rows: self.program.run(params, batch, rows, specs.stages, specs.shared),
            mesh=self.program.mesh,
            in_specs=(specs, self._batch_specs(batch), PartitionSpec(None, PIPELINE_AXIS)),
            out_specs=((_REPLICATED, Aux(owned, _REPLICATED)), specs),  # type: ignore[arg-type]
            check_vma=False,
        )
        return run(params, batch, buffers.read(jnp.asarray(self.program.rows), jnp.asarray(which, jnp.int32)))

    def state_shapes(self, params: PipelineParams, batch: PyTree) -> State:
        """Shapes of what a device keeps from tick to tick. Arguments as of a call, arrays or shapes."""
        return jax.eval_shape(self._on_a_device(self.program.initial_state, params, batch), params, batch)

    def memory_plan(self, params: PipelineParams, batch: PyTree) -> MemoryPlan:
        """Bytes of what a device keeps from tick to tick; nothing is compiled."""
        one_way = self.program.placement.num_directions == 1
        slots = jax.eval_shape(self._on_a_device(lambda p, _: self.program.slots(p), params, batch), params, batch)
        return MemoryPlan.of(self.state_shapes(params, batch), copies=() if one_way else slots)

    def cell_bytes(self, params: PipelineParams, batch: PyTree) -> dict[str, int]:
        """Compile each cell (or operation, by `form`) alone: the bytes that it needs besides what is kept.

        The largest, and `memory_plan`, are what a step needs besides its arguments and results.
        """
        state = self.state_shapes(params, batch)
        row = {name: jax.ShapeDtypeStruct((), jnp.int32) for name in COLUMNS}
        found = {}
        for name, run in self.program.cells_alone():
            alone = jax.jit(self._on_a_device(run, params, batch, extra=2), donate_argnums=2)
            device = jax.tree.map(self._replicated, (state, row))
            analysis: Any = alone.lower(params, batch, *device).compile().memory_analysis()
            found[name] = analysis.temp_size_in_bytes
        return found

    def _replicated(self, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        whole = NamedSharding(self.program.mesh, _REPLICATED)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=whole)

    def _on_a_device(
        self, run: Callable[..., Any], params: PipelineParams, batch: PyTree, extra: int = 0
    ) -> Callable[..., Any]:
        """run(params, batch, ...) of one device's parts; what comes after the batch, and the result, is of a device."""
        return jax.shard_map(
            run,
            mesh=self.program.mesh,
            in_specs=(self._param_specs(params), self._batch_specs(batch), *[_REPLICATED] * extra),
            out_specs=_REPLICATED,  # so that the shapes of the whole are those of a part
            check_vma=False,
        )

    def _batch_specs(self, batch: PyTree) -> PyTree:
        return batch_specs(batch, self.program.mesh, self.batch_spec)

    def _param_specs(self, params: PipelineParams) -> PipelineParams:
        stages = tuple(self.stage_specs.prefixed(tree, PIPELINE_AXIS) for tree in params.stages)
        return PipelineParams(stages, self.shared_specs.full(params.shared))


def pipeline_value_and_grad(
    fns: StageFns,
    schedule: Schedule | Sequence[Schedule],
    *,
    mesh: Mesh,
    stage_specs: PyTree = _REPLICATED,
    shared_specs: PyTree = _REPLICATED,
    batch_spec: PyTree = None,
    form: Form = "auto",
    policy: Policy = residuals.DEFAULT,
) -> GradFn:
    """Loss and gradients of a model cut into pipeline stages, computed by a schedule.

    The loss is the sum of what `fns.last` and the stages' `StageOutput.loss` return, over all microbatches and all
    shards of the batch; for a mean, weight each microbatch's rows accordingly beforehand.

    Args:
        fns: the model's first, stage and last functions.
        schedule: from `dualpipe_jax.schedule.build`. Or several with the same placement, for a batch that grows in
            the course of training: one compiled program runs any of them.
        mesh: has an axis "pp" of the schedule's number of ranks; all other axes split the batch's rows. Functions
            may use collectives over those.
        stage_specs: `PartitionSpec` of each leaf of one stage's parameters over the data axes (a prefix pytree), e.g.
            experts over "ep". Default: replicated. Gradients are summed over the data axes that a leaf's spec does
            not name.
        shared_specs: the same for the shared parameters.
        batch_spec: `PartitionSpec` of the batch's leaves, or a prefix pytree of them. Default: dim 0 is the microbatch,
            dim 1 its rows, split over the data axes; leaves of one dim hold a value for each microbatch (its number,
            a step, a key for `dropout_key`), which all shards get.
        form: how a rank gets to its cell, see `branch`; "auto" takes "operations" on CPU and "cells" elsewhere.
        policy: what stages keep for their backward and what they compute again, see `residuals.Policy`.

    Returns:
        `grad_fn(params: PipelineParams, batch) -> ((loss, aux), grads)`, to be called under `jax.jit`. Batch leaves
        are [num_microbatches, rows, ...] or [num_microbatches]; loss is float32; grads are float32, in the arrangement
        of params (0 for integer leaves, such as the number of a layer). With several schedules
        `grad_fn(params, batch, which)`: which one to run, an int32 scalar that may be traced; the batch has room for
        the most microbatches of any, and what the schedule does not use is never read.
        `grad_fn.memory_plan(params, batch)` tells what a device keeps meanwhile.

    Raises:
        ValueError: mesh, batch or functions do not fit the schedule; or a schedule would not compute every gradient
            once (`ScheduleError`, the cells at fault marked). All is said before anything is compiled.

    References:
        DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.2.1 (DualPipe).
    """
    schedules = (schedule,) if isinstance(schedule, Schedule) else tuple(schedule)
    _check_schedules(schedules)
    _check_mesh(mesh, schedules[0])
    program = Program.build(fns, schedules, mesh, form, policy)
    return GradFn(program, Specs(stage_specs), Specs(shared_specs), batch_spec)


def _check_schedules(schedules: Sequence[Schedule]) -> None:
    if not schedules:
        raise ValueError("schedule is an empty sequence; give at least one")
    for other in schedules[1:]:
        if other.placement != schedules[0].placement:
            raise ValueError(
                f"schedules that share a program need the same placement: {schedules[0].placement} and "
                f"{other.placement} differ"
            )


def _check_mesh(mesh: Mesh, schedule: Schedule) -> None:
    ranks = schedule.placement.num_ranks
    if PIPELINE_AXIS not in mesh.axis_names or mesh.shape[PIPELINE_AXIS] != ranks:
        raise ValueError(
            f'{schedule.name} runs on {ranks} ranks: the mesh needs an axis "pp" of that size, has {mesh.shape}'
        )
