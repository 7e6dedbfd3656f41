"""V-Min and V-Half: one microbatch's times, repeated every six, on a V of two stages a rank.

A block gives every F and I of one microbatch a time, in units of one of the 2P stages' F = I = W. Microbatch m runs the same
block 6m later, so on each rank the block's F, F, I, I, W, W must differ modulo 6. How long a block keeps its activations,
over 6, is the memory: the offsets between neighbouring stages decide it.

References: Qi, Wan, Amar, Lin, "Pipeline Parallelism with Controllable Memory" (2024), sections 3 and 4.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import NamedTuple

from dualpipe_jax.schedule.actions import Action, Cell, Kind, Schedule
from dualpipe_jax.schedule.placement import Placement, SlotRule

PERIOD = 6


class Offsets(NamedTuple):
    """Time from a stage to the next along the first half of F, the second half of F, the second half of I, the first of I."""

    down_forward: int
    up_forward: int
    down_backward: int
    up_backward: int


MIN = Offsets(1, 1, 1, 1)
HALF = Offsets(2, 1, 2, 1)


class Block(NamedTuple):
    """Times of one microbatch: by stage, of F, I and W."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    weight: tuple[int, ...]


def v_min(num_ranks: int, num_microbatches: int, slot_rule: SlotRule = "depth") -> Schedule:
    """V-Min: about a third of 1F1B's activations (4P + 4 to 6 over 6 of the halved stages); any M >= 1.

    Example:
        >>> from dualpipe_jax.schedule.simulate import simulate
        >>> simulate(v_min(8, 16)).peak_units
        4.0
    """
    return _repeat("v_min", num_ranks, num_microbatches, slot_rule, MIN)


def v_half(num_ranks: int, num_microbatches: int, slot_rule: SlotRule = "depth") -> Schedule:
    """V-Half: about half of 1F1B's activations; any M >= 1.

    Example:
        >>> from dualpipe_jax.schedule.simulate import simulate
        >>> simulate(v_half(8, 16)).peak_units
        5.0
    """
    return _repeat("v_half", num_ranks, num_microbatches, slot_rule, HALF)


def _repeat(name: str, num_ranks: int, num_microbatches: int, slot_rule: SlotRule, offsets: Offsets) -> Schedule:
    placement = Placement("v", num_ranks, 2, slot_rule)
    block = find_block(num_ranks, offsets)
    ranks = []
    for rank in range(num_ranks):
        timed = [
            (time + PERIOD * m, Action(kind, stage, 0, m))
            for stage in (rank, 2 * num_ranks - 1 - rank)
            for kind, times in ((Kind.F, block.forward), (Kind.I, block.backward), (Kind.W, block.weight))
            for m, time in ((m, times[stage]) for m in range(num_microbatches))
        ]
        ranks.append(tuple((action,) for _, action in sorted(timed)))
    return Schedule(name, placement, num_microbatches, tuple(ranks))


@lru_cache
def find_block(num_ranks: int, offsets: Offsets) -> Block:
    """The block with the shortest waits at its three turns, so that no rank has two actions at one time modulo 6."""
    for waits in sorted(product(range(PERIOD), repeat=3), key=lambda w: (sum(w), w)):
        block = _times(num_ranks, offsets, waits)
        if block is not None:
            return block
    raise AssertionError(f"no block for {num_ranks=}, {offsets=}")


def _times(num_ranks: int, offsets: Offsets, waits: tuple[int, int, int]) -> Block | None:
    P = num_ranks
    forward = [offsets.down_forward * s for s in range(P)]
    forward += [forward[-1] + 1 + waits[0] + offsets.up_forward * s for s in range(P)]
    turned = forward[-1] + 1 + waits[1]
    late = [turned + offsets.down_backward * s for s in range(P)]  # stages 2P-1 .. P
    early = [late[-1] + 1 + waits[2] + offsets.up_backward * s for s in range(P)]  # stages P-1 .. 0
    backward = [*reversed(early), *reversed(late)]
    weight = [0] * (2 * P)
    for rank in range(P):
        stages = (2 * P - 1 - rank, rank)
        taken = {t[s] % PERIOD for s in stages for t in (forward, backward)}
        if len(taken) < 4:
            return None
        for stage in stages:  # the second stage's I comes first
            weight[stage] = next(t for t in range(backward[stage] + 1, backward[stage] + 7) if t % PERIOD not in taken)
            taken.add(weight[stage] % PERIOD)
    return Block(tuple(forward), tuple(backward), tuple(weight))
