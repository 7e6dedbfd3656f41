"""Is the bubble what the simulation says? Stages that wait instead of work, timed and simulated."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from dualpipe_jax.bench.show import show


@dataclasses.dataclass(frozen=True)
class Bubble:
    """Seconds of a step whose stages wait instead of work, against the simulation.

    A message of emulated devices is a meeting of all of them, so that ticks are in lockstep; that is what is simulated.

    Attributes:
        schedules: which to measure.
        ranks: pipeline ranks, each an emulated device.
        microbatches: of a step.
        unit: seconds of F, of I and of W for 1/ranks of the layers.
        stages_per_rank: of `auto`.
        png: write a chart here.
        json: print one JSON line a measurement.
    """

    schedules: tuple[str, ...] = ("1f1b", "zb_v", "dualpipe", "dualpipe_v", "auto")
    ranks: int = 8
    microbatches: int = 20
    unit: float = 0.2
    stages_per_rank: int = 2
    png: Path | None = None
    json: bool = False

    def run(self) -> None:
        """One step each, after one that warms up."""
        from dualpipe_jax.bench.timed import timed_step
        from dualpipe_jax.schedule import Costs, build, simulate

        lines = []
        for name in self.schedules:
            options: dict[str, Any] = {"stages_per_rank": self.stages_per_rank} if name == "auto" else {}
            schedule = build(name, num_ranks=self.ranks, num_microbatches=self.microbatches, **options)
            costs = Costs(self.unit, self.unit, self.unit).for_stages(self.ranks, schedule.placement.num_stages)
            simulation = simulate(schedule, costs, mode="lockstep")
            step = timed_step(schedule, costs)
            step()
            measured = step()
            lines.append(
                {
                    "bench": "bubble",
                    "schedule": name,
                    "ranks": self.ranks,
                    "microbatches": self.microbatches,
                    "measured_seconds": measured,
                    "simulated_seconds": simulation.makespan,
                    "ratio": measured / simulation.makespan,
                    "measured_bubble": 1 - sum(simulation.work_per_rank) / (self.ranks * measured),
                    "predicted_bubble": simulation.bubble_fraction,
                    "mode": "lockstep",
                }
            )
            show(self, lines[-1], _told(lines[-1]))
        if self.png:
            _draw(lines, self.png)


def _told(line: dict[str, Any]) -> str:
    return (
        f"{line['schedule']:12} {line['measured_seconds']:.2f} s, simulated {line['simulated_seconds']:.2f}: ratio "
        f"{line['ratio']:.3f}; bubble {line['measured_bubble']:.1%}, predicted {line['predicted_bubble']:.1%}"
    )


def _draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Measured and predicted bubbles side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for offset, key, color in ((-0.2, "predicted_bubble", "#9db4c0"), (0.2, "measured_bubble", "#253237")):
        bars = axes.bar(
            [i + offset for i in range(len(lines))],
            [100 * line[key] for line in lines],
            width=0.38,
            color=color,
            label=key.split("_")[0],
        )
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(lines)), [line["schedule"] for line in lines])
    axes.set_ylabel("bubble, % of rank time")
    axes.set_title(f"{lines[0]['ranks']} ranks, {lines[0]['microbatches']} microbatches; stages wait instead of work")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
