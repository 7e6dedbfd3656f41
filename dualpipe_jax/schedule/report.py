"""The figures of a schedule: what each coupling of the ranks costs, phases, and memory in bytes."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from dualpipe_jax.schedule.actions import Kind, Schedule
from dualpipe_jax.schedule.memory import Memory, peak_memory
from dualpipe_jax.schedule.simulate import Mode, Simulation, simulate


class Bytes(NamedTuple):
    """What one microbatch keeps on a rank, through 1/P of the layers.

    Attributes:
        activation: from F to I or B, in bytes.
        weight: from I to W; None: as much as the activation.
    """

    activation: float
    weight: float | None = None

    def memory(self, num_ranks: int, num_stages: int, limit: float = float("inf")) -> Memory:
        """The same for one of num_stages equal stages; limit in bytes for each rank.

        Raises:
            ValueError: a size is negative.

        Example:
            >>> Bytes(8e9).memory(num_ranks=4, num_stages=8).activation
            4000000000.0
        """
        weight = self.activation if self.weight is None else self.weight
        if not (self.activation >= 0 and weight >= 0):
            raise ValueError(f"bytes {self.activation} and {weight} must be at least 0; nearest valid: 0")
        share = num_ranks / num_stages
        return Memory(limit, self.activation * share, weight * share)


def peak_bytes(schedule: Schedule, sizes: Bytes) -> tuple[float, ...]:
    """For each rank the most bytes that it keeps of microbatches: activations, and what W's put off still need.

    Example:
        >>> from dualpipe_jax.schedule import build
        >>> peak_bytes(build("1f1b", num_ranks=4, num_microbatches=8), Bytes(1e9))
        (4000000000.0, 3000000000.0, 2000000000.0, 1000000000.0)
    """
    placement = schedule.placement
    return peak_memory(schedule, sizes.memory(placement.num_ranks, placement.num_stages))


def side_by_side(simulation: Simulation) -> dict[Mode, Simulation]:
    """The same order and costs in every mode: waiting for data only, then ever more tightly coupled."""
    return {mode: simulate(simulation.schedule, simulation.costs, mode) for mode in get_args(Mode)}


def phases(simulation: Simulation) -> tuple[tuple[float, float], ...]:
    """For each rank, when its steady phase starts (first B or I) and ends (last F); before is warmup, after cooldown.

    Example:
        >>> from dualpipe_jax.schedule import build
        >>> phases(simulate(build("1f1b", num_ranks=2, num_microbatches=4)))
        ((4.0, 10.0), (2.0, 11.0))
    """
    found = []
    for cells, start, end in zip(simulation.schedule.ranks, simulation.start, simulation.end, strict=True):
        kinds = [{a.kind for a in cell} for cell in cells]
        backward = next((s for s, k in zip(start, kinds, strict=True) if k & {Kind.B, Kind.I}), simulation.makespan)
        forward = max((e for e, k in zip(end, kinds, strict=True) if Kind.F in k), default=0.0)
        found.append((min(backward, forward), forward))
    return tuple(found)


def report(simulation: Simulation, sizes: Bytes | None = None) -> dict[str, Any]:
    """`Simulation.summary`, what every mode takes, and peak bytes where sizes are known; plain JSON values."""
    figures = simulation.summary()
    modes = side_by_side(simulation)
    figures["modes"] = {
        mode: {
            "makespan": s.makespan,
            "bubble_fraction": s.bubble_fraction,
            "over_async": s.makespan / modes["async"].makespan if modes["async"].makespan else 1.0,
        }
        for mode, s in modes.items()
    }
    if sizes is not None:
        per_rank = peak_bytes(simulation.schedule, sizes)
        figures |= {"peak_bytes": max(per_rank), "peak_bytes_per_rank": list(per_rank)}
    return figures
