"""Put neighbouring actions of a rank into one cell: in one program region they hide each other's messages."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from dualpipe_jax.schedule.actions import Action, Cell, Kind, Schedule
from dualpipe_jax.schedule.graph import PHASE, Value, cell_graph, inputs, result

ALL = frozenset({"FI", "FW", "IW", "FIW", "FB"})
"""Every pattern of several actions."""


def group(schedule: Schedule, patterns: Collection[str] = ALL) -> Schedule:
    """Join consecutive cells of a rank, in lockstep ticks: a cell takes in the next one if that is ready in the same
    tick.

    The order of each rank's actions stays, but for those inside one cell (F, then B or I, then W). A joined cell
    reads only what was made before its tick, or by itself, so no deadlock can arise.

    Args:
        patterns: which joined cells are wanted, as letters of the cell: "IW", "FIW", "FB", ...

    Raises:
        ScheduleError: the schedule cannot run.

    Example:
        >>> from dualpipe_jax.schedule.text import format_schedule, parse_schedule
        >>> from dualpipe_jax.schedule.placement import Placement
        >>> print(format_schedule(group(parse_schedule("0F0 0I0 0W0", Placement("loop", 1, 1)))))
        0F0 (0I0;0W0)OVERLAP_I_W
    """
    cell_graph(schedule)
    done: set[Value] = set()
    position = [0] * len(schedule.ranks)
    ranks: list[list[Cell]] = [[] for _ in schedule.ranks]
    while any(at < len(cells) for at, cells in zip(position, schedule.ranks, strict=True)):
        made: list[Action] = []
        for rank, cells in enumerate(schedule.ranks):
            joined, position[rank] = _join(schedule, cells, position[rank], done, patterns)
            if joined:
                ranks[rank].append(joined)
                made.extend(joined)
        done.update(map(result, made))
    return replace(schedule, ranks=tuple(map(tuple, ranks)))


def _join(
    schedule: Schedule, cells: tuple[Cell, ...], start: int, done: set[Value], patterns: Collection[str]
) -> tuple[Cell, int]:
    """(the longest wanted cell from `start` that is ready, the position after it); ((), start) if none is."""
    best: tuple[Cell, int] = ((), start)
    cell: Cell = ()
    for stop in range(start + 1, min(start + 3, len(cells)) + 1):
        cell = tuple(sorted((*cell, *cells[stop - 1]), key=lambda a: PHASE[a.kind]))
        if len({PHASE[a.kind] for a in cell}) < len(cell) or not _ready(schedule, cell, done):
            break
        if stop == start + 1 or "".join(a.kind for a in cell) in patterns:
            best = cell, stop
    return best


def _ready(schedule: Schedule, cell: Cell, done: set[Value]) -> bool:
    """Are all inputs there, W's possibly made by the I of the same cell?"""
    own = {result(a) for a in cell if a.kind is Kind.I}
    return all(v in done or (a.kind is Kind.W and v in own) for a in cell for v in inputs(a, schedule.placement))
