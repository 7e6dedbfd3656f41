"""All that is known before tracing, and the body of the `shard_map` that runs it.

The tables of one or more schedules become one int32 array, whose rows are data: `lax.scan` walks over the ticks; a tick
runs the rank's cell and then moves what the cell produced one rank to the right and one to the left. Gradients are
summed in float32 over microbatches, and after the last tick over mirrored copies and data shards, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dualpipe_jax.executor import branch, buffers, layout
from dualpipe_jax.executor.cells import (
    COLUMNS,
    Cells,
    OperationTable,
    Row,
    State,
    operation_table,
    operations,
)
from dualpipe_jax.executor.mesh import PIPELINE_AXIS, data_axes
from dualpipe_jax.executor.stages import StageFns, kinds_of, split_stages
from dualpipe_jax.residuals import Policy
from dualpipe_jax.schedule import Kind, Placement, Schedule, Segment, TickTable, concatenate_tables, lower
from dualpipe_jax.schedule.split import kinds_in, with_split_backward

PyTree = Any
Form = Literal["auto", "operations", "cells"]
Runner = Callable[[State, branch.Tick], State]


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


@dataclass(frozen=True)
class Program:
    """What a compiled step is made of.

    Attributes:
        table: of all schedules, one after the other, each with idle ticks to the length of the longest.
        stage_kinds: the kind of each stage. distinct: the stage function of each kind.
        ops: which operations there are, and where. cells: the distinct sets of them.
        rows: int32 [schedules, ticks, ranks, columns]: what a rank reads in a tick.
        chained: bool [ticks of all schedules, ranks]: in the same tick the rank runs a forward, and then the backward
            of what it made.
        form: "operations" or "cells", see `branch`.
        num_microbatches: the most of any schedule.
    """

    fns: StageFns
    placement: Placement
    table: TickTable
    stage_kinds: tuple[int, ...]
    distinct: tuple[Any, ...]
    ops: OperationTable
    cells: np.ndarray
    rows: np.ndarray
    chained: np.ndarray
    mesh: Mesh
    form: str
    policy: Policy
    num_microbatches: int

    @classmethod
    def build(cls, fns: StageFns, schedules: Sequence[Schedule], mesh: Mesh, form: Form, policy: Policy) -> Program:
        placement = schedules[0].placement
        stage_kinds, distinct = kinds_of(fns.per_stage(placement.num_stages))
        platform = mesh.devices.flat[0].platform
        chosen = ("operations" if platform == "cpu" else "cells") if form == "auto" else form
        if chosen == "operations" and {Kind.B, Kind.I} <= set().union(*map(kinds_in, schedules)):
            # Operations run one after the other here: a full backward as its halves is a third less to compile.
            schedules = [with_split_backward(s) for s in schedules]
        table = concatenate_tables([lower(s, stage_kinds) for s in schedules])
        ops = operation_table(table, stage_kinds)
        cells, index = branch.distinct_cells(ops.active)
        columns = np.stack([_column(table, name) for name in COLUMNS], axis=-1)
        rows = np.concatenate([columns, index[..., None], ops.active], axis=-1).astype(np.int32)
        rows = rows.reshape(len(schedules), -1, *rows.shape[1:])
        same = (table.forward_stage == table.backward_stage) & (table.forward_microbatch == table.backward_microbatch)
        chained = same & (table.forward_stage >= 0)
        most = max(s.num_microbatches for s in schedules)
        return cls(fns, placement, table, stage_kinds, distinct, ops, cells, rows, chained, mesh, chosen, policy, most)

    def slots(self, params: PipelineParams) -> tuple[PyTree, ...]:
        """Inside `shard_map`: the parameters that each of a rank's slots works with."""
        return layout.copies(jax.tree.map(lambda leaf: leaf[0], params.stages), self.placement)

    def initial_state(self, params: PipelineParams, batch: PyTree) -> State:
        """Inside `shard_map`: one device's buffers before the first tick."""
        return self._cells(self.slots(params), params.shared, batch).initial_state()

    def cells_alone(self) -> Iterator[tuple[str, Callable[..., State]]]:
        """What a tick may choose from: name, and `(params, batch, state, row) -> state` inside `shard_map`."""
        names = self.ops.names
        chosen = self.cells if self.form == "cells" else np.eye(len(names), dtype=bool)
        for i, wanted in enumerate(chosen):
            chained = self.form == "operations" or self._is_chained(i)
            picked = [name for name, present in zip(names, wanted, strict=True) if present]

            def run(
                params: PipelineParams,
                batch: PyTree,
                state: State,
                row: Row,
                picked: list[tuple[Any, ...]] = picked,
                chained: bool = chained,
            ) -> State:
                cells = self._cells(self.slots(params), params.shared, batch)
                return branch.run_together(operations(cells, picked), chained, state, row)

            if picked:
                yield " ".join("_".join(map(str, name)) for name in picked), run

    def run(
        self, params: PipelineParams, batch: PyTree, rows: jax.Array, stage_specs: PyTree, shared_specs: PyTree
    ) -> tuple[tuple[jax.Array, Aux], PipelineParams]:
        """The body of the `shard_map`: one device's part, with its rows [ticks, 1, columns] of one schedule."""
        placement = self.placement
        cells = self._cells(self.slots(params), params.shared, batch)
        state = cells.initial_state()
        for segment in self._segments():
            runners = self._runners(cells, segment)
            ticks = rows[segment.start : segment.stop, 0]
            blocks = ticks.reshape(-1, len(runners), ticks.shape[-1])
            state, _ = jax.lax.scan(partial(self._block, runners, segment.channels), state, blocks)
        axes = data_axes(self.mesh)
        everywhere = (PIPELINE_AXIS, *axes)
        stage_grads = _psum_missing(layout.fold(state.stage_grads, placement), stage_specs, axes)
        shared_grads = _psum_missing(state.shared_grads, shared_specs, everywhere)
        stats = jax.lax.psum(layout.fold(state.stage_stats, placement), axes)
        # Never so; but what nobody reads is removed, and then the loops have no order.
        loss = jnp.where(state.order < 0, jnp.nan, state.loss)
        aux = Aux(jax.tree.map(lambda a: a[None], stats), jax.lax.psum(state.last_stats, everywhere))
        grads = PipelineParams(jax.tree.map(lambda a: a[None], stage_grads), shared_grads)
        return (jax.lax.psum(loss, everywhere), aux), grads

    def _cells(self, slots: tuple[PyTree, ...], shared: PyTree, batch: PyTree) -> Cells:
        microbatch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batch)
        slot_of_kind = [self.placement.slot_of(self.stage_kinds.index(k), 0) for k in range(len(self.distinct))]
        splits = split_stages(
            self.fns, self.distinct, [slots[s] for s in slot_of_kind], shared, microbatch, self.policy
        )
        return Cells(self.table, splits, slots, shared, batch)

    def _segments(self) -> tuple[Segment, ...]:
        """The table's. A loop for each operation gains nothing from them, and would compile each anew; several
        schedules share none."""
        segments = self.table.segments
        schedules, ticks = self.rows.shape[:2]
        if self.form == "cells" and schedules == 1:
            return segments
        channels = frozenset().union(*(s.channels for s in segments))
        return (Segment(0, ticks, False, channels),)

    def _runners(self, cells: Cells, segment: Segment) -> list[Runner]:
        """What runs a tick of a segment, for each tick of its cycle."""
        ops = operations(cells, self.ops.names)
        if self.form == "operations":
            return [partial(branch.run_operations, ops)]
        ticks, cycle = slice(segment.start, segment.stop), len(segment.patterns)
        if segment.uniform:
            active = self.ops.active[ticks]
            plans = [branch.straight(self.ops.names, active[i::cycle]) for i in range(cycle)]
            chained = bool(self.chained[ticks].any())
            return [partial(branch.run_straight, p, operations(cells, [s.name for s in p]), chained) for p in plans]
        index = self.rows[:, ticks, :, len(COLUMNS)]
        chosen = [branch.Choice(int(i), self.cells[i], self._is_chained(i)) for i in np.unique(index)]
        return [partial(branch.run_cell, ops, chosen)]

    def _is_chained(self, cell: int) -> bool:
        """Does any rank in any tick run this cell with a backward of what its forward makes?"""
        return bool(self.chained[self.rows[..., len(COLUMNS)].reshape(self.chained.shape) == cell].any())

    def _block(
        self, runners: Sequence[Runner], channels: frozenset[str], state: State, block: jax.Array
    ) -> tuple[State, None]:
        """Run a cycle of ticks, int32 [ticks, columns]."""

        def whole(run: Runner, tick: branch.Tick, state: State, row: Row) -> State:
            return self._exchange(run(state, tick._replace(row=row)), row, channels)

        for run, values in zip(runners, block, strict=True):
            tick = branch.read_tick(COLUMNS, values)
            if len(runners) == 1:
                state = whole(run, tick, state, tick.row)
            else:  # a loop of one trip each, or the next tick's writes would have no order with this one's reads
                state = branch.run_if(jnp.sign(tick.cell + 1), partial(whole, run, tick), state, tick.row)
        return state, None

    def _exchange(self, state: State, row: dict[str, jax.Array], channels: frozenset[str]) -> State:
        """Move this tick's results to the neighbours' inboxes. A rank that expects nothing writes to scratch."""
        placement = self.placement
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
