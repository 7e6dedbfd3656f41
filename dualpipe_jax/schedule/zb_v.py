"""ZB-V: zero bubbles with the memory of 1F1B, on a V of two stages a rank.

References: Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism" (2024), section 6.
"""

from __future__ import annotations

from collections.abc import Iterator

from dualpipe_jax.schedule.actions import Action, Cell, Kind, Schedule
from dualpipe_jax.schedule.interleaved import cut
from dualpipe_jax.schedule.placement import Placement, SlotRule


def zb_v(num_ranks: int, num_microbatches: int, slot_rule: SlotRule = "depth") -> Schedule:
    """ZB-V on P ranks with 2P stages; any M >= 1, those below 2P-1 cut from a longer one.

    Makespan 6M + P - 1 in times F = I = W = 1 of one of the 2P stages, for M >= 2P - 1; 2P activations of half the
    size.

    Example:
        >>> from dualpipe_jax.schedule.text import format_schedule
        >>> print(format_schedule(zb_v(1, 2)))
        0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1
    """
    whole = max(num_microbatches, 2 * num_ranks - 1)
    ranks = tuple(
        _number(_steps(rank, num_ranks, whole), (rank, 2 * num_ranks - 1 - rank)) for rank in range(num_ranks)
    )
    placement = Placement("v", num_ranks, 2, slot_rule)
    return cut(Schedule("zb_v", placement, whole, ranks), num_microbatches)


def _steps(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[tuple[Kind, int]]:
    """(kind, 0 for the rank's first stage or 1 for its second)."""
    F, I, W = Kind.F, Kind.I, Kind.W  # noqa: E741
    first = 2 * (num_ranks - rank) - 1
    yield from [(F, 0)] * first  # warm-up 1
    yield from [(F, 1), (F, 0)] * rank  # warm-up 2
    yield from [(F, 1), (I, 1), (W, 1)] * (num_ranks - rank)  # warm-up 3
    for i in range(num_microbatches - num_ranks):  # steady
        if first + rank + i < num_microbatches:
            yield (F, 0)
        yield from [(I, 0), (W, 0), (F, 1), (I, 1), (W, 1)]
    yield from [(I, 0), (I, 1)] * rank  # cool-down 1
    yield from [(I, 0), (W, 0)] * (num_ranks - rank)  # cool-down 2
    yield from [(W, 1)] * rank + [(W, 0)] * rank  # cool-down 3


def _number(steps: Iterator[tuple[Kind, int]], stages: tuple[int, int]) -> tuple[Cell, ...]:
    """Number the microbatches in order of appearance."""
    count = {(kind, which): 0 for kind in Kind for which in (0, 1)}
    cells = []
    for step in steps:
        cells.append((Action(step[0], stages[step[1]], 0, count[step]),))
        count[step] += 1
    return tuple(cells)
