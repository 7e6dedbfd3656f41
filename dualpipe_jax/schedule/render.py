"""Pictures of schedules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dualpipe_jax.schedule.actions import Cell, Kind, Schedule
from dualpipe_jax.schedule.comparison import MFU_MODEL, Row
from dualpipe_jax.schedule.costs import Costs
from dualpipe_jax.schedule.graph import cell_graph
from dualpipe_jax.schedule.lower import assign_ticks
from dualpipe_jax.schedule.simulate import Simulation, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: dict[tuple[Kind, int], str] = {
    (Kind.F, 0): "#4C78A8",
    (Kind.F, 1): "#9CC3E6",
    (Kind.B, 0): "#2E8B57",
    (Kind.B, 1): "#93D5AE",
    (Kind.I, 0): "#D9A400",
    (Kind.I, 1): "#F4DA85",
    (Kind.W, 0): "#A0523D",
    (Kind.W, 1): "#DDAA9B",
}
"""Colour of each kind of work for the two shades: directions, or odd and even slots of a rank."""
LABELS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward input", Kind.W: "backward weight"}


class Box(NamedTuple):
    """A rectangle of a Gantt chart: one action; those of one cell take the cell's whole time and share its height."""

    rank: int
    start: float
    width: float
    lane: int
    lanes: int
    kind: Kind
    shade: int
    stage: int
    microbatch: int


def shade_of(schedule: Schedule, stage: int, direction: int) -> int:
    """Which of two shades tells an action's direction, or, with one direction, its rank's odd from its even stages."""
    if schedule.placement.num_directions == 2:
        return direction
    return stage // schedule.placement.num_ranks % 2


def boxes(simulation: Simulation) -> list[Box]:
    """All rectangles. The actions of a cell lie above each other: they run in one program region."""
    found, schedule = [], simulation.schedule
    for rank, cells in enumerate(schedule.ranks):
        times = zip(cells, simulation.start[rank], simulation.end[rank], strict=True)
        for cell, start, end in times:
            for lane, action in enumerate(cell):
                shade = shade_of(schedule, action.stage, action.direction)
                found.append(
                    Box(rank, start, end - start, lane, len(cell), action.kind, shade, action.stage, action.microbatch)
                )
    return found


def text_grid(schedule: Schedule, colour: bool = False) -> str:
    """A line a rank, a column a tick of the lowered table; lower case for direction 1 (or a rank's odd stages).

    Example:
        >>> from dualpipe_jax.schedule import build
        >>> print(text_grid(build("1f1b", num_ranks=2, num_microbatches=2)))
        rank 0 F0 F1 .  B0 .  B1
        rank 1 .  F0 B0 F1 B1 .
    """
    graph = cell_graph(schedule)
    ticks = assign_ticks(graph)
    rows = [[""] * (max(ticks, default=-1) + 1) for _ in schedule.ranks]
    for i, cell in enumerate(graph.cells):
        rows[graph.rank[i]][ticks[i]] = _short(schedule, cell)
    width = max((len(word) for row in rows for word in row), default=1)
    digits = len(str(len(rows) - 1))
    lines = []
    for rank, row in enumerate(rows):
        words = [_paint(word, width) if colour else (word or ".").ljust(width) for word in row]
        lines.append(f"rank {rank:>{digits}} {' '.join(words)}".rstrip())
    return "\n".join(lines)


def _short(schedule: Schedule, cell: Cell) -> str:
    words = []
    for a in cell:
        kind = a.kind.lower() if shade_of(schedule, a.stage, a.direction) else a.kind.value
        words.append(f"{kind}{a.microbatch}")
    return "".join(words)


def _paint(word: str, width: int) -> str:
    """ANSI colours; each action of a cell in its own."""
    if not word:
        return f"\x1b[2m{'.'.ljust(width)}\x1b[0m"
    painted, rest = "", word
    while rest:
        end = next((i for i in range(1, len(rest)) if rest[i].isalpha()), len(rest))
        kind, shade = Kind(rest[0].upper()), int(rest[0].islower())
        r, g, b = (int(COLOURS[kind, shade][i : i + 2], 16) for i in (1, 3, 5))
        text = "30" if shade else "97"
        painted += f"\x1b[{text};48;2;{r};{g};{b}m{rest[:end]}"
        rest = rest[end:]
    return f"{painted}\x1b[0m{' ' * (width - len(word))}"


def draw_png(drawn: Schedule | Simulation, path: str | Path) -> None:
    """Draw a Gantt chart; a suffix other than .png, such as .svg, gives that format.

    Args:
        drawn: a simulation, or a schedule, which is simulated with F = I = W = 1 in mode async.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    simulation = drawn if isinstance(drawn, Simulation) else simulate(drawn, Costs())
    columns = simulation.makespan / max(1e-9, _unit(simulation))
    width = min(160.0, max(9.0, 0.21 * columns + 1.5))
    height = 1.6 + 0.36 * simulation.schedule.placement.num_ranks
    figure = Figure(figsize=(width, height), dpi=150 if width < 60 else 100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_boxes(axes, simulation, labels=columns <= 700)
    _draw_frame(axes, simulation)
    # An entry is at most 1.6 inches wide; columns of two keep the shades of a kind above each other.
    figure.legend(loc="outside lower center", ncols=8 if width > 8 * 1.6 else 4, fontsize=7, frameon=False)
    with rc_context({"svg.fonttype": "none"}):  # text stays text
        figure.savefig(path)


def _unit(simulation: Simulation) -> float:
    """The shortest time of an action alone, the width of a narrow box."""
    found = [b.width for b in boxes(simulation) if b.width > 0]
    return min(found, default=1.0)


def _draw_boxes(axes: Axes, simulation: Simulation, labels: bool) -> None:
    for kind, shade in COLOURS:
        chosen = [b for b in boxes(simulation) if (b.kind, b.shade) == (kind, shade)]
        height = [0.9 / b.lanes for b in chosen]
        bottom = [b.rank - 0.45 + b.lane * 0.9 / b.lanes for b in chosen]
        if chosen:
            axes.barh(
                bottom,
                [b.width for b in chosen],
                height,
                [b.start for b in chosen],
                align="edge",
                color=COLOURS[kind, shade],
                edgecolor="white",
                linewidth=0.4,
                label=_label(simulation.schedule, kind, shade),
            )
        for b, low, tall in zip(chosen, bottom, height, strict=True):
            if labels:
                axes.text(
                    b.start + b.width / 2,
                    low + tall / 2,
                    str(b.microbatch),
                    ha="center",
                    va="center",
                    fontsize=6.5 if b.lanes == 1 else 5.5,
                    color="black" if shade else "white",
                    in_layout=False,
                )


def _label(schedule: Schedule, kind: Kind, shade: int) -> str:
    if schedule.placement.num_directions == 2:
        return f"{LABELS[kind]}, {'up' if shade else 'down'}"
    if schedule.placement.slots == 1:
        return LABELS[kind]
    return f"{LABELS[kind]}, {'odd' if shade else 'even'} turn"


def _draw_frame(axes: Axes, simulation: Simulation) -> None:
    schedule = simulation.schedule
    axes.set_xlim(0, simulation.makespan)
    axes.set_ylim(schedule.placement.num_ranks - 0.5, -0.5)
    axes.set_yticks(range(schedule.placement.num_ranks))
    axes.set_ylabel("rank")
    axes.set_xlabel("time")
    axes.set_facecolor("#E6E6E6")
    axes.set_title(
        f"{schedule.name}: {schedule.placement.num_ranks} ranks, {schedule.num_microbatches} microbatches, "
        f"bubble {100 * simulation.bubble_fraction:.1f}% ({simulation.mode}); grey is idle",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)


SIZE_COLOURS = ("#4C78A8", "#2E8B57", "#D9A400", "#A0523D", "#7A5195", "#555555")
"""Of the numbers of microbatches in a comparison."""


def draw_comparison(rows: Sequence[Row], num_ranks: int, costs: str, path: str | Path) -> None:
    """Draw the bubble of every schedule and M, and the modelled MFU where the rows have one, with its assumptions.

    Args:
        costs: what was simulated, in words.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.schedule for row in rows))
    sizes = list(dict.fromkeys(row.microbatches for row in rows))
    with_mfu = any(row.mfu is not None for row in rows)
    height = 1.6 + len(names) * max(0.3, 0.19 * len(sizes))
    figure = Figure(figsize=(13 if with_mfu else 8, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 1 + with_mfu, sharey=True, squeeze=False)[0]
    bubbles = {(row.schedule, row.microbatches): row.bubble for row in rows}
    _draw_bars(panels[0], names, sizes, bubbles, "bubble, 1 - work / (P x makespan), %")
    if with_mfu:
        mfu = {(row.schedule, row.microbatches): row.mfu for row in rows if row.mfu is not None}
        _draw_bars(panels[1], names, sizes, mfu, "modelled MFU, %")
        figure.supxlabel("\n".join(MFU_MODEL), fontsize=7)
    what = "Bubble and modelled MFU for 671B on 2,048 GPUs" if with_mfu else "Bubble"
    figure.suptitle(f"{what}, P={num_ranks}; {costs}", fontsize=11)
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False, title="microbatches")
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(path)


def _draw_bars(
    axes: Axes, names: list[str], sizes: list[int], values: dict[tuple[str, int], float], title: str
) -> None:
    """A group a schedule, a bar an M; a schedule that does not exist for an M has a gap there."""
    tall = 0.85 / len(sizes)
    for i, size in enumerate(sizes):
        known = [(at, 100 * values[name, size]) for at, name in enumerate(names) if (name, size) in values]
        at = [where - 0.425 + (i + 0.5) * tall for where, _ in known]
        colour = SIZE_COLOURS[i % len(SIZE_COLOURS)]
        bars = axes.barh(at, [value for _, value in known], tall * 0.92, color=colour, label=f"M = {size}")
        axes.bar_label(bars, fmt="%.1f", fontsize=6.5, padding=2)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(title)
    axes.spines[["top", "right"]].set_visible(False)
