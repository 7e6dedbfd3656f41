"""Several processes: who they are, how they find each other, and how all end when one fails.

Imports jax only when it joins the processes, so that devices can be emulated after the number of processes is known.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

COORDINATOR, NUM_PROCESSES, PROCESS_ID = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
INIT_TIMEOUT_S = 120  # processes of a cluster start within this of each other
HEARTBEAT_TIMEOUT_S = 30  # without a launcher that ends them, processes give up this long after one has gone silent
_PORTS = (61440, 4096)  # first, count: where a port is derived from a job's number, as JAX does


class LaunchError(ValueError):
    """The processes cannot be joined as the environment says; the message says what to set."""


@dataclass(frozen=True)
class Processes:
    """This process among all of the run.

    Attributes:
        process_id: 0 .. num_processes - 1.
        num_processes: 1: no other, nothing to join.
        coordinator: host:port of process 0; None when there is only one.
    """

    process_id: int = 0
    num_processes: int = 1
    coordinator: str | None = None

    @property
    def is_first(self) -> bool:
        """This is the one that writes and shows."""
        return self.process_id == 0


def processes_from_environment(environment: Mapping[str, str] | None = None) -> Processes:
    """Who this process is, by JAX_COORDINATOR_ADDRESS / JAX_NUM_PROCESSES / JAX_PROCESS_ID, Slurm or Open MPI (4, 5).

    A JAX_... value wins over the cluster's, each on its own. None of them: one process.

    Args:
        environment: default the process's.

    Raises:
        LaunchError: settings are missing, malformed or contradictory; names them.

    Example:
        >>> processes_from_environment({COORDINATOR: "a:1234", NUM_PROCESSES: "2", PROCESS_ID: "1"})
        Processes(process_id=1, num_processes=2, coordinator='a:1234')
        >>> processes_from_environment({})
        Processes(process_id=0, num_processes=1, coordinator=None)
    """
    env = os.environ if environment is None else environment
    explicit = {name: env[name] for name in (COORDINATOR, NUM_PROCESSES, PROCESS_ID) if env.get(name)}
    settings = {**_slurm(env), **_open_mpi(env), **explicit}
    if not settings:
        return Processes()
    count = _integer(settings, NUM_PROCESSES, least=1) if NUM_PROCESSES in settings else None
    if count == 1 and COORDINATOR not in explicit:
        return Processes()
    missing = [name for name in (COORDINATOR, NUM_PROCESSES, PROCESS_ID) if name not in settings]
    if missing or count is None:
        raise LaunchError(
            f"{', '.join(settings)} {'is' if len(settings) == 1 else 'are'} set but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not: "
            f"set all of {COORDINATOR}, {NUM_PROCESSES} and {PROCESS_ID}, or none"
        )
    process_id = _integer(settings, PROCESS_ID, least=0)
    if process_id >= count:
        raise LaunchError(
            f"{PROCESS_ID}={process_id} must be below {NUM_PROCESSES}={count}; the nearest valid value is {count - 1}"
        )
    coordinator = settings[COORDINATOR]
    if not re.fullmatch(r".+:\d+", coordinator):
        raise LaunchError(f"{COORDINATOR}={coordinator!r} must be host:port, e.g. {coordinator.rstrip(':')}:12345")
    return Processes(process_id, count, coordinator)


def initialize_from_environment(timeout_s: float = INIT_TIMEOUT_S) -> Processes:
    """Join the processes that the environment names; to be called before the first use of a device.

    When they have not all arrived after `timeout_s` seconds, says so and ends this process with status 1: JAX would
    end it too, but with a stack trace of its own inside.

    Raises:
        LaunchError: as `processes_from_environment`; or the coordinator's port is taken.
    """
    processes = processes_from_environment()
    if processes.num_processes == 1:
        return processes
    if processes.is_first:
        _check_port_is_free(processes)
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # for the CPU backend only
    with _time_limit(timeout_s, processes):
        jax.distributed.initialize(
            processes.coordinator,
            processes.num_processes,
            processes.process_id,
            local_device_ids=_local_devices(os.environ),
            initialization_timeout=int(timeout_s) + 60,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        )
    return processes


@contextlib.contextmanager
def _time_limit(timeout_s: float, processes: Processes) -> Iterator[None]:
    def give_up() -> None:
        print(
            f"error: process {processes.process_id} could not join the {processes.num_processes} processes at "
            f"{processes.coordinator} within {timeout_s:g} s; "
            "have all of them started, and can they reach that address?",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def exit_on_failure(processes: Processes) -> Iterator[None]:
    """End this process at once when the block raises, with the traceback as its last words and status 1.

    An ordinary exit waits for the other processes, which wait for this one's next collective: minutes of silence. One
    process alone has nobody to wait for, and its exception goes on as usual.
    """
    try:
        yield
    except BaseException as error:
        if processes.num_processes == 1 or (isinstance(error, SystemExit) and not error.code):
            raise
        print(f"process {processes.process_id} of {processes.num_processes} failed:", file=sys.stderr)
        traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


def _integer(settings: Mapping[str, str], name: str, least: int) -> int:
    value = settings[name]
    if not re.fullmatch(r"-?\d+", value) or int(value) < least:
        raise LaunchError(
            f"{name}={value!r} must be a whole number of at least {least}; the nearest valid value is {least}"
        )
    return int(value)


def _slurm(env: Mapping[str, str]) -> dict[str, str]:
    """Settings of a task that srun started (a bare sbatch script has no SLURM_STEP_NODELIST: one process)."""
    if "SLURM_STEP_NODELIST" not in env or "SLURM_PROCID" not in env:
        return {}
    return {
        COORDINATOR: f"{first_host(env['SLURM_STEP_NODELIST'])}:{_port(env.get('SLURM_JOB_ID', '0'))}",
        NUM_PROCESSES: env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS", "1"),
        PROCESS_ID: env["SLURM_PROCID"],
    }


def first_host(node_list: str) -> str:
    """The first of Slurm's compressed list of hosts.

    Example:
        >>> first_host("gpu[007-009,12]-ib,cpu1"), first_host("a1,b2")
        ('gpu007-ib', 'a1')
    """
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", node_list)
    if not match:
        raise LaunchError(f"SLURM_STEP_NODELIST={node_list!r} names no host")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match.group())


def _open_mpi(env: Mapping[str, str]) -> dict[str, str]:
    """Settings of a process that mpirun started. Process 0 is taken to be where mpirun is, as it is by default."""
    if "OMPI_COMM_WORLD_RANK" not in env or "OMPI_COMM_WORLD_SIZE" not in env:
        return {}
    settings = {NUM_PROCESSES: env["OMPI_COMM_WORLD_SIZE"], PROCESS_ID: env["OMPI_COMM_WORLD_RANK"]}
    version_4 = re.match(r"(\d+)\.\d+;tcp6?://\[?([^,:\]]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    version_5 = re.match(r"prte(?:run)?-(.+)-(\d+)@", env.get("PMIX_NAMESPACE", ""))
    job, host = version_4.groups() if version_4 else version_5.groups()[::-1] if version_5 else (None, None)
    if job is None:
        return settings
    if env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == env["OMPI_COMM_WORLD_SIZE"]:
        host = "localhost"  # all on one machine, whose own name may not resolve
    return {COORDINATOR: f"{host}:{_port(job)}", **settings}


def _port(job: str) -> int:
    first, count = _PORTS
    return first + int(re.sub(r"\D", "", job) or 0) % count


def _local_devices(env: Mapping[str, str]) -> list[int] | None:
    """Which GPUs of its host a cluster's process takes: where it has neighbours there, the one of its number.

    None: all that it sees, as where the cluster shows each process its own GPU only, or starts one process a host.
    """
    local_id = env.get("SLURM_LOCALID") or env.get("OMPI_COMM_WORLD_LOCAL_RANK")
    neighbours = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if env.get(PROCESS_ID) or local_id is None or neighbours is None:
        return None
    one_process = re.fullmatch(r"1(\(x\d+\))?", neighbours)
    one_device = re.fullmatch(r"[^,]+", env.get("CUDA_VISIBLE_DEVICES", ""))
    return None if one_process or one_device else [int(local_id)]


def _check_port_is_free(processes: Processes) -> None:
    """JAX's coordinator would end the process without a word of Python if it cannot listen."""
    port = int(str(processes.coordinator).rsplit(":", 1)[1])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was closed just now is free
        try:
            probe.bind(("", port))
        except OSError as error:
            raise LaunchError(
                f"process 0 cannot listen at {processes.coordinator}: {error.strerror}; "
                f"set {COORDINATOR} to another port on all processes"
            ) from None
