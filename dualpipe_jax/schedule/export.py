"""Schedules for other programs: Chrome trace events, and self-contained web pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

from dualpipe_jax.schedule.actions import Kind, format_cell
from dualpipe_jax.schedule.comparison import MFU_MODEL, Row
from dualpipe_jax.schedule.render import COLOURS, LABELS, shade_of
from dualpipe_jax.schedule.report import phases, side_by_side
from dualpipe_jax.schedule.simulate import Simulation


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


def schedule_page(simulation: Simulation) -> str:
    """HTML of an interactive Gantt chart: zoom, hover, phases, play, all modes. Needs nothing else, and no network."""
    return _page("schedule.html", _schedule_data(simulation))


def comparison_page(rows: Sequence[Row], num_ranks: int, costs: str) -> str:
    """HTML of `compare`'s table and its chart of bubble and modelled MFU.

    Args:
        costs: what was simulated, in words.
    """
    data = {"ranks": num_ranks, "costs": costs, "model": MFU_MODEL, "rows": [asdict(row) for row in rows]}
    return _page("comparison.html", data)


def _page(template: str, data: dict[str, Any]) -> str:
    text = resources.files("dualpipe_jax.schedule").joinpath("pages", template).read_text(encoding="utf-8")
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # no text may end the script
    return text.replace("__DATA__", embedded)


def _schedule_data(simulation: Simulation) -> dict[str, Any]:
    """What the page draws: cells as [text, duration, actions], an action as [kind, shade, stage, microbatch]."""
    schedule = simulation.schedule
    cells = [
        [
            [
                format_cell(cell),
                end - start,
                [[a.kind.value, shade_of(schedule, a.stage, a.direction), a.stage, a.microbatch] for a in cell],
            ]
            for cell, start, end in zip(row, simulation.start[rank], simulation.end[rank], strict=True)
        ]
        for rank, row in enumerate(schedule.ranks)
    ]
    modes = {
        mode: {"makespan": s.makespan, "bubble": s.bubble_fraction, "start": s.start, "phases": phases(s)}
        for mode, s in side_by_side(simulation).items()
    }
    return {
        "schedule": schedule.name,
        "microbatches": schedule.num_microbatches,
        "directions": schedule.placement.num_directions,
        "slots": schedule.placement.slots,
        "mode": simulation.mode,
        "cells": cells,
        "modes": modes,
        "colours": {f"{kind.value}{shade}": colour for (kind, shade), colour in COLOURS.items()},
        "labels": {kind.value: label for kind, label in LABELS.items()},
    }
