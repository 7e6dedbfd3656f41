"""DualPipeV: DualPipe cut in half. One copy of the parameters, on a V of stages.

References: Qi, Wan, Huang, Lin, "DualPipe could be better without the Dual" (2025), and DeepSeek's published
implementation; rank r has the same steps as rank r of DualPipe(2P, 2M).
"""

from __future__ import annotations

from dualpipe_jax.schedule.actions import Schedule
from dualpipe_jax.schedule.dualpipe import number, rank_steps
from dualpipe_jax.schedule.placement import Placement, SlotRule


def dualpipe_v(num_ranks: int, num_microbatches: int, slot_rule: SlotRule = "depth") -> Schedule:
    """DualPipeV on P ranks with 2P stages, M >= 2P microbatches.

    Idle time a rank (P-1)(F&B + B - 3W) in times of one of the 2P stages; 2P+1 activations of half the size of
    DualPipe's.

    Example:
        >>> from dualpipe_jax.schedule.text import format_schedule
        >>> print(format_schedule(dualpipe_v(1, 2)))
        0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B 1B1 0I1 0W1
    """
    placement = Placement("v", num_ranks, 2, slot_rule)
    ranks = tuple(
        number(rank_steps(rank, num_ranks, num_microbatches), ((rank, 0), (2 * num_ranks - 1 - rank, 0)))
        for rank in range(num_ranks)
    )
    return Schedule("dualpipe_v", placement, num_microbatches, ranks)
