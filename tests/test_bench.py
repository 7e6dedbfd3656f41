"""The benchmarks run, and say what they should."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "run" / "bench.py"
SMALL = "--sizes.d-model 16 --sizes.d-ff 16 --sizes.layers 2 --sizes.seq 8 --sizes.vocab 16 --sizes.heads 2 --ranks 2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (
            f"step {SMALL} --schedules 1f1b --microbatches 2 --rounds 1",
            {"cpu_seconds_pipeline", "cpu_seconds_reference", "ratio", "wall_seconds"},
        ),
        (f"compile {SMALL} --schedule 1f1b --microbatches 2 3", {"microbatches", "seconds"}),
    ],
)
def test_json_lines(arguments, keys):
    ran = subprocess.run(
        [sys.executable, BENCH, *arguments.split(), "--json"], capture_output=True, text=True, check=True, timeout=300
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert lines
    for line in lines:
        assert keys | {"bench", "sizes", "versions"} <= set(line)
    if "ratio" in keys:
        assert lines[0]["ratio"] == pytest.approx(lines[0]["cpu_seconds_pipeline"] / lines[0]["cpu_seconds_reference"])
