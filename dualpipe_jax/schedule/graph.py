"""What waits for what: the cells of a schedule as a directed graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dualpipe_jax.schedule.actions import Action, Cell, Kind, Schedule, format_cell
from dualpipe_jax.schedule.placement import Placement

Value = tuple[str, int, int, int]
"""A result: ("F", "B" or "W"; I also makes a "B": the input's gradient), direction, stage, microbatch."""

PHASE = {Kind.F: 0, Kind.B: 1, Kind.I: 1, Kind.W: 2}
"""Position of an action inside its cell."""


class ScheduleError(ValueError):
    """A schedule that cannot run, or would not compute every gradient once.

    Attributes:
        marks: the cells at fault, as (rank, index).
    """

    def __init__(self, message: str, marks: Iterable[tuple[int, int]] = ()) -> None:
        super().__init__(message)
        self.marks = tuple(marks)


@dataclass(frozen=True)
class CellGraph:
    """Cells numbered rank by rank, in each rank's order.

    Attributes:
        cells: their actions. rank: their rank.
        needs: for each cell the other cells whose results it reads.
        order: all cells, each after all that it needs and after its rank's previous cell.
    """

    cells: tuple[Cell, ...]
    rank: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]


def result(action: Action) -> Value:
    """What an action makes."""
    kind = "B" if action.kind is Kind.I else action.kind.value
    return kind, action.direction, action.stage, action.microbatch


def inputs(action: Action, placement: Placement) -> Iterator[Value]:
    """What an action reads: F the previous stage's F; B and I the own F and the next stage's B; W the own I."""
    _, direction, stage, microbatch = result(action)
    if action.kind is Kind.F:
        if stage > 0:
            yield "F", direction, stage - 1, microbatch
    elif action.kind is Kind.W:
        yield "B", direction, stage, microbatch
    else:
        yield "F", direction, stage, microbatch
        if stage < placement.num_stages - 1:
            yield "B", direction, stage + 1, microbatch


def cell_graph(schedule: Schedule) -> CellGraph:
    """Number the cells and find an order in which they can run.

    Raises:
        ScheduleError: an input is never made, or the ranks wait for each other for ever.
    """
    cells = tuple(cell for rank in schedule.ranks for cell in rank)
    ranks = tuple(r for r, rank in enumerate(schedule.ranks) for _ in rank)
    made_by = {result(action): i for i, cell in enumerate(cells) for action in cell}
    needs = []
    for i, cell in enumerate(cells):
        values = {v: action for action in cell for v in inputs(action, schedule.placement)}
        for value, action in values.items():
            if value not in made_by:
                kind, direction, stage, microbatch = value
                made = Action(Kind(kind), stage, direction, microbatch)
                where = ranks[i], i - ranks.index(ranks[i])
                raise ScheduleError(f"rank {ranks[i]}: {action} needs {made}, which no rank computes", [where])
        needs.append(tuple(sorted({made_by[v] for v in values} - {i})))
    return CellGraph(cells, ranks, tuple(needs), _topological(cells, ranks, needs))


def _topological(cells: tuple[Cell, ...], ranks: tuple[int, ...], needs: list[tuple[int, ...]]) -> tuple[int, ...]:
    followers: list[list[int]] = [[] for _ in cells]
    waiting = [0] * len(cells)
    for i, needed in enumerate(needs):
        before = {*needed, i - 1} if i and ranks[i - 1] == ranks[i] else set(needed)
        waiting[i] = len(before)
        for j in before:
            followers[j].append(i)
    order = [i for i, count in enumerate(waiting) if count == 0]
    for i in order:  # grows while it is walked
        for j in followers[i]:
            waiting[j] -= 1
            if waiting[j] == 0:
                order.append(j)
    if len(order) < len(cells):
        done = set(order)
        stuck: dict[int, int] = {}
        for i, rank in enumerate(ranks):
            if i not in done:
                stuck.setdefault(rank, i)
        where = ", ".join(f"rank {r} at {format_cell(cells[i])}" for r, i in stuck.items())
        marks = [(r, i - ranks.index(r)) for r, i in stuck.items()]
        raise ScheduleError(f"deadlock: the ranks wait for each other: {where}", marks)
    return tuple(order)
