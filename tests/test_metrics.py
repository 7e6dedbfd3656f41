"""metrics.jsonl has each step once, also after a resumed or killed run; the display is quiet where it should be."""

import io
import json
import threading

import pytest
from rich.console import Console

from dualpipe_jax.display import Display, closing_panel
from dualpipe_jax.metrics import FILE_NAME, REQUIRED, MetricsWriter, read_metrics


def values(loss=2.0, **extra):
    return {**dict.fromkeys(REQUIRED, 0.0), "loss": loss, "dropped_tokens": 0, **extra}


def steps(run_dir):
    return [line["step"] for line in read_metrics(run_dir)]


def test_a_line_a_step_at_once(tmp_path):
    with MetricsWriter(tmp_path / "run") as writer:
        writer.write(1, values(5.5, expert_load=1.5))
        line = json.loads((tmp_path / "run" / FILE_NAME).read_text())
        assert next(iter(line)) == "step"
        assert {"step", *REQUIRED} < set(line)
        assert (line["loss"], line["expert_load"], line["dropped_tokens"]) == (5.5, 1.5, 0)
        writer.write(2, values())
    assert steps(tmp_path / "run") == [1, 2]


def test_tensorboard_events(tmp_path):
    before = set(threading.enumerate())
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, values())
    events = list((tmp_path / "tensorboard").iterdir())
    assert len(events) == 1
    content = events[0].read_bytes()
    assert all(name.encode() in content for name in REQUIRED)
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)  # told to end, it does so at its next look
        assert not thread.is_alive()


def test_resume_repeats_no_step(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 8):
            writer.write(step, values(1.0))
    with MetricsWriter(tmp_path, first_step=5) as writer:
        writer.write(5, values(9.0))
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 9)]


def test_a_half_written_line_is_dropped(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, values())
        writer.write(2, values())
    path = tmp_path / FILE_NAME
    path.write_text(path.read_text()[:-10])  # killed in the middle of step 2
    assert steps(tmp_path) == [1]
    with MetricsWriter(tmp_path, first_step=2) as writer:
        writer.write(2, values())
    assert steps(tmp_path) == [1, 2]


def test_a_new_run_in_an_old_folder_starts_over(tmp_path):
    for _ in range(2):
        with MetricsWriter(tmp_path) as writer:
            writer.write(1, values())
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_is_null(tmp_path, bad):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, values(bad))
    assert read_metrics(tmp_path)[0]["loss"] is None


def test_missing_metrics_are_named(tmp_path):
    metrics = values()
    del metrics["loss"], metrics["grad_norm"]
    with MetricsWriter(tmp_path) as writer, pytest.raises(ValueError, match="step=3 lack loss, grad_norm"):
        writer.write(3, metrics)


def test_other_processes_write_nothing(tmp_path):
    with MetricsWriter(tmp_path / "run", enabled=False) as writer:
        writer.write(1, values())
    assert not (tmp_path / "run").exists()
    assert read_metrics(tmp_path / "run") == []


def console(terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None, legacy_windows=False)


def test_without_a_terminal_a_line_now_and_then():
    out = console(terminal=False)
    with Display(25, first_step=3, log_every=10, console=out) as display:
        for step in range(3, 26):
            display.update(step, values(loss=step / 10, tokens_per_second=1234.5))
    lines = out.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["3/25", "10/25", "20/25", "25/25"]
    assert "loss 1.000" in lines[1]
    assert "1,234 tokens/s" in lines[1]
    assert "dropped" not in lines[1]


def test_on_a_terminal_a_bar():
    out = console(terminal=True)
    with Display(10, console=out) as display:
        display.note("compiling")
        display.update(10, values(loss=2.5, bubble_predicted=0.31, dropped_tokens=3))
    shown = out.file.getvalue()
    assert "compiling" in shown
    assert "10/10" in shown
    assert "loss 2.500" in shown
    assert "dropped 3" in shown
    assert "bubble 31.0%" in shown


def test_other_processes_show_nothing(capsys):
    with Display(10, enabled=False) as display:
        display.note("compiling")
        display.update(10, values())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_closing_panel_says_what_to_type(terminal):
    out = console(terminal)
    closing_panel(out, "10 steps: loss 5.5 -> 2.6", [("go on", "python run/train.py --train.run-dir [runs]/x")])
    shown = out.file.getvalue()
    assert "5.5 -> 2.6" in shown
    assert "go on" in shown
    assert "python run/train.py --train.run-dir [runs]/x" in shown, "brackets are no markup"
