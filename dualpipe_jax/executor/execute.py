"""`pipeline_value_and_grad`: one `shard_map` program that runs any schedule.

The table is data: its columns are sharded over "pp", so that a rank sees its own. `lax.scan` walks over the ticks; a
tick runs the rank's cell and then moves what the cell produced one rank to the right and one to the left. Gradients
are summed in float32 over microbatches, and after the last tick over mirrored copies and data shards, once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from dualpipe_jax.executor import branch, buffers, layout
from dualpipe_jax.executor.cells import (
    COLUMNS,
    Cells,
    Operation,
    OperationTable,
    State,
    operation_table,
    operations,
)
from dualpipe_jax.executor.mesh import PIPELINE_AXIS, data_axes
from dualpipe_jax.executor.stages import StageFns, kinds_of, split_stages
from dualpipe_jax.schedule import Kind, Schedule, Segment, TickTable, lower
from dualpipe_jax.schedule.split import kinds_in, with_split_backward

PyTree = Any
_REPLICATED = PartitionSpec()
Form = Literal["auto", "loops", "switch"]


class PipelineParams(NamedTuple):
    """Parameters, and gradients in the same arrangement.

    Attributes:
        stages: as `stack_stages` makes it: one pytree for each slot that a rank owns, leaves [num_ranks, ...].
        shared: parameters that more than one rank or none in particular uses (embedding, head), whole.
    """

    stages: tuple[PyTree, ...]
    shared: PyTree


class Aux(NamedTuple):
    """Statistics, summed over microbatches and data shards.

    Attributes:
        stages: what stages returned as `stats`, arranged as `PipelineParams.stages`.
        last: what the last function returned as `stats`.
    """

    stages: tuple[PyTree, ...]
    last: PyTree


GradFn = Callable[[PipelineParams, PyTree], tuple[tuple[jax.Array, Aux], PipelineParams]]


def pipeline_value_and_grad(
    fns: StageFns,
    schedule: Schedule,
    *,
    mesh: Mesh,
    stage_specs: PyTree = _REPLICATED,
    shared_specs: PyTree = _REPLICATED,
    batch_spec: PartitionSpec | None = None,
    form: Form = "auto",
) -> GradFn:
    """Loss and gradients of a model cut into pipeline stages, computed by a schedule.

    The loss is the sum of what `fns.last` and the stages' `StageOutput.loss` return, over all microbatches and all
    shards of the batch; for a mean, weight each microbatch's rows accordingly beforehand.

    Args:
        fns: the model's first, stage and last functions.
        schedule: from `dualpipe_jax.schedule.build`.
        mesh: has an axis "pp" of the schedule's number of ranks; all other axes split the batch's rows. Functions
            may use collectives over those.
        stage_specs: `PartitionSpec` of each leaf of one stage's parameters over the data axes (a prefix pytree), e.g.
            experts over "ep". Default: replicated. Gradients are summed over the data axes that a leaf's spec does
            not name.
        shared_specs: the same for the shared parameters.
        batch_spec: of the batch's leaves; default (None, data axes): dim 0 is the microbatch, dim 1 its rows.
        form: how cells are branched to, see `branch`; "auto" takes "loops" on CPU and "switch" elsewhere.

    Returns:
        `grad_fn(params: PipelineParams, batch) -> ((loss, aux), grads)`, to be called under `jax.jit`. Batch leaves
        are [num_microbatches, rows, ...]; loss is float32; grads are float32, in the arrangement of params.

    Raises:
        ValueError: mesh, batch or functions do not fit the schedule.

    References:
        DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.2.1 (DualPipe).
    """
    _check_mesh(mesh, schedule)
    program = _Program.build(fns, schedule, mesh, form)
    stage_specs, shared_specs = _Specs(stage_specs), _Specs(shared_specs)
    rows = PartitionSpec(None, data_axes(mesh)) if batch_spec is None else batch_spec
    owned: Any = PartitionSpec(PIPELINE_AXIS)

    def grad_fn(params: PipelineParams, batch: PyTree) -> tuple[tuple[jax.Array, Aux], PipelineParams]:
        _check_batch(batch, schedule.num_microbatches)
        stage = tuple(stage_specs.prefixed(tree, PIPELINE_AXIS) for tree in params.stages)
        shared = shared_specs.full(params.shared)
        specs = PipelineParams(stage, shared)
        run = jax.shard_map(
            lambda params, batch, rows: program.run(params, batch, rows, stage, shared),
            mesh=mesh,
            in_specs=(specs, rows, PartitionSpec(None, PIPELINE_AXIS)),
            out_specs=((PartitionSpec(), Aux(owned, PartitionSpec())), specs),
            check_vma=False,
        )
        return run(params, batch, jnp.asarray(program.rows))

    return grad_fn


class _Specs:
    """A prefix pytree of `PartitionSpec`s, spread over the leaves that it governs."""

    def __init__(self, specs: PyTree) -> None:
        self.specs = specs

    def full(self, tree: PyTree) -> PyTree:
        is_spec = lambda s: isinstance(s, PartitionSpec)  # noqa: E731
        return jax.tree.map(lambda s, t: jax.tree.map(lambda _: s, t), self.specs, tree, is_leaf=is_spec)

    def prefixed(self, tree: PyTree, axis: str) -> PyTree:
        return jax.tree.map(
            lambda s: PartitionSpec(axis, *s), self.full(tree), is_leaf=lambda s: isinstance(s, PartitionSpec)
        )


@dataclass(frozen=True)
class _Program:
    """All that is known before tracing: the lowered table as one int32 array, and which operations are where."""

    fns: StageFns
    schedule: Schedule
    table: TickTable
    stage_kinds: tuple[int, ...]
    distinct: tuple[Any, ...]
    ops: OperationTable
    cells: np.ndarray
    rows: np.ndarray
    mesh: Mesh
    form: str

    @classmethod
    def build(cls, fns: StageFns, schedule: Schedule, mesh: Mesh, form: Form) -> _Program:
        functions = fns.per_stage(schedule.placement.num_stages)
        stage_kinds, distinct = kinds_of(functions)
        platform = mesh.devices.flat[0].platform
        chosen = ("loops" if platform == "cpu" else "switch") if form == "auto" else form
        if chosen == "loops" and {Kind.B, Kind.I} <= kinds_in(schedule):
            # Operations run one after the other here: a full backward as its halves is a third less to compile.
            schedule = with_split_backward(schedule)
        table = lower(schedule, stage_kinds)
        ops = operation_table(table, stage_kinds)
        cells, index = branch.distinct_cells(ops.active)
        columns = np.stack([_column(table, name) for name in COLUMNS], axis=-1)
        rows = np.concatenate([columns, index[..., None], ops.active], axis=-1).astype(np.int32)
        return cls(fns, schedule, table, stage_kinds, distinct, ops, cells, rows, mesh, chosen)

    def run(
        self, params: PipelineParams, batch: PyTree, rows: jax.Array, stage_specs: PyTree, shared_specs: PyTree
    ) -> tuple[tuple[jax.Array, Aux], PipelineParams]:
        """The body of the `shard_map`: one device's part."""
        placement = self.schedule.placement
        owned = jax.tree.map(lambda leaf: leaf[0], params.stages)
        cells = self._cells(layout.copies(owned, placement), params.shared, batch)
        state = cells.initial_state()
        ops = operations(cells, self.ops.names)
        for segment in self._segments():
            cycle = max(1, len(segment.patterns))
            ticks = rows[segment.start : segment.stop, 0]
            blocks = ticks.reshape(-1, cycle, ticks.shape[-1])
            state, _ = jax.lax.scan(partial(self._block, ops, segment, cycle), state, blocks)
        axes = data_axes(self.mesh)
        everywhere = (PIPELINE_AXIS, *axes)
        stage_grads = _psum_missing(layout.fold(state.stage_grads, placement), stage_specs, axes)
        shared_grads = _psum_missing(state.shared_grads, shared_specs, everywhere)
        stats = jax.lax.psum(layout.fold(state.stage_stats, placement), axes)
        aux = Aux(jax.tree.map(lambda a: a[None], stats), jax.lax.psum(state.last_stats, everywhere))
        grads = PipelineParams(jax.tree.map(lambda a: a[None], stage_grads), shared_grads)
        return (jax.lax.psum(state.loss, everywhere), aux), grads

    def _cells(self, slots: tuple[PyTree, ...], shared: PyTree, batch: PyTree) -> Cells:
        microbatch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batch)
        slot_of_kind = [
            self.schedule.placement.slot_of(self.stage_kinds.index(k), 0) for k in range(len(self.distinct))
        ]
        splits = split_stages(self.fns, self.distinct, [slots[s] for s in slot_of_kind], shared, microbatch)
        return Cells(self.table, splits, slots, shared, batch)

    def _segments(self) -> tuple[Segment, ...]:
        """The table's; but loops gain nothing from segments, and would compile each anew."""
        segments = self.table.segments
        if self.form != "loops":
            return segments
        channels = frozenset().union(*(s.channels for s in segments))
        return (Segment(0, len(self.rows), False, channels),)

    def _block(
        self, ops: list[Operation], segment: Segment, cycle: int, state: State, block: jax.Array
    ) -> tuple[State, None]:
        """Run `cycle` ticks, int32 [cycle, columns]."""
        num = len(COLUMNS)
        for i in range(cycle):
            row = branch.row_columns(COLUMNS, block[i, :num])
            cell, flags = block[i, num], block[i, num + 1 :]
            if self.form == "loops":
                state = branch.run_loops(ops, state, row, flags)
            elif segment.uniform:
                active = self.ops.active[segment.start + i : segment.stop : cycle]
                state = branch.run_straight(ops, active, state, row, flags)
            else:
                state = branch.run_switch(ops, self.cells, state, row, cell)
            state = self._exchange(state, row, segment.channels)
        return state, None

    def _exchange(self, state: State, row: dict[str, jax.Array], channels: frozenset[str]) -> State:
        """Move this tick's results to the neighbours' inboxes. A rank that expects nothing writes to scratch."""
        placement = self.schedule.placement
        ranks = range(placement.num_ranks)
        for direction, step in (("right", 1), ("left", -1)):
            pairs = [(r, (r + step) % len(ranks)) for r in ranks if placement.is_ring or r + step in ranks]
            if f"{direction}_activation" in channels:
                message = _permute(state.sent_activation, pairs)
                slot = row[f"receive_{direction}_activation"]
                state = state._replace(activations=buffers.write(state.activations, slot, message))
            if f"{direction}_gradient" in channels:
                message = _permute(state.sent_gradient, pairs)
                slot = row[f"receive_{direction}_gradient"]
                state = state._replace(gradients=buffers.write(state.gradients, slot, message))
        return state


def _permute(tree: PyTree, pairs: list[tuple[int, int]]) -> PyTree:
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, PIPELINE_AXIS, pairs), tree)


_SCRATCH_OF = {
    "forward_input": "num_activation_slots",  # stage 0 reads what `first` put there
    "forward_local": "num_activation_slots",
    "receive_right_activation": "num_activation_slots",
    "receive_left_activation": "num_activation_slots",
    "backward_local": "num_gradient_slots",
    "receive_right_gradient": "num_gradient_slots",
    "receive_left_gradient": "num_gradient_slots",
}


def _column(table: TickTable, name: str) -> np.ndarray:
    """A column with every "nowhere" (-1) turned into the scratch slot of its inbox, or 0 where it is not read."""
    column = getattr(table, name)
    scratch = getattr(table, _SCRATCH_OF[name]) if name in _SCRATCH_OF else 0
    return np.where(column < 0, scratch, column)


def _psum_missing(tree: PyTree, specs: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Sum each leaf over those `axes` that its spec does not name; leaves that need the same sum go together."""
    structure: Any
    leaves, structure = jax.tree.flatten(tree)
    flat_specs = structure.flatten_up_to(specs)
    missing = [tuple(a for a in axes if a not in _names(spec)) for spec in flat_specs]
    for group in dict.fromkeys(missing):
        where = [i for i, m in enumerate(missing) if m == group]
        if group:
            summed = jax.lax.psum([leaves[i] for i in where], group)
            for i, leaf in zip(where, summed, strict=True):
                leaves[i] = leaf
    return structure.unflatten(leaves)


def _names(spec: PartitionSpec) -> set[str]:
    return {name for entry in spec if entry is not None for name in ((entry,) if isinstance(entry, str) else entry)}


def _check_mesh(mesh: Mesh, schedule: Schedule) -> None:
    ranks = schedule.placement.num_ranks
    if PIPELINE_AXIS not in mesh.axis_names or mesh.shape[PIPELINE_AXIS] != ranks:
        raise ValueError(
            f'{schedule.name} runs on {ranks} ranks: the mesh needs an axis "pp" of that size, has {mesh.shape}'
        )


def _check_batch(batch: PyTree, num_microbatches: int) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if leaf.ndim < 2 or leaf.shape[0] != num_microbatches:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} has shape {leaf.shape}; dim 0 must be the schedule's "
                f"{num_microbatches} microbatches, dim 1 the rows of each"
            )
