"""What ranks keep: the limit that a search must respect, and the most that a schedule keeps."""

from __future__ import annotations

from dataclasses import dataclass

from dualpipe_jax.schedule.actions import Kind, Schedule
from dualpipe_jax.schedule.costs import Cost, cost_at, spread
from dualpipe_jax.schedule.placement import Placement

SAME = 1e-9


@dataclass(frozen=True)
class Memory:
    """What a rank keeps, in any one unit (bytes, or activations of one microbatch through 1/P of the layers).

    Attributes:
        limit: for each rank.
        activation: kept by one stage for one microbatch from F to I; None: 1/slots, or 1 where each direction has a
            copy.
        weight: kept from I to W; None: as much as the activation.
    """

    limit: float = float("inf")
    activation: Cost | None = None
    weight: Cost | None = None

    def sizes(self, placement: Placement) -> tuple[list[float], list[float]]:
        """(activation, weight) of each stage."""
        share = placement.num_ranks / placement.num_stages
        stages = range(placement.num_stages)
        activation = [share if self.activation is None else cost_at(self.activation, s) for s in stages]
        weight = activation if self.weight is None else [cost_at(self.weight, s) for s in stages]
        return activation, list(weight)

    def for_stages(self, given: int, num_stages: int) -> Memory:
        """The same sizes for a model cut into num_stages stages, not `given` as here.

        Raises:
            ValueError: a tuple does not fit the new number of stages.

        Example:
            >>> Memory(8.0, activation=(1.0, 3.0)).for_stages(2, 4).activation
            (0.5, 0.5, 1.5, 1.5)
        """

        def scaled(name: str, value: Cost | None) -> Cost | None:
            if isinstance(value, tuple):
                return spread(name, value, num_stages)
            return None if value is None else value * given / num_stages

        return Memory(self.limit, scaled("activation", self.activation), scaled("weight", self.weight))


def fits(schedule: Schedule, memory: Memory) -> bool:
    """Does no rank ever keep more than the limit?"""
    return max(peak_memory(schedule, memory)) <= memory.limit + SAME


def peak_memory(schedule: Schedule, memory: Memory) -> tuple[float, ...]:
    """For each rank the most that it keeps, in the unit of `memory`."""
    activation, weight = memory.sizes(schedule.placement)
    found = []
    for cells in schedule.ranks:
        kept = most = 0.0
        for action in (a for cell in cells for a in cell):
            a, w = activation[action.stage], weight[action.stage]
            kept += {Kind.F: a, Kind.B: -a, Kind.I: w - a, Kind.W: -w}[action.kind]
            most = max(most, kept)
        found.append(most)
    return tuple(found)
