"""List schedules with planned ends: a warm-up that lets the first microbatches pass, a cool-down that is searched.

Messages that take time cost nothing in the steady state, in which every rank has something else to do, but at both
ends. In the warm-up the first microbatch would wait, on every rank, for an F to end; its I come late, when memory has
long been full. `Policy.hold` lets it pass. In the cool-down the last microbatches must enter early enough to
pass all stages beside other work. How early depends on what all ranks hold by then, and there is no rule for it: the
list scheduler is stopped before, and goes on in a number of ways.
"""

from __future__ import annotations

from collections.abc import Iterator

from dualpipe_jax.schedule.actions import Schedule
from dualpipe_jax.schedule.costs import Costs, cost_at
from dualpipe_jax.schedule.greedy import SAME, Greedy, Policy
from dualpipe_jax.schedule.memory import Memory
from dualpipe_jax.schedule.placement import Placement


def planned_ends(
    placement: Placement, num_microbatches: int, costs: Costs, memory: Memory, bound: float = 0.0
) -> Iterator[Schedule]:
    """For a few policies the list schedule with the best cool-down found.

    Args:
        bound: no other cool-down is tried where the policy's own meets this makespan.

    Example:
        >>> from dualpipe_jax.schedule.simulate import simulate
        >>> placement, costs, memory = Placement("v", 4, 2), Costs(transfer=0.1), Memory(4.0)
        >>> [round(simulate(s, costs).makespan, 1) for s in planned_ends(placement, 10, costs, memory)]
        [67.2, 65.2, 66.6, 65.2]
    """
    for policy in warm_ups(placement.num_ranks):
        start = Greedy(placement, num_microbatches, costs, memory, policy, split=True)
        start.advance(_cool_down_begin(placement, num_microbatches, costs))
        best = _ended(start, policy)
        for cool_down in _cool_downs(placement) if best.clock > bound + SAME else []:
            other = _ended(start, cool_down)
            if other.clock < best.clock - SAME:
                best = other
        yield best.schedule("greedy")


def _ended(start: Greedy, policy: Policy) -> Greedy:
    """Go on with a policy to the end."""
    ended = start.copy(policy)
    ended.advance(float("inf"))
    return ended


def warm_ups(num_ranks: int) -> list[Policy]:
    """With in_flight = P they are the shortest for M a multiple of P; the others do not mind what M is."""
    P = num_ranks
    return [
        Policy("F", in_flight=P, hold=P),
        Policy("F", in_flight=P + max(1, P // 16), hold=P),
        Policy("turns", in_flight=-(-19 * P // 16), hold=P),
        Policy("F", in_flight=-(-5 * P // 4), hold=P),
    ]


def _cool_down_begin(placement: Placement, num_microbatches: int, costs: Costs) -> float:
    """When 7P/4 microbatches are left to do, if no rank ever idles."""
    work = sum(
        cost_at(cost, stage)
        for stage in range(placement.num_stages)
        for cost in (costs.forward, costs.backward_input, costs.backward_weight)
    )
    P = placement.num_ranks
    return max(0.0, num_microbatches - 7 * P / 4) * work / P


def _cool_downs(placement: Placement) -> list[Policy]:
    """A pause in which the microbatches in flight go down by a few, then the last ones at once: about P/2 of them."""
    P, directions = placement.num_ranks, placement.num_directions
    sizes = range(3 * P // 8, 13 * P // 16 + 1, max(1, P // 8))
    return [
        Policy(first, in_flight=max(1, P - 1), hold=P, last=max(1, size // directions))
        for size in sizes
        for first in ("F", "turns")
    ]
