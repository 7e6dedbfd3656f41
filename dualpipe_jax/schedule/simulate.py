"""How long a schedule takes, where it idles, and what it keeps in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from dualpipe_jax.schedule.actions import Kind, Schedule
from dualpipe_jax.schedule.costs import Costs
from dualpipe_jax.schedule.graph import CellGraph, cell_graph
from dualpipe_jax.schedule.lower import assign_ticks

Mode = Literal["async", "neighbour", "neighbour_1", "lockstep"]


@dataclass(frozen=True)
class Simulation:
    """The course of one step. Times are in the unit of the costs, from the first start.

    Attributes:
        schedule, costs, mode: what was simulated.
        start, end: for each rank, times of its cells.
        makespan: the last end.
        work_per_rank: busy time. idle: makespan minus busy time.
        bubble_fraction: 1 - work / (P x makespan).
        peak_activations: for each rank, how many (stage, microbatch) are at most kept from the start of F to the end
            of B or W.
        pending_weight_max: for each rank, how many W are at most outstanding after their I.
    """

    schedule: Schedule
    costs: Costs
    mode: Mode
    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    makespan: float
    work_per_rank: tuple[float, ...]
    peak_activations: tuple[int, ...]
    pending_weight_max: tuple[int, ...]

    @property
    def idle(self) -> tuple[float, ...]:
        return tuple(self.makespan - work for work in self.work_per_rank)

    @property
    def bubble_fraction(self) -> float:
        total = len(self.work_per_rank) * self.makespan
        return 1 - sum(self.work_per_rank) / total if total else 0.0

    @property
    def peak_units(self) -> float:
        """Peak activations in those of one microbatch through 1/P of the layers, on the fullest rank."""
        return max(self.peak_activations) * self.schedule.placement.num_ranks / self.schedule.placement.num_stages

    def summary(self) -> dict[str, Any]:
        """The figures as plain JSON values."""
        return {
            "schedule": self.schedule.name,
            "ranks": self.schedule.placement.num_ranks,
            "microbatches": self.schedule.num_microbatches,
            "mode": self.mode,
            "makespan": self.makespan,
            "bubble_fraction": self.bubble_fraction,
            "peak_activations": max(self.peak_activations),
            "pending_weight_max": max(self.pending_weight_max),
            "work_per_rank": list(self.work_per_rank),
            "idle_per_rank": list(self.idle),
        }


def simulate(schedule: Schedule, costs: Costs | None = None, mode: Mode = "async") -> Simulation:
    """Simulate one step.

    Args:
        costs: default F = I = W = 1.
        mode: what couples the ranks.
            async: a cell starts when its rank is free and its inputs have arrived.
            neighbour: the lowered table as one SPMD program. Ticks end with an exchange that the next one needs, so
                that start(t+1, r) = max over r and its neighbours of end(t, .) + transfer.
            neighbour_1: the same with exchanges that run behind the next tick: results are usable two ticks later,
                and start(t+1, r) = max(end(t, r), end(t-1, neighbours) + transfer).
            lockstep: all ranks start a tick together.

    Raises:
        ScheduleError: the schedule cannot run.
        ValueError: unknown mode, or costs for another number of stages.

    Example:
        >>> from dualpipe_jax.schedule import build
        >>> simulate(build("1f1b", num_ranks=4, num_microbatches=3)).makespan
        18.0
    """
    costs = costs or Costs()
    costs.check(schedule.placement.num_stages)
    if mode not in get_args(Mode):
        raise ValueError(f"unknown mode {mode!r}; choose one of {', '.join(get_args(Mode))}")
    graph = cell_graph(schedule)
    durations = [costs.cell(cell) for cell in graph.cells]
    if mode == "async":
        start = _async(graph, durations, costs.transfer)
    else:
        start = _coupled(schedule, graph, durations, costs.transfer, mode)
    end = [s + d for s, d in zip(start, durations, strict=True)]
    return Simulation(
        schedule,
        costs,
        mode,
        _by_rank(schedule, start),
        _by_rank(schedule, end),
        max(end, default=0.0),
        tuple(float(sum(row)) for row in _by_rank(schedule, durations)),
        *peaks(schedule),
    )


def _by_rank(schedule: Schedule, values: list[float]) -> tuple[tuple[float, ...], ...]:
    rest = iter(values)
    return tuple(tuple(next(rest) for _ in cells) for cells in schedule.ranks)


def _async(graph: CellGraph, durations: list[float], transfer: float) -> list[float]:
    end = [0.0] * len(durations)
    free = [0.0] * (max(graph.rank, default=0) + 1)
    for i in graph.order:
        rank = graph.rank[i]
        ready = (end[j] + (transfer if graph.rank[j] != rank else 0.0) for j in graph.needs[i])
        free[rank] = end[i] = max(free[rank], *ready, 0.0) + durations[i]
    return [e - d for e, d in zip(end, durations, strict=True)]


def _coupled(schedule: Schedule, graph: CellGraph, durations: list[float], transfer: float, mode: Mode) -> list[float]:
    ticks = np.array(assign_ticks(graph, hop=2 if mode == "neighbour_1" else 1), int)
    ranks = np.array(graph.rank, int)
    duration = np.zeros((ticks.max(initial=-1) + 1, schedule.placement.num_ranks))
    duration[ticks, ranks] = durations
    ring = schedule.placement.is_ring
    transfer = transfer if schedule.placement.num_ranks > 1 else 0.0
    start, before = np.zeros_like(duration), np.zeros(duration.shape[1])
    for t in range(1, len(duration)):
        end = start[t - 1] + duration[t - 1]
        if mode == "neighbour":
            start[t] = np.maximum(end, _neighbours(end, ring)) + transfer
        elif mode == "neighbour_1":
            start[t] = np.maximum(end, _neighbours(before, ring) + (transfer if t > 1 else 0.0))
        else:
            start[t] = end.max() + transfer
        before = end
    return start[ticks, ranks].tolist()


def _neighbours(end: np.ndarray, ring: bool) -> np.ndarray:
    """For each rank the larger of its neighbours' values."""
    left, right = np.roll(end, 1), np.roll(end, -1)
    if not ring:
        left[0], right[-1] = 0.0, 0.0
    return np.maximum(left, right)


def peaks(schedule: Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(most activations kept, most W outstanding) for each rank; in a cell F comes before anything is freed."""
    activations, weights = [], []
    for cells in schedule.ranks:
        kept = pending = kept_max = pending_max = 0
        for action in (a for cell in cells for a in cell):
            kept += {Kind.F: 1, Kind.I: 0}.get(action.kind, -1)
            pending += {Kind.I: 1, Kind.W: -1}.get(action.kind, 0)
            kept_max, pending_max = max(kept_max, kept), max(pending_max, pending)
        activations.append(kept_max)
        weights.append(pending_max)
    return tuple(activations), tuple(weights)
