"""GPipe: all forwards, then all backwards.

References: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (2019),
section 2.3.
"""

from __future__ import annotations

from dualpipe_jax.schedule.actions import Action, Kind, Schedule
from dualpipe_jax.schedule.placement import Placement, SlotRule


def gpipe(num_ranks: int, num_microbatches: int, slot_rule: SlotRule = "depth") -> Schedule:
    """GPipe on P ranks, one stage each; any M >= 1.

    Idle time a rank (P-1)(F+B); every rank keeps M activations.

    Example:
        >>> from dualpipe_jax.schedule.text import format_schedule
        >>> print(format_schedule(gpipe(2, 2)))
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
    """
    ranks = tuple(
        tuple((Action(kind, rank, 0, m),) for kind in (Kind.F, Kind.B) for m in range(num_microbatches))
        for rank in range(num_ranks)
    )
    return Schedule("gpipe", Placement("loop", num_ranks, 1, slot_rule), num_microbatches, ranks)
