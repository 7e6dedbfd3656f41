"""Schedules for other programs: CSV as torch.distributed.pipelining reads it, Chrome trace events, tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from dualpipe_jax.schedule.actions import Kind, format_cell
from dualpipe_jax.schedule.builders import BUILDERS, build, nearest_microbatches
from dualpipe_jax.schedule.costs import Costs
from dualpipe_jax.schedule.simulate import Mode, Simulation, simulate


def chrome_trace(simulation: Simulation, microseconds: float = 1000.0) -> str:
    """JSON of complete events for Perfetto or chrome://tracing: a process a rank, one event a cell.

    Args:
        microseconds: length of one unit of time.
    """
    events = []
    for rank, cells in enumerate(simulation.schedule.ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        times = zip(cells, simulation.start[rank], simulation.end[rank], strict=True)
        for cell, start, end in times:
            kinds = "+".join(Kind(a.kind).value for a in cell)
            event = {"ph": "X", "name": format_cell(cell), "cat": kinds, "pid": rank, "tid": 0}
            events.append({**event, "ts": start * microseconds, "dur": (end - start) * microseconds})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


@dataclass(frozen=True)
class Row:
    """One schedule in a comparison.

    Attributes:
        bubble: 1 - work / (P x makespan). largest_idle: of any rank, over the makespan (what the formulas give).
        formula: the simple formula that articles quote, of idle over working time; None where there is none.
        peak: activations of one microbatch through 1/P of the layers. copies: of the parameters.
        transfers: messages a microbatch sends between ranks in F (and as many in I).
    """

    schedule: str
    microbatches: int
    bubble: float
    largest_idle: float
    formula: float | None
    peak: float
    copies: int
    transfers: int


def compare(num_ranks: int, microbatches: Sequence[int], costs: Costs | None = None, mode: Mode = "async") -> list[Row]:
    """All schedules side by side, those that do not exist for P and M left out.

    Args:
        costs: times of 1/P of the layers (`Costs.for_stages`).

    Raises:
        ValueError: P < 1.

    Example:
        >>> [row.schedule for row in compare(3, [4])][:3]
        ['gpipe', '1f1b', 'interleaved_1f1b']
    """
    if num_ranks < 1:
        raise ValueError(f"{num_ranks=} must be at least 1; nearest valid: 1")
    rows = []
    for m in microbatches:
        for name, builder in BUILDERS.items():
            if (builder.even_ranks and num_ranks % 2) or m not in nearest_microbatches(name, num_ranks, m):
                continue
            schedule = build(name, num_ranks=num_ranks, num_microbatches=m)
            placement = schedule.placement
            local = (costs or Costs()).for_stages(num_ranks, placement.num_stages)
            s = simulate(schedule, local, mode)
            idle = max(s.idle) / s.makespan
            crossed = [placement.rank_of(i) != placement.rank_of(i + 1) for i in range(placement.num_stages - 1)]
            formula = simple_formula(name, num_ranks, m)
            figures = s.bubble_fraction, idle, formula, s.peak_units, placement.num_directions, sum(crossed)
            rows.append(Row(name, m, *figures))
    return rows


def simple_formula(name: str, num_ranks: int, num_microbatches: int) -> float | None:
    """Idle over working time as articles quote it: (P-1)/M for 1F1B, a third of it for ZB-H1, (P/2-1)/(6M) for
    DualPipe.

    Example:
        >>> simple_formula("1f1b", 16, 32)
        0.46875
    """
    P, M = num_ranks, num_microbatches
    known = {
        "gpipe": (P - 1) / M,
        "1f1b": (P - 1) / M,
        "interleaved_1f1b": (P - 1) / (2 * M),
        "zb_h1": (P - 1) / (3 * M),
        "zb_h2": 0.0,
        "zb_v": 0.0,
        "dualpipe": (P / 2 - 1) / (6 * M),
    }
    return known.get(name)
