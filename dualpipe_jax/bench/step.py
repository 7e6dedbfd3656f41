"""Time of a step against the unpipelined program, memory against the plan, time to compile."""

from __future__ import annotations

import dataclasses
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

from dualpipe_jax.bench.dense import Sizes, pipeline, reference
from dualpipe_jax.bench.show import show


@dataclasses.dataclass(frozen=True)
class Step:
    """CPU and wall seconds of loss and gradients: the pipeline on emulated devices against the unpipelined reference.

    Attributes:
        schedules: which to measure.
        ranks: pipeline ranks, each an emulated device.
        microbatches: of a step.
        rounds: measured steps of each, in alternation; the median counts.
        json: print one JSON line a measurement.
    """

    schedules: tuple[str, ...] = ("1f1b", "dualpipe_v", "dualpipe")
    ranks: int = 4
    microbatches: int = 8
    rounds: int = 9
    sizes: Sizes = dataclasses.field(default_factory=Sizes)
    json: bool = False

    def run(self) -> None:
        """Time every schedule's gradient function and the reference's, one step of each in turn."""
        import jax

        programs = {"reference": _runner(*reference(self.sizes, self.microbatches))}
        for name in self.schedules:
            grad_fn, args = pipeline(self.sizes, name, self.ranks, self.microbatches)
            programs[name] = _runner(jax.jit(grad_fn), args)
        for run in programs.values():
            run()
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
        for _ in range(self.rounds):
            for name, run in programs.items():
                times[name].append(_timed(run))
        medians = {name: [statistics.median(column) for column in zip(*t, strict=True)] for name, t in times.items()}
        for name in self.schedules:
            self._show(name, medians[name], medians["reference"])

    def _show(self, name: str, measured: list[float], unpipelined: list[float]) -> None:
        (wall, cpu), (wall_reference, cpu_reference) = measured, unpipelined
        line = {
            "bench": "step",
            "schedule": name,
            "cpu_seconds_pipeline": cpu,
            "cpu_seconds_reference": cpu_reference,
            "ratio": cpu / cpu_reference,
            "wall_seconds": wall,
            "wall_seconds_reference": wall_reference,
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "ranks": self.ranks,
            "microbatches": self.microbatches,
        }
        text = f"{name:12} {cpu:.3f} CPU s a step, reference {cpu_reference:.3f}: ratio {line['ratio']:.3f}; "
        show(self, line, text + f"wall {wall:.3f} s, reference {wall_reference:.3f}")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a compiled step needs besides arguments and results, against those planned, on one device.

    Planned are the buffers in their slots and what the largest operation needs (compiled alone).

    Attributes:
        schedules: which to measure.
        ranks: pipeline ranks.
        microbatches: of a step.
        json: print one JSON line a measurement.
    """

    schedules: tuple[str, ...] = ("1f1b", "zb_v", "dualpipe_v", "dualpipe")
    ranks: int = 4
    microbatches: int = 8
    sizes: Sizes = dataclasses.field(default_factory=Sizes)
    json: bool = False

    def run(self) -> None:
        """Compile each, twice: whole, and by operation."""
        import jax

        for name in self.schedules:
            grad_fn, args = pipeline(self.sizes, name, self.ranks, self.microbatches)
            plan, largest = grad_fn.memory_plan(*args), max(grad_fn.cell_bytes(*args).values())
            analysis: Any = jax.jit(grad_fn).lower(*args).compile().memory_analysis()
            compiled, planned = analysis.temp_size_in_bytes, plan.total + largest
            line = {"bench": "memory", "schedule": name, "ranks": self.ranks, "microbatches": self.microbatches}
            line |= {"planned_bytes": planned, "compiled_bytes": compiled, "ratio": compiled / planned}
            line |= {"plan": plan._asdict(), "largest_operation_bytes": largest}
            text = f"{name:12} planned {planned / 2**20:.1f} MiB, compiled {compiled / 2**20:.1f} MiB: "
            show(self, line, text + f"ratio {compiled / planned:.2f}")


@dataclasses.dataclass(frozen=True)
class Compile:
    """Seconds to trace and compile loss and gradients, by number of microbatches.

    Attributes:
        schedule: which to compile.
        ranks: pipeline ranks.
        microbatches: of a step, several.
        json: print one JSON line a measurement.
    """

    schedule: str = "dualpipe"
    ranks: int = 4
    microbatches: tuple[int, ...] = (8, 64)
    sizes: Sizes = dataclasses.field(default_factory=Sizes)
    json: bool = False

    def run(self) -> None:
        """Compile for each number of microbatches, without the persistent cache."""
        import jax

        jax.config.update("jax_enable_compilation_cache", False)
        for microbatches in self.microbatches:
            grad_fn, args = pipeline(self.sizes, self.schedule, self.ranks, microbatches)
            began = time.perf_counter()
            jax.jit(grad_fn).lower(*args).compile()
            seconds = time.perf_counter() - began
            line = {"bench": "compile", "schedule": self.schedule, "ranks": self.ranks}
            line |= {"microbatches": microbatches, "seconds": seconds}
            show(self, line, f"{self.schedule}, {microbatches} microbatches: {seconds:.1f} s to trace and compile")


def _runner(step: Any, args: tuple[Any, ...]) -> Callable[[], Any]:
    import jax

    return lambda: jax.block_until_ready(step(*args))


def _timed(run: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu
