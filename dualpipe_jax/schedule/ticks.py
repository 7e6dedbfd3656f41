"""A list scheduler in ticks: each rank takes an F, an I and a W at once, where it can.

For costs in which actions run behind each other's communication, a cell of several is cheaper than they are alone,
and one SPMD program runs in ticks anyway.
"""

from __future__ import annotations

from dualpipe_jax.schedule.actions import Action, Schedule
from dualpipe_jax.schedule.costs import Costs
from dualpipe_jax.schedule.greedy import Greedy, Policy, RankState
from dualpipe_jax.schedule.memory import Memory
from dualpipe_jax.schedule.placement import Placement


def tick_schedule(
    placement: Placement,
    num_microbatches: int,
    memory: Memory | None = None,
    policy: Policy | None = None,
    name: str = "ticks",
) -> Schedule:
    """Schedule with a split backward, up to one F, one I and one W in each cell; results are usable in the next tick.

    Raises:
        ValueError: the memory limit is less than one microbatch in each stage of a rank.

    Example:
        >>> from dualpipe_jax.schedule.text import format_schedule
        >>> print(format_schedule(tick_schedule(Placement("loop", num_ranks=1, slots=1), 3)))
        0F0 (0F1;0I0;0W0)OVERLAP_F_I_W (0F2;0I1;0W1)OVERLAP_F_I_W (0I2;0W2)OVERLAP_I_W
    """
    return _Ticks(placement, num_microbatches, Costs(), memory or Memory(), policy or Policy(), True).run(name)


class _Ticks(Greedy):
    def run(self, name: str) -> Schedule:
        tick, left = 0, 3 * self.num_microbatches * self.placement.num_stages
        while left:
            for index, rank in enumerate(self.ranks):
                cell = self._cell(index, rank, tick)
                if cell:
                    rank.done.append(cell)
                    left -= len(cell)
            tick += 1
        return self.schedule(name)

    def _cell(self, index: int, rank: RankState, tick: int) -> tuple[Action, ...]:
        cell = []
        for choose in (self.next_forward, self.next_backward, self._next_weight):
            action = choose(rank, tick)
            if action is not None:
                self.account(index, rank, action, tick + 1)
                cell.append(action)
        return tuple(cell)

    @staticmethod
    def _next_weight(rank: RankState, tick: int) -> Action | None:
        return rank.weights[0] if rank.weights else None
