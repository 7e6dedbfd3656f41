"""V-Min and V-Half: one microbatch's times, repeated every six, on a V of two stages a rank.

A block gives every F and I of one microbatch a time, in units of one of the 2P stages' F = I = W. Microbatch m runs
the same block 6m later, so on each rank the block's F, F, I, I, W, W must differ modulo 6. How long a block keeps
its activations,
over 6, is the memory: the offsets between neighbouring stages decide it.

References: Qi, Wan, Amar, Lin, "Pipeline Parallelism with Controllable Memory" (2024), sections 3 and 4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice, product
from typing import NamedTuple

from dualpipe_jax.schedule.actions import Action, Cell, Kind, Schedule
from dualpipe_jax.schedule.graph import Value, inputs, result
from dualpipe_jax.schedule.placement import Placement, SlotRule
from dualpipe_jax.schedule.simulate import simulate

PERIOD = 6


class Offsets(NamedTuple):
    """Time from a stage to the next: in the two halves of F, then in the two of I."""

    down_forward: int
    up_forward: int
    down_backward: int
    up_backward: int


MIN = Offsets(1, 1, 1, 1)
HALF = Offsets(2, 1, 2, 1)
CANDIDATES = 8
"""How many of the blocks with the shortest waits V-Half tries."""


Waits = tuple[int, int, int]
"""Extra time at the turns: between the halves of F, between F and I, between the halves of I."""


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
    return _repeat("v_min", num_ranks, num_microbatches, slot_rule, MIN, next(blocks(num_ranks, MIN))[0])


def v_half(num_ranks: int, num_microbatches: int, slot_rule: SlotRule = "depth") -> Schedule:
    """V-Half: about half of 1F1B's activations (P+2 of the halved stages); any M >= 1.

    W is taken out of the block and fills the gaps instead, which shortens the ramps. The published generator places
    F and I greedily too; it is 1 to 4 per cent shorter at P = 4, 8, 16, in the same memory.

    Example:
        >>> from dualpipe_jax.schedule.simulate import simulate
        >>> simulate(v_half(8, 16)).peak_units
        5.0
    """
    waits = _half_waits(num_ranks)
    schedule = _repeat("v_half", num_ranks, num_microbatches, slot_rule, HALF, waits)
    return fill_weights(schedule, num_ranks + 2)


@lru_cache
def _half_waits(num_ranks: int) -> Waits:
    found = list(islice(blocks(num_ranks, HALF), CANDIDATES))
    tried = [_repeat("v_half", num_ranks, 2 * num_ranks, "depth", HALF, waits) for waits, _ in found]
    lengths = [simulate(fill_weights(schedule, num_ranks + 2)).makespan for schedule in tried]
    return found[lengths.index(min(lengths))][0]


def _repeat(
    name: str, num_ranks: int, num_microbatches: int, slot_rule: SlotRule, offsets: Offsets, waits: Waits
) -> Schedule:
    placement = Placement("v", num_ranks, 2, slot_rule)
    block = _block(num_ranks, offsets, waits)
    assert block is not None
    ranks = []
    for rank in range(num_ranks):
        timed = [
            (times[stage] + PERIOD * m, Action(kind, stage, 0, m))
            for stage in (rank, 2 * num_ranks - 1 - rank)
            for kind, times in ((Kind.F, block.forward), (Kind.I, block.backward), (Kind.W, block.weight))
            for m in range(num_microbatches)
        ]
        ranks.append(tuple((action,) for _, action in sorted(timed)))
    return Schedule(name, placement, num_microbatches, tuple(ranks))


def fill_weights(schedule: Schedule, limit: int) -> Schedule:
    """Keep the order of F and I; run W where a rank would wait, or would keep more than `limit` activations."""
    todo = [deque(a for cell in cells for a in cell if a.kind is not Kind.W) for cells in schedule.ranks]
    pending: list[deque[Action]] = [deque() for _ in todo]
    kept = [0] * len(todo)
    done: set[Value] = set()
    ranks: list[list[Cell]] = [[] for _ in todo]
    while any(todo) or any(pending):
        made = []
        for rank, queue in enumerate(todo):
            ready = bool(queue) and all(v in done for v in inputs(queue[0], schedule.placement))
            if ready and not (queue[0].kind is Kind.F and kept[rank] >= limit and pending[rank]):
                action = queue.popleft()
                if action.kind is Kind.I:
                    pending[rank].append(Action(Kind.W, action.stage, action.direction, action.microbatch))
            elif pending[rank]:
                action = pending[rank].popleft()
            else:
                continue
            kept[rank] += {Kind.F: 1, Kind.W: -1}.get(action.kind, 0)
            ranks[rank].append((action,))
            made.append(result(action))
        done.update(made)
    return replace(schedule, ranks=tuple(map(tuple, ranks)))


def blocks(num_ranks: int, offsets: Offsets) -> Iterator[tuple[Waits, Block]]:
    """Blocks in which no rank has two actions at one time modulo 6, those with the shortest waits first."""
    extra = range(PERIOD)
    for waits in sorted(product(extra, extra, extra), key=lambda w: (sum(w), w)):
        block = _block(num_ranks, offsets, waits)
        if block is not None:
            yield waits, block


def _block(num_ranks: int, offsets: Offsets, waits: Waits) -> Block | None:
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
