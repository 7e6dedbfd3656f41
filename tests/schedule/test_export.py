"""What other programs read, and the command line."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dualpipe_jax.schedule import build, parse_schedule, simulate
from dualpipe_jax.schedule.export import chrome_trace

SCRIPT = Path(__file__).parents[2] / "run" / "schedule.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("run_schedule", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_trace_has_every_cell():
    simulation = simulate(build("dualpipe", num_ranks=4, num_microbatches=8))
    events = [e for e in json.loads(chrome_trace(simulation))["traceEvents"] if e["ph"] == "X"]
    assert len(events) == sum(map(len, simulation.schedule.ranks))
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(1000 * simulation.makespan)
    assert {e["pid"] for e in events} == {0, 1, 2, 3}


def test_json_object(script, capsys):
    assert script.main(["--schedule", "dualpipe", "--ranks", "8", "--microbatches", "20", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert {"schedule", "ranks", "microbatches", "makespan", "bubble_fraction", "peak_activations"} <= set(figures)
    assert {"pending_weight_max", "work_per_rank", "mode"} <= set(figures)
    assert figures["makespan"] == 66
    assert list(figures["modes"]) == ["async", "neighbour", "neighbour_1", "lockstep"]
    assert (figures["modes"]["async"]["makespan"], figures["modes"]["neighbour"]["makespan"]) == (66, 72)
    assert "peak_bytes" not in figures


def test_bytes_and_a_limit_on_them(script, capsys):
    arguments = ["--ranks", "4", "--microbatches", "8", "--bytes", "1e9", "--json"]
    assert script.main(["--schedule", "dualpipe", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] == 5e9
    assert script.main(["--schedule", "auto", *arguments, "--stages-per-rank", "2", "--memory-limit", "3e9"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] <= 3e9


def test_auto_minimises_what_is_asked_for(script, capsys):
    arguments = ["--schedule", "auto", "--ranks", "4", "--microbatches", "8", "--stages-per-rank", "2", "--json"]
    assert script.main([*arguments, "--mode", "neighbour"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["schedule"] == "auto"
    assert figures["makespan"] == 25.5  # 51 times of half a rank's layers: the bound


def test_files(script, tmp_path, capsys):
    names = ["csv", "png", "svg", "trace", "html"]
    arguments = [x for n in names for x in (f"--{n}", str(tmp_path / f"schedule.{n}"))]
    assert script.main(["--schedule", "zb_v", "--ranks", "2", "--microbatches", "4", *arguments]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[-4:]] == ["async", "neighbour", "neighbour_1", "lockstep"]
    schedule = build("zb_v", num_ranks=2, num_microbatches=4)
    assert parse_schedule((tmp_path / "schedule.csv").read_text(), schedule.placement, "zb_v") == schedule
    assert all((tmp_path / f"schedule.{n}").stat().st_size > 100 for n in names)


def test_compare_prints_a_table(script, tmp_path, capsys):
    files = ["--png", str(tmp_path / "chart.png"), "--html", str(tmp_path / "chart.html")]
    assert script.main(["--compare", "--ranks", "4", "--microbatches", "8", "16", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert "F, I, W = 1, 1, 1, transfer 0 (async)" in (tmp_path / "chart.html").read_text()
    assert lines[0].split()[:3] == ["schedule", "M", "bubble"]
    assert sum(line.startswith("dualpipe ") for line in lines) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "nearest valid: 2"),
        (["--ranks", "3"], "nearest valid: 2 or 4"),
        (["--microbatches", "-1"], "nearest valid: 16"),
        (["--schedule", "fast"], "unknown schedule 'fast'"),
        (["--costs", "1", "-1", "1"], "cost backward_input=-1.0 must be finite"),
        (["--costs", "nan", "1", "1"], "cost forward=nan must be finite"),
        (["--microbatches", "8", "16"], "need --compare"),
        (["--compare", "--ranks", "0"], "num_ranks=0 must be at least 1"),
        (["--compare", "--csv", "order.csv"], "leave out --compare"),
        (["--memory-limit", "4"], "--memory-limit is for --schedule auto"),
        (["--bytes", "-1"], "must be at least 0; nearest valid: 0"),
        (["--bytes", "1", "2", "3"], "--bytes takes one or two numbers, not 3"),
        (["--schedule", "1f1b", "--stages-per-rank", "2"], "1f1b does not take stages_per_rank"),
        (["--schedule", "wave", "--stages-per-rank", "0"], "slots=0 must be at least 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(script, capsys, arguments, message):
    assert script.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_unknown_flag_exits_with_2():
    result = subprocess.run([sys.executable, SCRIPT, "--rank", "4"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "error: unrecognized arguments: --rank 4\n"
