"""DualPipe: microbatches enter at both ends, and each forward runs together with a backward of the other direction.

References: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.2.1, figure 5; phases as named in the
authors' published implementation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from dualpipe_jax.schedule.actions import Action, Kind, Schedule
from dualpipe_jax.schedule.placement import Placement, SlotRule

Step = tuple[tuple[Kind, int], ...]
"""A cell without numbers: (kind, which of the rank's two stages: 0 the one nearer to its direction's start)."""

F0, F1 = (Kind.F, 0), (Kind.F, 1)
B0, B1 = (Kind.B, 0), (Kind.B, 1)
I0, I1 = (Kind.I, 0), (Kind.I, 1)
W = (Kind.W, -1)  # the oldest weight gradient put off


def dualpipe(num_ranks: int, num_microbatches: int, slot_rule: SlotRule = "depth") -> Schedule:
    """DualPipe on P ranks (even) with P stages, M microbatches (even, >= 2P), half of them in each direction.

    Idle time a rank (P/2-1)(F&B + B - 3W) where I = W; P+1 activations; two copies of the parameters.

    Example:
        >>> from dualpipe_jax.schedule.text import format_schedule
        >>> print(format_schedule(dualpipe(2, 4)))
        0F0 1F0' 0F1 1B0' (1F1';0B0)OVERLAP_F_B 1B1' 0I1 0W1
        0F0' 1F0 0F1' 1B0 (1F1;0B0')OVERLAP_F_B 1B1 0I1' 0W1'
    """
    placement = Placement("bidirectional", num_ranks, 2, slot_rule)
    ranks = []
    for rank in range(num_ranks):
        near, far = int(rank >= num_ranks // 2), int(rank < num_ranks // 2)  # the two stages' directions
        first = min(rank, num_ranks - 1 - rank)
        stages = ((first, near), (num_ranks - 1 - first, far))
        ranks.append(number(rank_steps(first, num_ranks // 2, num_microbatches // 2), stages))
    return Schedule("dualpipe", placement, num_microbatches, tuple(ranks))


def rank_steps(distance: int, half: int, per_direction: int) -> Iterator[Step]:
    """The phases of one rank.

    Args:
        distance: ranks between this one and the nearer end.
        half: half the number of stages. per_direction: microbatches in each direction, >= 2 * half.
    """
    inner = half - 1 - distance  # ranks between this one and the middle
    yield from [(F0,)] * (2 * inner)  # nF0
    yield from [(F0,), (F1,)] * (distance + 1)  # nF0F1
    yield from [(I1,), (W,), (F1,)] * inner  # nI1W1F1
    yield from _main(inner, per_direction - 2 * half + distance + 1)  # nF0B1F1B0
    yield from [(B1,), (F1, B0)] * inner  # nB1F1B0
    yield from _split_off(distance + 1)  # nB1B0
    yield from [(W,), (I0,)] * inner  # nWB0
    yield from [(W,)] * (distance + 1)  # nW


def _main(inner: int, rounds: int) -> Iterator[Step]:
    for i in range(rounds):
        # The middle ranks' first B follows from the F just before it, so these two cannot run together.
        yield from [(F0,), (B1,)] if i == 0 and inner == 0 else [(F0, B1)]
        yield (F1, B0)


def _split_off(rounds: int) -> Iterator[Step]:
    """Whole backwards in the first half; then weight gradients are put off to fill the cool-down."""
    for i in range(2 * rounds):
        whole = i < rounds
        yield ((B0 if whole else I0) if i % 2 else (B1 if whole else I1),)


def number(steps: Iterator[Step], stages: tuple[tuple[int, int], tuple[int, int]]) -> tuple[tuple[Action, ...], ...]:
    """Number the microbatches in order of appearance; W takes the oldest I.

    Args:
        stages: (stage, direction) of the rank's two stages.
    """
    count = {(kind, which): 0 for kind in ("F", "B") for which in (0, 1)}
    put_off: deque[tuple[int, int, int]] = deque()
    cells = []
    for step in steps:
        cell = []
        for kind, which in step:
            if kind is Kind.W:
                stage, direction, microbatch = put_off.popleft()
            else:
                stage, direction = stages[which]
                key = ("F" if kind is Kind.F else "B", which)
                microbatch, count[key] = count[key], count[key] + 1
            if kind is Kind.I:
                put_off.append((stage, direction, microbatch))
            cell.append(Action(kind, stage, direction, microbatch))
        cells.append(tuple(cell))
    return tuple(cells)
