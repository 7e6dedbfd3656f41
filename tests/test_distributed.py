"""How processes learn who they are, and how they end."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest

from dualpipe_jax.distributed import LaunchError, Processes, _local_devices, processes_from_environment

EXPLICIT = {"JAX_COORDINATOR_ADDRESS": "host:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_NODELIST": "gpu[012-015,20],cpu1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
}
SLURM_ADDRESS = f"gpu012:{61440 + 70001 % 4096}"
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
OPEN_MPI_4 = {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
OPEN_MPI_5 = {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-node-7-31337@1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Processes()),
        (EXPLICIT, Processes(3, 4, "host:1234")),
        ({"JAX_NUM_PROCESSES": "1"}, Processes()),
        (SLURM, Processes(5, 8, SLURM_ADDRESS)),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Processes()),
        # a shell of sbatch or salloc, without srun: the job's tasks are not running
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, Processes()),
        (OPEN_MPI_4, Processes(2, 4, f"10.96.0.1:{61440 + 1531576320 % 4096}")),
        (OPEN_MPI_5, Processes(2, 4, f"node-7:{61440 + 31337 % 4096}")),
        ({**OPEN_MPI_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, Processes(2, 4, f"localhost:{61440 + 31337 % 4096}")),
        ({**OPEN_MPI, "JAX_COORDINATOR_ADDRESS": "head:99"}, Processes(2, 4, "head:99")),
        ({**SLURM, **EXPLICIT}, Processes(3, 4, "host:1234")),
        ({**EXPLICIT, "JAX_COORDINATOR_ADDRESS": "[::1]:80"}, Processes(3, 4, "[::1]:80")),
    ],
)
def test_settings(environment, expected):
    assert processes_from_environment(environment) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_NUM_PROCESSES is set but JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID are not"),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1"},
            "JAX_COORDINATOR_ADDRESS is set but JAX_NUM_PROCESSES, JAX_PROCESS_ID are not",
        ),
        ({k: v for k, v in EXPLICIT.items() if k != "JAX_PROCESS_ID"}, "are set but JAX_PROCESS_ID is not"),
        ({**EXPLICIT, "JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID=4 must be below .*=4; the nearest valid value is 3"),
        ({**EXPLICIT, "JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID='-1' must be a whole number of at least 0"),
        ({**EXPLICIT, "JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES='two'"),
        ({**EXPLICIT, "JAX_NUM_PROCESSES": "0"}, "JAX_NUM_PROCESSES='0' .* nearest valid value is 1"),
        ({**EXPLICIT, "JAX_COORDINATOR_ADDRESS": "host"}, "must be host:port, e.g. host:12345"),
        (OPEN_MPI, "JAX_COORDINATOR_ADDRESS is not"),
    ],
)
def test_errors_say_what_to_set(environment, message):
    with pytest.raises(LaunchError, match=message):
        processes_from_environment(environment)


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({}, None),
        (SLURM, [1]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x8)", "SLURM_LOCALID": "0"}, None),
        ({**SLURM, "CUDA_VISIBLE_DEVICES": "3"}, None),
        ({**SLURM, "CUDA_VISIBLE_DEVICES": "2,3"}, [1]),
        (OPEN_MPI_4, [0]),
        ({**SLURM, **EXPLICIT}, None),
    ],
)
def test_gpus_of_a_process(environment, devices):
    assert _local_devices(environment) == devices


def run(body, timeout=60, **environment):
    program = "import sys, time\nfrom dualpipe_jax.distributed import *\n" + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "XLA_FLAGS": "", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_a_taken_port_is_named():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        address = f"localhost:{listener.getsockname()[1]}"
        result = run(
            "initialize_from_environment()",
            JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID="0",
        )  # fmt: skip
    assert result.returncode == 1
    assert f"cannot listen at {address}" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("process_id", ["0", "1"])
def test_missing_processes_end_the_wait(process_id):
    with socket.socket() as probe:
        probe.bind(("", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    result = run(
        "initialize_from_environment(timeout_s=2)",
        JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=process_id,
    )  # fmt: skip
    assert result.returncode == 1
    assert (
        f"process {process_id} could not join the 2 processes at {address} within 2 s" in result.stderr.splitlines()[-1]
    )


def test_failure_ends_a_process_at_once_with_its_traceback_last():
    result = run(
        """
        import atexit
        atexit.register(lambda: (print("late words"), time.sleep(100)))  # as jax's shutdown barrier would wait
        with exit_on_failure(Processes(1, 2, "a:1")):
            print("so far so good")
            raise KeyError("lost")
        """
    )
    assert result.returncode == 1
    assert result.stdout == "so far so good\n"
    assert "process 1 of 2 failed" in result.stderr
    assert result.stderr.splitlines()[-1] == "KeyError: 'lost'"


def test_exit_statuses_pass():
    body = "with exit_on_failure(Processes(0, 2, 'a:1')):\n    raise SystemExit({})"
    assert run(body.format(5)).returncode == 5
    assert run(body.format(0)).returncode == 0
    assert run("with exit_on_failure(Processes()):\n    raise KeyError('alone')").returncode == 1
