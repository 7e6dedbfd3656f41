"""Schedules as text, in the notation of torch.distributed.pipelining: one line a rank."""

from __future__ import annotations

from collections.abc import Iterable

from dualpipe_jax.schedule.actions import Schedule, format_cell, parse_cell
from dualpipe_jax.schedule.placement import Placement


def format_schedule(schedule: Schedule, separator: str = " ") -> str:
    """One line a rank, its cells in order. With separator="," this is the form of torch's CSV files."""
    return "\n".join(separator.join(map(format_cell, rank)) for rank in schedule.ranks)


def parse_schedule(text: str, placement: Placement, name: str = "text") -> Schedule:
    """Read `format_schedule`'s text, cells separated by spaces or commas. Empty cells are idle ticks and are skipped.

    Raises:
        ValueError: a cell is not well formed, or there is not one line a rank.

    Example:
        >>> schedule = parse_schedule("0F0 0B0", Placement("loop", num_ranks=1, slots=1))
        >>> schedule.num_microbatches
        1
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) != placement.num_ranks:
        raise ValueError(f"{len(lines)} lines for num_ranks={placement.num_ranks}; write one line a rank")
    ranks = tuple(tuple(map(parse_cell, line.replace(",", " ").split())) for line in lines)
    last = max((a.microbatch for rank in ranks for cell in rank for a in cell), default=-1)
    return Schedule(name, placement, (last + 1) * placement.num_directions, ranks)


def marked_grid(schedule: Schedule, marks: Iterable[tuple[int, int]]) -> str:
    """The grid with the cells at (rank, index) marked >>so<<; long lines are cut around the marks."""
    marked, rows = set(marks), []
    for rank, cells in enumerate(schedule.ranks):
        words = [f">>{format_cell(c)}<<" if (rank, i) in marked else format_cell(c) for i, c in enumerate(cells)]
        rows.append(f"rank {rank}: {' '.join(_window(words, [i for r, i in marked if r == rank]))}")
    return "\n".join(rows)


def _window(words: list[str], marks: list[int], around: int = 12) -> list[str]:
    if len(words) <= 2 * around:
        return words
    start = max(0, min(marks, default=0) - around)
    stop = min(len(words), max(marks, default=0) + around + 1)
    return [*(["..."] if start else []), *words[start:stop], *(["..."] if stop < len(words) else [])]
