"""1F1B: each rank runs ahead by its distance from the end, then alternates forward and backward.

References: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (2019), section 3.2,
with the flush of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021), section
2.2.1.
"""

from __future__ import annotations

from dualpipe_jax.schedule.actions import Action, Cell, Kind, Schedule
from dualpipe_jax.schedule.placement import Placement, SlotRule


def one_f_one_b(num_ranks: int, num_microbatches: int, slot_rule: SlotRule = "depth") -> Schedule:
    """1F1B with whole backwards on P ranks, one stage each; any M >= 1.

    Idle time a rank (P-1)(F+B); rank r keeps at most min(M, P-r) activations.

    Example:
        >>> from dualpipe_jax.schedule.text import format_schedule
        >>> print(format_schedule(one_f_one_b(2, 3)))
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    placement = Placement("loop", num_ranks, 1, slot_rule)
    ranks = tuple(_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks))
    return Schedule("1f1b", placement, num_microbatches, ranks)


def _rank(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Cell, ...]:
    warmup = min(num_microbatches, num_ranks - 1 - rank)
    steady = num_microbatches - warmup
    forward = [(Action(Kind.F, rank, 0, m),) for m in range(num_microbatches)]
    backward = [(Action(Kind.B, rank, 0, m),) for m in range(num_microbatches)]
    alternating = [cell for pair in zip(forward[warmup:], backward[:steady], strict=True) for cell in pair]
    return (*forward[:warmup], *alternating, *backward[steady:])
