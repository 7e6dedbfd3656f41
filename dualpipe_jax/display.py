"""What a person sees of a run: a bar with the newest figures on a terminal, a line now and then anywhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text


class Display:
    """Shows the steps of a run; a context manager.

    Args:
        total_steps: of the run.
        first_step: the first that will be shown; above 1 in a resumed run.
        log_every: without a terminal, show each step that is a multiple of this, the first and the last.
        console: where to; default standard output.
        enabled: False on all processes but one: shows nothing.

    Example:
        >>> with Display(total_steps=1, console=Console(force_terminal=False, width=100)) as display:
        ...     display.update(1, {"loss": 5.5, "tokens_per_second": 1200.0})
        step 1/1  loss 5.500  1,200 tokens/s
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 1,
        log_every: int = 10,
        console: Console | None = None,
        enabled: bool = True,
    ):
        self.console = console or Console(quiet=not enabled)
        self._total, self._first, self._every = total_steps, first_step, log_every
        self._text = Text()
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            expand=True,
        )
        self._task = self._progress.add_task("training", total=total_steps, completed=first_step - 1)
        self._live: Live | None = None
        if self.console.is_terminal and enabled:
            self._live = Live(Group(self._progress, self._text), console=self.console, refresh_per_second=4)

    def note(self, message: str) -> None:
        """Say something once, e.g. that the step is being compiled."""
        self.console.print(message, highlight=False, markup=False, soft_wrap=True)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a step that has ended. Metrics that this display does not know are left out."""
        line = describe_metrics(metrics)
        if self._live is not None:
            self._progress.update(self._task, completed=step)
            self._text.plain = line
        elif step % self._every == 0 or step in (self._first, self._total):
            self.note(f"step {step}/{self._total}  {line}")

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def describe_metrics(metrics: Mapping[str, float]) -> str:
    """The figures that a person follows, in one line.

    Example:
        >>> describe_metrics({"loss": 3.21, "learning_rate": 0.003, "bubble_predicted": 0.25})
        'loss 3.210  lr 3.00e-03  bubble 25.0%'
    """
    formats = {
        "loss": "loss {:.3f}",
        "tokens_per_second": "{:,.0f} tokens/s",
        "learning_rate": "lr {:.2e}",
        "expert_load_max_over_mean": "expert load max/mean {:.2f}",
        "dropped_tokens": "dropped {:,.0f}",
        "bubble_predicted": "bubble {:.1%}",
    }
    shown = {name: text for name, text in formats.items() if name in metrics}
    if not metrics.get("dropped_tokens"):  # nothing is, unless a capacity is set: say it when it happens
        shown.pop("dropped_tokens", None)
    return "  ".join(text.format(metrics[name]) for name, text in shown.items())


def closing_panel(console: Console, title: str, next_steps: Sequence[tuple[str, str]]) -> None:
    """Say that the run has ended, and what can be done now.

    Args:
        title: e.g. "120 steps in 100 s: loss 5.55 -> 2.61".
        next_steps: (what for, command to type) pairs.
    """
    if not console.is_terminal:
        console.print(title, highlight=False, markup=False, soft_wrap=True)
        for purpose, command in next_steps:
            console.print(f"  {purpose}: {command}", highlight=False, markup=False, soft_wrap=True)
        return
    body = Text()
    for purpose, command in next_steps:
        body.append(f"{purpose}\n", style="dim")
        body.append(f"  {command}\n", style="bold")
    body.rstrip()
    console.print(Panel(body, title=Text(title), title_align="left", expand=False, padding=(0, 1)))
