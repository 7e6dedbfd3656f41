"""The benchmarks run, and say what they should."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "run" / "bench.py"
SMALL = "--sizes.d-model 16 --sizes.d-ff 16 --sizes.layers 2 --sizes.seq 8 --sizes.vocab 16 --sizes.heads 2 --ranks 2"

RATIOS = (
    ("cpu_seconds_pipeline", "cpu_seconds_reference"),
    ("compiled_bytes", "planned_bytes"),
    ("measured_seconds", "simulated_seconds"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (
            f"step {SMALL} --schedules 1f1b --microbatches 2 --rounds 1",
            {"cpu_seconds_pipeline", "cpu_seconds_reference", "ratio", "wall_seconds"},
        ),
        (f"compile {SMALL} --schedule 1f1b --microbatches 2 3", {"microbatches", "seconds"}),
        (f"memory {SMALL} --schedules 1f1b --microbatches 2", {"planned_bytes", "compiled_bytes", "ratio"}),
        (
            "bubble --schedules 1f1b dualpipe_v --ranks 2 --microbatches 4 --unit 0.05",
            {"measured_seconds", "simulated_seconds", "ratio", "measured_bubble", "predicted_bubble"},
        ),
    ],
)
def test_json_lines(arguments, keys):
    ran = subprocess.run(
        [sys.executable, BENCH, *arguments.split(), "--json"], capture_output=True, text=True, check=True, timeout=300
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert lines
    for line in lines:
        assert keys | {"bench", "versions"} <= set(line)
        for over, under in RATIOS:
            if over in line:
                assert line["ratio"] == pytest.approx(line[over] / line[under])


def test_waits_take_their_time():
    """Never shorter than simulated: it would mean that a wait was left out, or ran beside another of its rank."""
    command = "bubble --schedules zb_v --ranks 2 --microbatches 4 --unit 0.1 --json"
    ran = subprocess.run(
        [sys.executable, BENCH, *command.split()], capture_output=True, text=True, check=True, timeout=300
    )
    line = json.loads(ran.stdout)
    assert line["measured_seconds"] > line["simulated_seconds"]
    assert line["measured_bubble"] > line["predicted_bubble"] > 0


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("bubble --schedules dualpipe --ranks 3", "even"),
        ("memory --schedules nothing", "nothing"),
        ("step --ranks 0", "0"),
    ],
)
def test_bad_input_is_one_line(command, part):
    ran = subprocess.run([sys.executable, BENCH, *command.split()], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2
    assert part in ran.stderr
    assert "Traceback" not in ran.stderr
