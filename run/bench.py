"""Measure the pipeline: `python run/bench.py step|compile [--json]`. Ratios are of figures taken in one run."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import tyro

from dualpipe_jax.emulate import emulate_devices


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A dense model.

    Attributes:
        d_model: width. d_ff: hidden width of the SwiGLU. heads: of attention.
        layers: all dense.
        seq: tokens a sequence; a microbatch is one sequence.
        vocab: token ids.
    """

    d_model: int = 256
    d_ff: int = 1024
    heads: int = 4
    layers: int = 8
    seq: int = 128
    vocab: int = 512


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


def main() -> None:
    command = tyro.cli(
        Annotated[Step, tyro.conf.subcommand("step", prefix_name=False)]
        | Annotated[Compile, tyro.conf.subcommand("compile", prefix_name=False)],  # type: ignore[arg-type]
        description=__doc__,
    )
    emulate_devices(command.ranks)
    if isinstance(command, Step):
        bench_step(command)
    else:
        bench_compile(command)


def bench_compile(options: Compile) -> None:
    """Compile for each number of microbatches, without the persistent cache."""
    import jax

    jax.config.update("jax_enable_compilation_cache", False)
    for microbatches in options.microbatches:
        step, args = _pipeline(options.sizes, options.schedule, options.ranks, microbatches)
        began = time.perf_counter()
        step.lower(*args).compile()
        seconds = time.perf_counter() - began
        line = {"bench": "compile", "schedule": options.schedule, "ranks": options.ranks}
        line |= {"microbatches": microbatches, "seconds": seconds}
        _show(options, line, f"{options.schedule}, {microbatches} microbatches: {seconds:.1f} s to trace and compile")


def bench_step(options: Step) -> None:
    """Time every schedule's gradient function and the reference's, one step of each in turn."""

    programs = {"reference": _runner(*_reference(options.sizes, options.microbatches))}
    for name in options.schedules:
        programs[name] = _runner(*_pipeline(options.sizes, name, options.ranks, options.microbatches))
    for run in programs.values():
        run()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for _ in range(options.rounds):
        for name, run in programs.items():
            times[name].append(_timed(run))
    medians = {name: [statistics.median(column) for column in zip(*t, strict=True)] for name, t in times.items()}
    reference = medians["reference"]
    for name in options.schedules:
        wall, cpu = medians[name]
        line = {
            "bench": "step",
            "schedule": name,
            "cpu_seconds_pipeline": cpu,
            "cpu_seconds_reference": reference[1],
            "ratio": cpu / reference[1],
            "wall_seconds": wall,
            "wall_seconds_reference": reference[0],
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "ranks": options.ranks,
            "microbatches": options.microbatches,
        }
        text = f"{name:12} {cpu:.3f} CPU s a step, reference {reference[1]:.3f}: ratio {line['ratio']:.3f}; "
        _show(options, line, text + f"wall {wall:.3f} s, reference {reference[0]:.3f}")


def _show(options: Step | Compile, line: dict[str, Any], text: str) -> None:
    import jax

    versions = {"jax": jax.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    line = {**line, "sizes": dataclasses.asdict(options.sizes), "versions": versions}
    print(json.dumps(line) if options.json else text, flush=True)


def _runner(step: Any, args: tuple[Any, ...]) -> Callable[[], Any]:
    import jax

    return lambda: jax.block_until_ready(step(*args))


def _timed(run: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def _model_and_batch(sizes: Sizes, microbatches: int) -> tuple[Any, Any, Any]:
    import jax

    from dualpipe_jax.config import ModelConfig
    from dualpipe_jax.model.model import Model, with_weights

    config = ModelConfig(
        vocab_size=sizes.vocab,
        d_model=sizes.d_model,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.heads,
        d_ff=sizes.d_ff,
        moe=None,
    )
    model = Model(config, num_sequences=microbatches, seq_len=sizes.seq)
    tokens = jax.random.randint(jax.random.key(1), (microbatches, 1, sizes.seq), 0, sizes.vocab)
    return model, jax.jit(model.init)(jax.random.key(0)), with_weights({"tokens": tokens, "targets": tokens})


def _reference(sizes: Sizes, microbatches: int) -> tuple[Any, tuple[Any, ...]]:
    """(jitted function, its arguments): the unpipelined program on one device."""
    import jax

    from dualpipe_jax.model.partition import partition, to_stages
    from dualpipe_jax.reference import reference_value_and_grad

    model, params, batch = _model_and_batch(sizes, microbatches)
    stages = partition(sizes.layers, 0, 1)
    fns = model.stage_fns(stages)
    args = jax.device_put((*to_stages(params, stages), batch), jax.devices()[0])
    return jax.jit(lambda *a: reference_value_and_grad(fns, *a)), args


def _pipeline(sizes: Sizes, name: str, ranks: int, microbatches: int) -> tuple[Any, tuple[Any, ...]]:
    """(jitted function, its arguments): the same by a schedule, arrays where the program wants them."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from dualpipe_jax import build, make_mesh, pipeline_value_and_grad
    from dualpipe_jax.executor import PipelineParams
    from dualpipe_jax.model.partition import partition, to_pipeline

    model, params, batch = _model_and_batch(sizes, microbatches)
    schedule = build(name, num_ranks=ranks, num_microbatches=microbatches)
    stages = partition(sizes.layers, 0, schedule.placement.num_stages)
    mesh = make_mesh(ranks)
    arranged = to_pipeline(params, stages, schedule.placement)
    whole, staged = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("pp",)))
    placed = PipelineParams(jax.device_put(arranged.stages, staged), jax.device_put(arranged.shared, whole))
    step = jax.jit(pipeline_value_and_grad(model.stage_fns(stages), schedule, mesh=mesh))
    return step, (placed, jax.device_put(batch, whole))


if __name__ == "__main__":
    main()
