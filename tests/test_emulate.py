"""Emulated devices: the user's flags win, and it cannot be too late without a word."""

import os
import subprocess
import sys

import pytest

from dualpipe_jax.emulate import emulate_devices, merged_flags

PROGRAM = """
from dualpipe_jax.emulate import emulate_devices
emulate_devices(3)
import jax, os
print(jax.device_count(), os.environ["XLA_FLAGS"])
"""


@pytest.mark.parametrize(
    ("given", "count"),
    [("", "3"), ("--xla_cpu_enable_fast_math=false", "3"), ("--xla_force_host_platform_device_count=2", "2")],
)
def test_devices_appear_and_flags_stay(given, count):
    environment = {**os.environ, "XLA_FLAGS": given, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    found, *flags = result.stdout.split()
    assert found == count
    assert set(given.split()) <= set(flags)
    assert "--xla_cpu_enable_concurrency_optimized_scheduler=false" in flags
    assert len(flags) == len({flag.split("=")[0] for flag in flags}), "no flag twice"


def test_too_late_or_too_few():
    with pytest.raises(RuntimeError, match="before jax is imported"):
        emulate_devices(2)
    with pytest.raises(ValueError, match="count=0"):
        emulate_devices(0)


def test_a_longer_flag_of_the_same_beginning_is_another():
    assert merged_flags("--a_b=1", {"--a": "2"}) == "--a_b=1 --a=2"
