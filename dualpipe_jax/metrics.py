"""What a run measured: one JSON line a step, and TensorBoard events of the same values."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tensorboardX import SummaryWriter

FILE_NAME = "metrics.jsonl"
# Every line has these; a step may add others.
REQUIRED = (
    "loss",
    "tokens_per_second",
    "grad_norm",
    "learning_rate",
    "bubble_predicted",
    "expert_load_max_over_mean",
    "dropped_tokens",
)


class MetricsWriter:
    """Writes `metrics.jsonl` and `tensorboard/` in a run folder; a line is on its way to the disk when `write` returns.

    Args:
        run_dir: made if it does not exist.
        first_step: the step that will be written first. Lines from it on, which a resumed run measures again, are
            removed, and so is a line that an interrupted run left half written.
        enabled: False on all processes but one: writes nothing.
    """

    def __init__(self, run_dir: str | Path, *, first_step: int = 1, enabled: bool = True):
        self._file = self._board = None
        if not enabled:
            return
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE_NAME
        _keep_before(path, first_step)
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def write(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Append the line of a step.

        Args:
            metrics: all of `REQUIRED`, and others. Values that are not finite become null in the file.

        Raises:
            ValueError: some of `REQUIRED` are missing; names them.
        """
        missing = [name for name in REQUIRED if name not in metrics]
        if missing:
            raise ValueError(f"the metrics of {step=} lack {', '.join(missing)}")
        if self._file is None or self._board is None:
            return
        self._file.write(json.dumps({"step": step, **{name: _finite(value) for name, value in metrics.items()}}) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        if self._file is not None and self._board is not None:
            self._file.close()
            self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, float | int | None]]:
    """The lines of a run, in order; a half-written last line is left out."""
    path = Path(run_dir) / FILE_NAME
    return [json.loads(line) for line in _whole_lines(path)] if path.exists() else []


def _keep_before(path: Path, first_step: int) -> None:
    if not path.exists():
        return
    kept = [line for line in _whole_lines(path) if json.loads(line)["step"] < first_step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)  # in one step: an interrupted resume loses nothing


def _whole_lines(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and line.strip()]


def _finite(value: float | int) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None
