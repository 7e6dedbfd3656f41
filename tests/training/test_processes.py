"""A run of two processes is the run of one; when one dies, all end."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dualpipe_jax.metrics import read_metrics

pytestmark = pytest.mark.slow
RUN = Path(__file__).parents[2] / "run"
TINY = """
--preset debug_one_device --pipeline.schedule dualpipe --pipeline.pp 4 --pipeline.ep 2 --pipeline.num-microbatches 8
--data.batch-size 16 --data.seq-len 16 --model.num-layers 4 --model.d-model 16 --model.d-ff 16
--model.moe.d-ff 8 --model.moe.block-size 4 --checkpoint.every 2
"""
ENDS_WITHIN_S = 30  # grace is 2 s; the rest is for a busy machine


def environment():
    """A newcomer's: 8 devices are emulated by the run itself."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return {**kept, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def command(processes, run_dir, text_file, *arguments):
    launcher = ["--processes", processes, "--grace-seconds", 2, "--log-dir", f"{run_dir}-logs", "--"]
    start = [RUN / "launch.py", *launcher] if processes > 1 else [RUN / "train.py"]
    flags = [*TINY.split(), "--train.run-dir", run_dir, "--data.paths", text_file, *arguments]
    return [sys.executable, *map(str, [*start, *flags])]


def run(processes, run_dir, text_file, *arguments):
    done = subprocess.run(
        command(processes, run_dir, text_file, *arguments),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_processes_compute_what_one_does(tmp_path, text_file):
    """Interrupted and resumed too, and once more by one process: sums in another order, and 6 steps for it to grow."""
    run(1, tmp_path / "one", text_file, "--train.steps", "6")
    for processes, stop_at in ((2, 2), (2, 4), (1, 6)):
        run(processes, tmp_path / "two", text_file, "--train.steps", "6", "--train.stop-at", str(stop_at))
    one, two = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two")
    assert [line["step"] for line in two] == [1, 2, 3, 4, 5, 6]
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("learning_rate", 0)):
        np.testing.assert_allclose([line[name] for line in two], [line[name] for line in one], rtol=tolerance)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_run(tmp_path, text_file, victim):
    flags = ("--train.steps", "1000000", "--checkpoint.every", "0")
    launcher = subprocess.Popen(
        command(2, tmp_path / "run", text_file, *flags),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: read_metrics(tmp_path / "run"), 400)
        children = {process_id(pid): pid for pid in children_of(launcher.pid)}
        os.kill(children[victim], signal.SIGKILL)
        killed = time.monotonic()
        _, errors = launcher.communicate(timeout=ENDS_WITHIN_S)
    finally:
        launcher.terminate()
        launcher.wait(60)
    assert time.monotonic() - killed < ENDS_WITHIN_S
    assert launcher.returncode == 128 + signal.SIGKILL
    assert f"process {victim} of 2 failed first, by SIGKILL" in errors
    wait_for(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in children.values()), 5)


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def children_of(pid):
    shown = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=True).stdout
    return [int(line) for line in shown.split()]


def process_id(pid):
    settings = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(int(s.split(b"=")[1]) for s in settings if s.startswith(b"JAX_PROCESS_ID="))


def test_two_processes_find_the_same_value_that_is_not_finite(tmp_path, text_file):
    """A learning rate at which parameters overflow; all processes look for it together, and all end."""
    arguments = ("--train.steps", "9", "--optimizer.learning-rate", "1e30", "--optimizer.warmup-steps", "1")
    done = subprocess.run(
        command(2, tmp_path / "run", text_file, *arguments),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode != 0
    found = r"NonFiniteError: .* in 3 steps in a row, .*: first in the backward of .* \(rank \d\) for microbatch 0"
    assert re.search(found, done.stdout + done.stderr), done.stdout + done.stderr
