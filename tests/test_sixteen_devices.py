"""Ranks, copies of the pipeline and shards of experts, all more than one: 16 devices, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DEVICES = "--xla_force_host_platform_device_count=16"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "ep", "dp"),
    [("dualpipe", 2, 4, 4, 2), ("dualpipe_v", 4, 8, 2, 2)],
)
def test_equal_to_the_reference(name, pp, microbatches, ep, dp):
    """Loss, every gradient and what experts were given, to the tolerance of `test_equality_grid`."""
    program = (
        "import conftest, jax, test_equality_grid\n"
        "assert jax.device_count() == 16\n"
        f"test_equality_grid.check({name!r}, {pp}, {microbatches}, ep={ep}, dp={dp})\n"
    )
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    env = {**os.environ, "XLA_FLAGS": DEVICES, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
