"""The training loop: text in, a run folder out."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from dualpipe_jax.checkpoint import Checkpointer
from dualpipe_jax.config import Config, DataConfig, to_json
from dualpipe_jax.data.pipeline import Batches, shard_batch
from dualpipe_jax.data.text import load_bytes
from dualpipe_jax.display import Display, closing_panel
from dualpipe_jax.executor import PipelineParams
from dualpipe_jax.metrics import MetricsWriter
from dualpipe_jax.model.partition import from_stages
from dualpipe_jax.schedule import Costs, simulate
from dualpipe_jax.schedule.render import draw_png
from dualpipe_jax.train_step import StepMetrics, Trainer, TrainState
from dualpipe_jax.validation import ConfigError

PyTree = Any
MAX_NON_FINITE = 3  # steps in a row that may be skipped


class NonFiniteError(RuntimeError):
    """Loss or gradients were not finite for several steps in a row."""


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        state: after the last step. metrics: one dict a step, as in metrics.jsonl.
        first_step_seconds: from the start of `train` to the end of the first step, compilation included.
    """

    run_dir: Path
    state: TrainState
    metrics: list[dict[str, float]]
    first_step_seconds: float
    seconds: float


def train(config: Config) -> Result:
    """Run `config`, from the newest checkpoint of its run folder if there is one.

    Every process of a multi-process run calls this with the same configuration. Process 0 writes the run folder.

    Raises:
        ConfigError: there is no such text, or too little of it; or the run folder has checkpoints that the
            configuration says not to resume from. Nothing has been changed then.
        NonFiniteError: loss or gradients were not finite in `MAX_NON_FINITE` steps in a row; says on which rank, in
            which stage and microbatch, and which parameters are not.
        CheckpointError: a checkpoint could not be written.
    """
    return _Run(config).run()


class _Run:
    """One run's objects, and the steps of its life in order."""

    def __init__(self, config: Config) -> None:
        self.began = time.perf_counter()
        self.config = config
        self.main = jax.process_index() == 0
        self.run_dir = Path(config.train.run_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}")
        self.trainer = Trainer(config)
        self.bubble = simulate(self.trainer.schedule, Costs()).bubble_fraction
        self.batches = _batches(config.data)

    def run(self) -> Result:
        with Checkpointer(self.run_dir / "checkpoints", keep=self.config.checkpoint.keep) as checkpoints:
            state, first = self._start(checkpoints)
            self._prepare_folder()  # not before: another run's folder may be refused, and must stay as it is
            writer = MetricsWriter(self.run_dir, first_step=first, enabled=self.main)
            display = Display(
                self.config.train.steps,
                first_step=first,
                log_every=self.config.train.log_every,
                enabled=self.main,
            )
            with writer, display:
                self._introduce(display, first)
                result = self._steps(state, first, checkpoints, writer, display)
        self._close(display, result)
        return result

    # ---------------------------------------------------------------- before the first step

    def _prepare_folder(self) -> None:
        if not self.main:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "config.json").write_text(to_json(self.config), encoding="utf-8")
        draw_png(self.trainer.schedule, self.run_dir / "schedule.png")

    def _start(self, checkpoints: Checkpointer) -> tuple[TrainState, int]:
        """(state, the step that comes first): fresh, or as the newest checkpoint has it."""
        latest = checkpoints.latest()
        if latest is None:
            return self.trainer.init(), 1
        if not self.config.checkpoint.resume:
            raise ConfigError(
                f"{self.run_dir} has checkpoints up to step {latest} and checkpoint.resume is off; "
                "choose another train.run_dir, or let it resume"
            )
        state, host = restore(self.trainer, checkpoints, latest)
        self.batches.set_state(host["data"])
        return state, latest + 1

    def _introduce(self, display: Display, first: int) -> None:
        c = self.config
        count = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(self.trainer.model.init, jax.random.key(0))))
        display.note(
            f"{count:,} parameters, {c.model.num_layers} layers; {c.pipeline.schedule} over pp={c.pipeline.pp} "
            f"dp={c.pipeline.dp} ep={c.pipeline.ep} on {self.trainer.mesh.devices.flat[0].platform}, "
            f"{c.pipeline.num_microbatches} microbatches, predicted bubble {self.bubble:.1%} (F = I = W = 1)"
        )
        display.note(f"run folder {self.run_dir}" + (f", resuming at step {first}" if first > 1 else ""))
        display.note("compiling the step ...")

    # ---------------------------------------------------------------- steps

    def _steps(
        self, state: TrainState, first: int, checkpoints: Checkpointer, writer: MetricsWriter, display: Display
    ) -> Result:
        c = self.config
        last = min(c.train.steps, c.train.stop_at or c.train.steps)
        history: list[dict[str, float]] = []
        first_step_seconds, skipped = 0.0, 0
        for step in range(first, last + 1):
            began = time.perf_counter()
            batch = self._next_batch()
            state, measured = self.trainer.step(state, batch)
            line = self._line(jax.device_get(measured), time.perf_counter() - began)
            if step == first:
                first_step_seconds = time.perf_counter() - self.began
            writer.write(step, line)
            where = self._where_not_finite(state, batch) if line["skipped"] else ""
            skipped = self._count_skipped(step, skipped, where, display)
            display.update(step, line)
            history.append({"step": step, **line})
            if c.checkpoint.every and (step == last or step % c.checkpoint.every == 0):
                save(self.trainer, checkpoints, step, state, {"data": self.batches.get_state()})
        return Result(self.run_dir, state, history, first_step_seconds, time.perf_counter() - self.began)

    def _next_batch(self) -> PyTree:
        """The next global batch [batch, seq], cut into microbatches and put onto the mesh."""
        m = self.config.pipeline.num_microbatches
        batch: Any = next(self.batches)
        cut: Any = {name: rows.reshape(m, -1, *rows.shape[1:]) for name, rows in batch.items()}
        return shard_batch(cut, self.trainer.batch_sharding)

    def _line(self, measured: StepMetrics, seconds: float) -> dict[str, float]:
        tokens = self.config.data.batch_size * self.config.data.seq_len
        values = {name: value.item() for name, value in measured._asdict().items() if name != "finite"}
        return {
            **values,
            "tokens_per_second": tokens / seconds,
            "seconds": seconds,
            "bubble_predicted": self.bubble,
            "skipped": int(not measured.finite),
        }

    def _where_not_finite(self, state: TrainState, batch: PyTree) -> str:
        """In words. Every process takes part: whether a step was skipped is known to all alike."""
        found = self.trainer.find_non_finite(state, batch)
        return str(found) if found else "each microbatch alone is finite, a sum over them or the norm overflows"

    def _count_skipped(self, step: int, before: int, where: str, display: Display) -> int:
        """Skipped steps in a row; where: what is known of this one, empty if it is finite."""
        if not where:
            return 0
        display.note(
            f"step {step}: loss or gradients are not finite, {where}; parameters and moments stay as they were"
        )
        if before + 1 == MAX_NON_FINITE:
            raise NonFiniteError(
                f"loss or gradients were not finite in {MAX_NON_FINITE} steps in a row, the last of them {step}: "
                f"{where}; the checkpoints in {self.run_dir / 'checkpoints'} hold the last good state"
            )
        return before + 1

    def _close(self, display: Display, result: Result) -> None:
        if not self.main or not result.metrics:
            return
        start, end = result.metrics[0], result.metrics[-1]
        closing_panel(
            display.console,
            f"steps {start['step']} to {end['step']} in {result.seconds:.0f} s "
            f"(first after {result.first_step_seconds:.0f} s): loss {start['loss']:.2f} -> {end['loss']:.2f}, "
            f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB",
            [
                ("the schedule that ran", str(self.run_dir / "schedule.png")),
                ("curves", f"tensorboard --logdir {self.run_dir} (pip install tensorboard)"),
                (
                    "go on",
                    f"python run/train.py --train.run-dir {self.run_dir} --train.steps {2 * self.config.train.steps}",
                ),
                ("another schedule", "python run/train.py --pipeline.schedule dualpipe_v"),
                ("all options", "python run/train.py --help"),
            ],
        )


def _batches(data: DataConfig) -> Batches:
    try:
        text = load_bytes(data.paths)
        return Batches(text, seq_len=data.seq_len, batch_size=data.batch_size, seed=data.seed)
    except ValueError as error:
        raise ConfigError(str(error)) from error


# -------------------------------------------------------------------- checkpoints


def canonical(trainer: Trainer, state: TrainState) -> PyTree:
    """A state by layer, whatever the pipeline's arrangement (decision 0006)."""
    is_arranged = lambda node: isinstance(node, PipelineParams)  # noqa: E731
    return jax.tree.map(lambda n: trainer.canonical(n) if is_arranged(n) else n, state, is_leaf=is_arranged)


def arranged(trainer: Trainer, tree: PyTree) -> TrainState:
    """Undo `canonical`."""
    is_model = lambda node: isinstance(node, dict) and "embedding" in node  # noqa: E731
    return jax.tree.map(lambda n: trainer.arranged(n) if is_model(n) else n, tree, is_leaf=is_model)


def canonical_shardings(trainer: Trainer) -> tuple[PyTree, PyTree]:
    """Shapes of a state by layer, and how it is spread over the mesh while it is saved or restored."""
    shapes = jax.eval_shape(partial(canonical, trainer), jax.eval_shape(trainer.init))
    is_arranged = lambda node: isinstance(node, PipelineParams)  # noqa: E731

    def by_layer(node: Any) -> Any:
        """As in the pipeline but for the rank: a layer is on all ranks for the moment, its other dims as they are."""
        if not is_arranged(node):
            return node
        off_rank = lambda s: NamedSharding(trainer.mesh, PartitionSpec(*s.spec[1:]))  # noqa: E731
        stage = jax.tree.map(off_rank, node.stages[0])
        return from_stages([stage] * len(trainer.stages), node.shared, trainer.stages)

    return shapes, jax.tree.map(by_layer, trainer.state_shardings, is_leaf=is_arranged)


def save(trainer: Trainer, checkpoints: Checkpointer, step: int, state: TrainState, host: dict[str, Any]) -> None:
    """Start to save a state; see `Checkpointer.save`."""
    checkpoints.save(step, _compiled_canonical(trainer)(state), host)


@lru_cache(maxsize=1)
def _compiled_canonical(trainer: Trainer) -> Callable[[TrainState], PyTree]:
    """`canonical` under jit: made once, so that only the first save compiles it."""
    _, shardings = canonical_shardings(trainer)
    return jax.jit(partial(canonical, trainer), out_shardings=shardings)


def restore(trainer: Trainer, checkpoints: Checkpointer, step: int) -> tuple[TrainState, dict[str, Any]]:
    """The state of a step, saved under this or any other pipeline, bit for bit."""
    shapes, shardings = canonical_shardings(trainer)
    abstract = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)
    tree, host = checkpoints.restore(step, abstract)
    return jax.jit(partial(arranged, trainer), out_shardings=trainer.state_shardings)(tree), host
