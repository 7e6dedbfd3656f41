"""The launcher: one failure ends all, the original traceback is last, and nobody is left behind."""

import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parent.parent / "run" / "launch.py"
ENDS_WITHIN_S = 20  # grace is 1 s below; the rest is the start of Python on a busy machine

PREAMBLE = """
import os, pathlib, signal, subprocess, sys, time
me, folder = int(os.environ["JAX_PROCESS_ID"]), pathlib.Path(sys.argv[1])
(folder / f"pid_{me}").write_text(str(os.getpid()))
def all_started():
    while len(list(folder.glob("pid_*"))) < int(os.environ["JAX_NUM_PROCESSES"]):
        time.sleep(0.01)
"""


def command(tmp_path, body, processes=2, options=(), arguments=()):
    script = tmp_path / "script.py"
    script.write_text(PREAMBLE + textwrap.dedent(body))
    return [
        sys.executable, str(LAUNCH), "--processes", str(processes), "--script", str(script), "--grace-seconds", "1",
        "--log-dir", str(tmp_path / "logs"), *options, "--", str(tmp_path), *arguments,
    ]  # fmt: skip


def launch(tmp_path, body, **kwargs):
    started = time.monotonic()
    result = subprocess.run(command(tmp_path, body, **kwargs), capture_output=True, text=True, timeout=60, check=False)
    assert time.monotonic() - started < ENDS_WITHIN_S
    assert_nobody_left(tmp_path)
    return result


def assert_nobody_left(tmp_path):
    for file in tmp_path.glob("pid_*"):
        assert not is_running(int(file.read_text())), file.name


def is_running(pid):
    """A dead process whose parent is gone may stay in the table for a while, as a zombie."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return shown.strip()[:1] not in ("", "Z")


def test_settings_output_and_arguments(tmp_path):
    result = launch(
        tmp_path,
        """
        names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "XLA_FLAGS")
        print(*[os.environ[name] for name in names], *sys.argv[2:])
        """,
        options=("--devices-per-process", "3"),
        arguments=("--train.steps", "5", "--", "x"),
    )
    assert result.returncode == 0, result.stderr
    shown, logged = result.stdout, (tmp_path / "logs" / "process_1.log").read_text()
    assert re.fullmatch(r"localhost:\d+ 2 0 .*--xla_force_host_platform_device_count=3.* --train.steps 5 -- x\n", shown)
    assert logged.replace(" 2 1 ", " 2 0 ") == shown, "the others are told the same, and write to files"


def test_a_failure_of_another_process_is_shown_last(tmp_path):
    result = launch(
        tmp_path,
        """
        all_started()
        if me == 1:
            raise ValueError("the cause")
        signal.signal(signal.SIGTERM, lambda *_: None)  # does not listen, as in a collective
        print("rank 0 at work", flush=True)
        time.sleep(100)
        """,
    )
    assert result.returncode == 1
    assert "rank 0 at work" in result.stdout
    assert "process 1 of 2 failed first, with status 1" in result.stderr
    assert result.stderr.splitlines()[-1] == "ValueError: the cause"


def test_the_first_failure_counts_not_the_one_it_causes(tmp_path):
    """The second comes as soon as the first is gone: well within one look of the launcher."""
    result = launch(
        tmp_path,
        """
        all_started()
        if me == 2:
            raise ValueError("the cause")
        if me == 1:
            while True:
                try:
                    os.kill(int((folder / "pid_2").read_text()), 0)
                except ProcessLookupError:
                    os._exit(9)
        time.sleep(100)
        """,
        processes=3,
    )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "ValueError: the cause"


def test_a_failure_of_the_first_process_stays_last(tmp_path):
    result = launch(tmp_path, "all_started()\nif me == 0: raise ValueError('mine')\ntime.sleep(100)")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "ValueError: mine"


def test_a_killed_process_ends_all(tmp_path):
    result = launch(
        tmp_path, "all_started()\nif me == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(100)", processes=3
    )
    assert result.returncode == 128 + signal.SIGKILL
    assert "process 1 of 3 failed first, by SIGKILL" in result.stderr


def test_own_exit_statuses_pass(tmp_path):
    assert launch(tmp_path, "raise SystemExit(2)").returncode == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_leaves_no_orphans(tmp_path, number):
    """Not even processes that its processes started, nor such as ignore SIGTERM."""
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    (folder / f"pid_child_{me}").write_text(str(child.pid))
    time.sleep(100)
    """
    launcher = subprocess.Popen(command(tmp_path, body), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + ENDS_WITHIN_S
    while len(list(tmp_path.glob("pid_*"))) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=ENDS_WITHIN_S)
    assert launcher.returncode == 128 + number
    assert f"stopped by {signal.Signals(number).name}" in errors
    assert_nobody_left(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--processes"),
        (["--processes", "0"], "'0' must be a whole number of at least 1"),
        (["--processes", "2", "--script", "missing.py"], "there is no script 'missing.py'"),
        (["--processes", "2", "--train.steps", "5"], "unrecognized arguments: --train.steps"),
    ],
)
def test_mistakes(arguments, said):
    result = subprocess.run(
        [sys.executable, str(LAUNCH), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2
    assert said in result.stderr


def test_two_real_processes_add_up(tmp_path):
    result = launch(
        tmp_path,
        """
        from dualpipe_jax.distributed import exit_on_failure, initialize_from_environment
        processes = initialize_from_environment(timeout_s=15)
        with exit_on_failure(processes):
            import jax
            import numpy as np
            from jax.experimental import multihost_utils
            gathered = multihost_utils.process_allgather(np.int32(me + 1))
            print(jax.device_count(), jax.local_device_count(), gathered.sum())
            jax.distributed.shutdown()
        """,
        options=("--devices-per-process", "2"),
    )
    assert result.returncode == 0, result.stderr
    assert "4 2 3" in result.stdout.splitlines()  # among words of the collectives' library
