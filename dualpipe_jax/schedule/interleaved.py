"""Interleaved 1F1B: each rank has v stages of a loop, and takes P microbatches through one of them before the next.

References: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021), section 2.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from dualpipe_jax.schedule.actions import Action, Cell, Kind, Schedule
from dualpipe_jax.schedule.placement import Placement, SlotRule


def interleaved_1f1b(
    num_ranks: int, num_microbatches: int, slot_rule: SlotRule = "depth", stages_per_rank: int = 2
) -> Schedule:
    """Interleaved 1F1B with v = stages_per_rank; any M >= 1 (the paper's are multiples of P; others are cut from
    those).

    Idle time a rank (P-1)(F+B), F and B of one of the vP stages; for M a multiple of P.

    Example:
        >>> from dualpipe_jax.schedule.text import format_schedule
        >>> print(format_schedule(interleaved_1f1b(2, 2)))
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    whole = -(-num_microbatches // num_ranks) * num_ranks
    ranks = tuple(tuple(_rank(rank, num_ranks, stages_per_rank, whole)) for rank in range(num_ranks))
    placement = Placement("loop", num_ranks, stages_per_rank, slot_rule)
    return cut(Schedule("interleaved_1f1b", placement, whole, ranks), num_microbatches)


def rounds(kind: Kind, rank: int, num_ranks: int, v: int, num_microbatches: int) -> list[Action]:
    """All actions of a kind in the interleaved order: P microbatches through a stage, then the next stage.

    Backwards take the rank's stages from the last to the first.
    """
    order = range(v) if kind is Kind.F else range(v - 1, -1, -1)
    return [
        Action(kind, local * num_ranks + rank, 0, start + m)
        for start in range(0, num_microbatches, num_ranks)
        for local in order
        for m in range(num_ranks)
    ]


def cut(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The same order for the first microbatches only."""
    ranks = tuple(
        tuple(cell for cell in cells if all(a.microbatch < num_microbatches for a in cell)) for cells in schedule.ranks
    )
    return Schedule(schedule.name, schedule.placement, num_microbatches, ranks)


def _rank(rank: int, num_ranks: int, v: int, num_microbatches: int) -> Iterator[Cell]:
    forward = rounds(Kind.F, rank, num_ranks, v, num_microbatches)
    backward = rounds(Kind.B, rank, num_ranks, v, num_microbatches)
    warmup = min(len(forward), (v - 1) * num_ranks + 2 * (num_ranks - 1 - rank))
    yield from ((a,) for a in forward[:warmup])
    steady = len(forward) - warmup
    for f, b in zip(forward[warmup:], backward[:steady], strict=True):
        yield from ((f,), (b,))
    yield from ((b,) for b in backward[steady:])
