"""ZB-H1 and ZB-H2: 1F1B with the backward in two, weight gradients put off so that they fill the bubbles.

References: Qi, Wan, Huang, Lin, "Zero Bubble Pipeline Parallelism" (2024), section 2 (handcrafted schedules; ZB-H1
is also called ZB-1P, after its memory of P activations, and ZB-H2 ZB-2P).
"""

from __future__ import annotations

from collections.abc import Iterator

from dualpipe_jax.schedule.actions import Action, Cell, Kind, Schedule
from dualpipe_jax.schedule.interleaved import cut, rounds
from dualpipe_jax.schedule.placement import Placement, SlotRule


def zb_h1(num_ranks: int, num_microbatches: int, slot_rule: SlotRule = "depth", stages_per_rank: int = 1) -> Schedule:
    """ZB-H1 on a loop of stages_per_rank stages a rank; any M >= 1. Memory of 1F1B, a third of its idle time.

    Idle time a rank (P-1)(F+B-2W) where F = I = W and M >= P.

    Example:
        >>> from dualpipe_jax.schedule.text import format_schedule
        >>> print(format_schedule(zb_h1(2, 3)))
        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    return _zero_bubble("zb_h1", num_ranks, num_microbatches, slot_rule, stages_per_rank, factor=1)


def zb_h2(num_ranks: int, num_microbatches: int, slot_rule: SlotRule = "depth") -> Schedule:
    """ZB-H2, one stage a rank; any M >= 1. Twice the memory of 1F1B; no bubble between a rank's first F and last W.

    Makespan 3M + P - 1 where F = I = W = 1 and M >= 2P - 1.

    Example:
        >>> from dualpipe_jax.schedule.text import format_schedule
        >>> print(format_schedule(zb_h2(2, 4)))
        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3
    """
    return _zero_bubble("zb_h2", num_ranks, num_microbatches, slot_rule, 1, factor=2)


def _zero_bubble(
    name: str, num_ranks: int, num_microbatches: int, slot_rule: SlotRule, v: int, factor: int
) -> Schedule:
    whole = -(-num_microbatches // num_ranks) * num_ranks if v > 1 else num_microbatches
    ranks = []
    for rank in range(num_ranks):
        if v > 1:
            forward, backward = (rounds(k, rank, num_ranks, v, whole) for k in (Kind.F, Kind.I))
        else:
            forward, backward = ([Action(k, rank, 0, m) for m in range(whole)] for k in (Kind.F, Kind.I))
        warmup = (v - 1) * num_ranks + factor * (num_ranks - 1 - rank)
        ranks.append(tuple(_rank(forward, backward, warmup, factor * rank)))
    placement = Placement("loop", num_ranks, v, slot_rule)
    return cut(Schedule(name, placement, whole, tuple(ranks)), num_microbatches)


def _rank(forward: list[Action], backward: list[Action], warmup: int, lag: int) -> Iterator[Cell]:
    """Warm-up of forwards; then F and I in turn, with the W of `lag` I's before; at the end the W's that are left."""
    yield from ((a,) for a in forward[:warmup])
    for i, b in enumerate(backward):
        if warmup + i < len(forward):
            yield (forward[warmup + i],)
        yield (b,)
        if i >= lag:
            yield (_weight(backward[i - lag]),)
    yield from ((_weight(b),) for b in backward[max(0, len(backward) - lag) :])


def _weight(action: Action) -> Action:
    return Action(Kind.W, action.stage, action.direction, action.microbatch)
