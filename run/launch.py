"""Start a run as several processes on this machine: `python run/launch.py --processes 2 -- --train.steps 50`.

Process 0's output is shown, the others' goes to files. When one fails, all are ended within seconds, the exit status is
not 0, and the last thing shown is what the process that failed first had to say. For several machines use Slurm or
Open MPI, whose settings run/train.py reads by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dualpipe_jax.distributed import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from dualpipe_jax.emulate import DEVICE_COUNT, merged_flags

DEFAULT_SCRIPT = Path(__file__).resolve().parent / "train.py"
TAIL_LINES = 60
POLL_S = 0.05


@dataclass
class Child:
    """A started process. `ended_at` (s) and `status` are set when it ends."""

    process_id: int
    popen: subprocess.Popen
    log: Path | None
    ended_at: float | None = None
    status: int | None = None

    def watch(self) -> None:
        """Note when it ends; run in a thread, so that of two failures the first is known."""
        self.status = self.popen.wait()
        self.ended_at = time.monotonic()

    def send(self, signal_number: int) -> None:
        """To it and to what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal_number)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(sys.argv[1:] if argv is None else argv)
    received: list[int] = []  # signals to this launcher; nothing is interrupted, so that no child is lost
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: received.append(number))
    folder = Path(options.log_dir or tempfile.mkdtemp(prefix="dualpipe_jax_"))
    folder.mkdir(parents=True, exist_ok=True)
    if options.processes > 1:
        say(f"{options.processes} processes; the output of all but the first is in {folder}")
    children: list[Child] = []
    try:
        address = f"localhost:{free_port()}"
        for process_id in range(options.processes):
            children.append(start(options, process_id, address, folder))
        wait(children, received)
    finally:
        end(children, options.grace_seconds)
    return report(children, received)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Own options, and in `arguments` all that follows `--`."""
    own, rest = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, rest = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="run/launch.py",
        usage="%(prog)s --processes N [options] [-- arguments of the script]",
        description="Start a run as several processes on this machine.",
    )
    parser.add_argument("--processes", type=positive, required=True, help="how many")
    parser.add_argument(
        "--devices-per-process",
        type=positive,
        help="emulated CPU devices of each; default: the mesh's, shared out evenly",
    )
    parser.add_argument("--script", type=Path, default=DEFAULT_SCRIPT, help="what to run, default run/train.py")
    parser.add_argument("--log-dir", help="folder for the other processes' output; default: a new temporary one")
    parser.add_argument(
        "--grace-seconds", type=float, default=5.0, help="from SIGTERM to SIGKILL when all must end, default 5"
    )
    options = parser.parse_args(own)
    if not options.script.is_file():
        parser.error(f"there is no script {str(options.script)!r}")
    options.arguments = rest
    return options


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def start(options: argparse.Namespace, process_id: int, address: str, folder: Path) -> Child:
    """Start one process in a group of its own, so that it and what it starts can be ended together."""
    log = folder / f"process_{process_id}.log" if process_id else None
    with open(log, "wb") if log else contextlib.nullcontext() as output:
        popen = subprocess.Popen(
            [sys.executable, str(options.script), *options.arguments],
            env=environment(options, process_id, address),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if log else None,
            start_new_session=True,
        )
    child = Child(process_id, popen, log)
    threading.Thread(target=child.watch, daemon=True).start()
    return child


def environment(options: argparse.Namespace, process_id: int, address: str) -> dict[str, str]:
    settings = {COORDINATOR: address, NUM_PROCESSES: str(options.processes), PROCESS_ID: str(process_id)}
    result = {**os.environ, **settings, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if options.devices_per_process:  # asked for here, so it wins over what XLA_FLAGS has
        given = " ".join(f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(f"{DEVICE_COUNT}="))
        result["XLA_FLAGS"] = merged_flags(given, {DEVICE_COUNT: str(options.devices_per_process)})
    return result


def wait(children: Sequence[Child], received: Sequence[int]) -> None:
    """Return when all have ended, one has failed, or this launcher is told to stop."""
    while not received and not any(child.status for child in children):
        if all(child.status is not None for child in children):
            return
        time.sleep(POLL_S)


def end(children: Sequence[Child], grace_seconds: float) -> None:
    """End those that still run: politely, then not; return when all are gone."""
    for child in children:
        if child.status is None:
            child.send(signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while time.monotonic() < deadline and any(child.status is None for child in children):
        time.sleep(POLL_S)
    for child in children:
        child.send(signal.SIGKILL)  # its group, in which it may have left others
        child.popen.wait()
    while any(child.status is None for child in children):  # the watchers' notes
        time.sleep(POLL_S)


def report(children: Sequence[Child], received: Sequence[int]) -> int:
    """Say why the run ended, if not by itself; the exit status."""
    if received:
        say(f"stopped by {signal.Signals(received[0]).name}; all processes have been ended")
        return 128 + received[0]
    failed = [child for child in children if child.status]
    if not failed:
        return 0
    first = min(failed, key=lambda child: child.ended_at or 0.0)
    status = first.status or 1  # never 0 here; negative: the signal that ended it
    if first.log is None and status > 0:  # its traceback is on the screen already, and stays the last thing there
        return status
    how = f"with status {status}" if status > 0 else f"by {signal.Signals(-status).name}"
    say(f"process {first.process_id} of {len(children)} failed first, {how}; all others have been ended")
    if first.log is not None:
        say(f"the end of {first.log}:")
        say(tail(first.log))
    return status if status > 0 else 128 - status


def tail(log: Path) -> str:
    """The last lines; from the first traceback in them, if there is one."""
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    traceback_at = next((i for i, line in enumerate(lines) if line.startswith("Traceback ")), 0)
    return "\n".join(lines[traceback_at:])


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
