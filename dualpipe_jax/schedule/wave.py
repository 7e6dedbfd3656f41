"""Wave: a zigzag of v stages a rank, each forward and whole backward as soon as it can run.

References: Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training
Efficiency" (2023), section 3.
"""

from __future__ import annotations

from dualpipe_jax.schedule.actions import Schedule
from dualpipe_jax.schedule.greedy import Policy, list_schedule
from dualpipe_jax.schedule.memory import Memory
from dualpipe_jax.schedule.placement import Placement, SlotRule


def wave(num_ranks: int, num_microbatches: int, slot_rule: SlotRule = "depth", stages_per_rank: int = 4) -> Schedule:
    """Wave with v = stages_per_rank; any M >= 1.

    F and B of a rank take turns where both can run, the deepest stage first, within the memory of P + 1
    microbatches. The paper's case is M = P; more microbatches follow here without a flush.

    Example:
        >>> from dualpipe_jax.schedule.text import format_schedule
        >>> print(format_schedule(wave(2, 2, stages_per_rank=2)))
        0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
        1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
    """
    placement = Placement("v", num_ranks, stages_per_rank, slot_rule)
    memory = Memory(limit=num_ranks + 1)
    return list_schedule(placement, num_microbatches, None, memory, Policy("turns"), "wave", split=False)
