"""From a schedule to a table: give every cell a tick, every value a slot, and cut the ticks into segments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from dualpipe_jax.schedule.actions import Action, Kind, Schedule
from dualpipe_jax.schedule.graph import PHASE, CellGraph, Value, cell_graph, result
from dualpipe_jax.schedule.placement import Placement
from dualpipe_jax.schedule.segments import cut_segments
from dualpipe_jax.schedule.slots import Lifetime, assign_slots
from dualpipe_jax.schedule.table import COLUMNS, TickTable
from dualpipe_jax.schedule.validate import validate

# A tick has four moments: F, B or I, W, and the exchange of messages.
MOMENTS, EXCHANGE = 4, 3


def lower(schedule: Schedule, stage_kinds: Sequence[int] | None = None) -> TickTable:
    """Lower a schedule to the table that the executor runs.

    Each cell runs as early as lockstep allows: one tick after its rank's previous cell and after the cells it needs.
    Slots are assigned per rank like registers, so that each buffer is as small as the order allows.

    Args:
        stage_kinds: for each stage a number 0..K-1; stages of equal number run the same program and keep values of
            equal
            shapes. Default: all 0.

    Raises:
        ScheduleError: the schedule is not valid.
        ValueError: `stage_kinds` has another length than the number of stages.
    """
    placement = schedule.placement
    kinds = tuple(stage_kinds) if stage_kinds is not None else (0,) * placement.num_stages
    if len(kinds) != placement.num_stages:
        raise ValueError(f"stage_kinds has {len(kinds)} entries; give one for each of {placement.num_stages} stages")
    validate(schedule)
    graph = cell_graph(schedule)
    ticks = assign_ticks(graph)
    columns = {name: np.full((max(ticks, default=-1) + 1, placement.num_ranks), -1, np.int32) for name in COLUMNS}
    lifetimes: dict[tuple[int, str, int], list[Lifetime]] = defaultdict(list)
    where: dict[Value, int] = {result(a): ticks[i] for i, cell in enumerate(graph.cells) for a in cell}
    for i, cell in enumerate(graph.cells):
        for action in cell:
            _fill_action(columns, schedule, action, ticks[i])
            for buffer, kind, lifetime in _values(schedule, action, where, kinds):
                lifetimes[lifetime.rank, buffer, kind].append(lifetime)
    sizes = {key: assign_slots(columns, values) for key, values in lifetimes.items()}

    def by_kind(buffer: str) -> tuple[int, ...]:
        return tuple(_largest(sizes, buffer, kind) for kind in range(max(kinds, default=-1) + 1))

    return TickTable(
        **columns,
        num_activation_slots=_largest(sizes, "activation", 0),
        num_gradient_slots=_largest(sizes, "gradient", 0),
        num_residual_slots=by_kind("residual"),
        num_weight_residual_slots=by_kind("weight_residual"),
        num_cut_slots=by_kind("cut"),
        stage_kinds=kinds,
        segments=cut_segments(columns, kinds, max_period=2 * placement.slots),
    )


def assign_ticks(graph: CellGraph, hop: int = 1) -> list[int]:
    """The earliest tick of each cell in lockstep; a result reaches another rank `hop` ticks after it is made."""
    ticks = [0] * len(graph.cells)
    previous: dict[int, int] = {}
    for i in graph.order:
        rank = graph.rank[i]
        earliest = previous.get(rank, -1) + 1
        for j in graph.needs[i]:
            earliest = max(earliest, ticks[j] + (1 if graph.rank[j] == rank else hop))
        ticks[i] = previous[rank] = earliest
    return ticks


def _largest(sizes: dict[tuple[int, str, int], int], buffer: str, kind: int) -> int:
    return max((size for (_, b, k), size in sizes.items() if (b, k) == (buffer, kind)), default=0)


def _fill_action(columns: dict[str, np.ndarray], schedule: Schedule, action: Action, tick: int) -> None:
    phase = {Kind.F: "forward", Kind.W: "weight"}.get(action.kind, "backward")
    at = tick, schedule.placement.rank_of(action.stage, action.direction)
    columns[f"{phase}_stage"][at] = action.stage
    columns[f"{phase}_slot"][at] = schedule.placement.slot_of(action.stage, action.direction)
    columns[f"{phase}_microbatch"][at] = schedule.global_microbatch(action)
    if phase == "backward":
        columns["backward_full"][at] = action.kind is Kind.B


def _values(
    schedule: Schedule, action: Action, where: Mapping[Value, int], kinds: tuple[int, ...]
) -> list[tuple[str, int, Lifetime]]:
    """The values that an action makes: (buffer, kind of stage, lifetime)."""
    placement, stage = schedule.placement, action.stage
    place = action.direction, stage, action.microbatch
    rank, kind, tick = placement.rank_of(stage, action.direction), kinds[stage], where[result(action)]

    def live(last: Kind, *uses: tuple[int, str]) -> Lifetime:
        """From this tick to the last use, which is an action of kind `last`."""
        return Lifetime(rank, tick * MOMENTS, uses[-1][0] * MOMENTS + PHASE[last], uses)

    backward, weight = where["B", *place], where.get(("W", *place))
    if action.kind is Kind.F:
        uses = [(tick, "forward_weight_residual"), (backward, "backward_weight_residual")]
        uses += [] if weight is None else [(weight, "weight_residual")]
        values = [
            ("residual", kind, live(Kind.B, (tick, "forward_residual"), (backward, "backward_residual"))),
            ("weight_residual", kind, live(Kind.B if weight is None else Kind.W, *uses)),
        ]
        if stage == placement.num_stages - 1:
            loss = live(Kind.B, (tick, "forward_loss"), (backward, "backward_output_gradient"))
            return [*values, ("gradient", 0, loss)]
        reader = where["F", action.direction, stage + 1, action.microbatch]
        return [*values, ("activation", 0, _sent(placement, action, tick, reader))]
    values = []
    if action.kind is Kind.I and weight is not None:
        values.append(("cut", kind, live(Kind.W, (tick, "backward_cut"), (weight, "weight_cut"))))
    if action.kind is not Kind.W and stage > 0:
        reader = where["B", action.direction, stage - 1, action.microbatch]
        values.append(("gradient", 0, _sent(placement, action, tick, reader)))
    return values


def _sent(placement: Placement, action: Action, tick: int, reader: int) -> Lifetime:
    """The life of a result in the inbox of the rank that reads it in tick `reader`."""
    forward = action.kind is Kind.F
    source = placement.rank_of(action.stage, action.direction)
    rank = placement.rank_of(action.stage + (1 if forward else -1), action.direction)
    read = (reader, "forward_input" if forward else "backward_output_gradient")
    end = reader * MOMENTS + PHASE[Kind.F if forward else Kind.B]
    if rank == source:
        written = "forward_local" if forward else "backward_local"
        return Lifetime(rank, tick * MOMENTS, end, ((tick, written), read))
    column = f"receive_{travel(placement, source, rank, forward)}_{'activation' if forward else 'gradient'}"
    return Lifetime(rank, tick * MOMENTS + EXCHANGE, end, ((tick, column), read))


def travel(placement: Placement, source: int, target: int, forward: bool) -> str:
    """Which way a message goes. In a loop activations go right and gradients left, around the ring."""
    if placement.kind == "loop":
        return "right" if forward else "left"
    return "right" if target > source else "left"
