"""Measure the pipeline: `python run/bench.py step [--json]`. Ratios of figures taken in one run, in alternation."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import tyro

from dualpipe_jax.emulate import emulate_devices


@dataclasses.dataclass(frozen=True)
class Step:
    """CPU and wall seconds of loss and gradients: the pipeline on emulated devices against the unpipelined reference.

    Attributes:
        schedules: which to measure.
        ranks: pipeline ranks, each an emulated device.
        microbatches: of one sequence each.
        d_model: width. d_ff: hidden width of the dense SwiGLU.
        layers: all dense.
        seq: tokens a sequence.
        vocab: token ids.
        rounds: measured steps of each, in alternation.
        json: print one JSON line a measurement.
    """

    schedules: tuple[str, ...] = ("1f1b", "dualpipe_v", "dualpipe")
    ranks: int = 4
    microbatches: int = 8
    d_model: int = 256
    d_ff: int = 1024
    layers: int = 8
    seq: int = 128
    vocab: int = 512
    rounds: int = 9
    json: bool = False


def main() -> None:
    command = tyro.cli(
        Annotated[Step, tyro.conf.subcommand("step")] | Annotated[Literal["list"], tyro.conf.subcommand("list")],  # type: ignore[arg-type]
        description=__doc__,
    )
    if isinstance(command, Step):
        emulate_devices(command.ranks)
        bench_step(command)


def bench_step(options: Step) -> None:
    """Time every schedule's gradient function and the reference's, one step of each in turn."""
    import jax

    programs = {"reference": _reference(options)}
    for name in options.schedules:
        programs[name] = _pipeline(options, name)
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
            **{k: v for k, v in dataclasses.asdict(options).items() if k not in ("schedules", "json")},
            "versions": {"jax": jax.__version__, "python": platform.python_version(), "cores": os.cpu_count()},
        }
        if options.json:
            print(json.dumps(line), flush=True)
        else:
            print(
                f"{name:12} {cpu:.3f} CPU s a step, reference {reference[1]:.3f}: ratio {line['ratio']:.3f}; "
                f"wall {wall:.3f} s, reference {reference[0]:.3f}",
                flush=True,
            )


def _timed(run: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def _model_and_batch(options: Step) -> tuple[Any, Any, Any]:
    import jax

    from dualpipe_jax.config import ModelConfig
    from dualpipe_jax.model.model import Model, with_weights

    config = ModelConfig(
        vocab_size=options.vocab, d_model=options.d_model, num_layers=options.layers, num_heads=4, num_kv_heads=4,
        d_ff=options.d_ff, moe=None,
    )  # fmt: skip
    model = Model(config, num_sequences=options.microbatches, seq_len=options.seq)
    tokens = jax.random.randint(jax.random.key(1), (options.microbatches, 1, options.seq), 0, options.vocab)
    return model, jax.jit(model.init)(jax.random.key(0)), with_weights({"tokens": tokens, "targets": tokens})


def _reference(options: Step) -> Callable[[], Any]:
    import jax

    from dualpipe_jax.model.partition import partition, to_stages
    from dualpipe_jax.reference import reference_value_and_grad

    model, params, batch = _model_and_batch(options)
    stages = partition(options.layers, 0, 1)
    fns = model.stage_fns(stages)
    device = jax.devices()[0]
    args = jax.device_put((*to_stages(params, stages), batch), device)
    step = jax.jit(lambda *a: reference_value_and_grad(fns, *a))
    return lambda: jax.block_until_ready(step(*args))


def _pipeline(options: Step, name: str) -> Callable[[], Any]:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from dualpipe_jax import build, make_mesh, pipeline_value_and_grad
    from dualpipe_jax.executor import PipelineParams
    from dualpipe_jax.model.partition import partition, to_pipeline

    model, params, batch = _model_and_batch(options)
    schedule = build(name, num_ranks=options.ranks, num_microbatches=options.microbatches)
    stages = partition(options.layers, 0, schedule.placement.num_stages)
    mesh = make_mesh(options.ranks)
    arranged = to_pipeline(params, stages, schedule.placement)
    whole, staged = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("pp",)))
    args = (
        PipelineParams(jax.device_put(arranged.stages, staged), jax.device_put(arranged.shared, whole)),
        jax.device_put(batch, whole),
    )
    step = jax.jit(pipeline_value_and_grad(model.stage_fns(stages), schedule, mesh=mesh))
    return lambda: jax.block_until_ready(step(*args))


if __name__ == "__main__":
    main()
