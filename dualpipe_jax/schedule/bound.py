"""How short any schedule can be, under a limit of memory."""

from __future__ import annotations

from dataclasses import dataclass

from dualpipe_jax.schedule.actions import Kind
from dualpipe_jax.schedule.costs import Costs, cost_at
from dualpipe_jax.schedule.memory import Memory
from dualpipe_jax.schedule.placement import Placement


@dataclass(frozen=True)
class _Alone:
    """One microbatch with the pipeline to itself: by stage, when its F and its I can start, and when it ends."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    end: float


def lower_bound(placement: Placement, num_microbatches: int, costs: Costs, memory: Memory | None = None) -> float:
    """No schedule on this placement, in this memory, is shorter. The largest of these, over all ranks:

    - first F + work: a rank cannot start before an input reaches it, and then has all its work;
    - first I + work - the F that fit: before its first I a rank can run nothing but F, and keeps what each leaves, so
      that all but a full memory of F comes after;
    - the time that one microbatch takes alone.

    First F and first I are those of a microbatch alone, at the rank's best stage; an action that may share a cell
    counts as its least share.

    Args:
        costs, memory: of the placement's stages. Default: memory is unlimited.

    Example:
        >>> lower_bound(Placement("v", num_ranks=16, slots=4), 32, Costs())
        399.0

        With messages that take a tenth of F a microbatch's first I is too late for 64 F to fill the time before it:

        >>> memory = Memory(limit=64.0, activation=1.0)
        >>> round(lower_bound(Placement("v", num_ranks=16, slots=4), 32, Costs(transfer=0.1), memory), 6)
        406.5
    """
    memory = memory or Memory()
    alone = _alone(placement, costs)
    each = num_microbatches // placement.num_directions
    bounds = [alone.end]
    for rank in range(placement.num_ranks):
        held = [placement.stage_of(rank, slot)[0] for slot in range(placement.slots)]
        work = each * sum(costs.least(kind, stage) for stage in held for kind in (Kind.F, Kind.I, Kind.W))
        bounds.append(min(alone.forward[s] for s in held) + work)
        filled = _most_forward(placement, held, each, costs, memory)
        bounds.append(min(alone.backward[s] for s in held) + work - filled)
    return max(bounds)


def _alone(placement: Placement, costs: Costs) -> _Alone:
    stages = range(placement.num_stages)
    crossing = [
        costs.transfer if s and placement.rank_of(s) != placement.rank_of(s - 1) else 0.0 for s in stages
    ]  # before the F of stage s, and after its I
    now, forward, backward = 0.0, [], []
    for s in stages:
        forward.append(now + crossing[s])
        now = forward[-1] + cost_at(costs.forward, s)
    for s in reversed(stages):
        backward.append(now)
        now += cost_at(costs.backward_input, s) + crossing[s]
    return _Alone(tuple(forward), tuple(reversed(backward)), now)


def _most_forward(placement: Placement, held: list[int], each: int, costs: Costs, memory: Memory) -> float:
    """The most time of F whose activations fit in memory at once: a knapsack, relaxed to fractions."""
    activation, _ = memory.sizes(placement)
    room, time = memory.limit, 0.0
    for stage in sorted(held, key=lambda s: activation[s] / max(costs.least(Kind.F, s), 1e-12)):
        count = float(each) if activation[stage] == 0 else min(float(each), room / activation[stage])
        time += count * costs.least(Kind.F, stage)
        room -= count * activation[stage]
    return time
