"""Emulated CPU devices. Imports no jax: the flags must be set before XLA reads them."""

from __future__ import annotations

import os
import sys

DEVICE_COUNT = "--xla_force_host_platform_device_count"
# Emulated devices may start independent collectives in different orders and wait for each other for ever.
ORDERED_COLLECTIVES = "--xla_cpu_enable_concurrency_optimized_scheduler"


def emulate_devices(count: int) -> None:
    """Make the host's CPU appear as `count` devices. Flags that the user has in XLA_FLAGS already win.

    Other platforms are unaffected: where JAX finds a GPU, `jax.devices()` still lists GPUs.

    Args:
        count: devices of this process, at least 1.

    Raises:
        ValueError: `count` is below 1.
        RuntimeError: jax was imported before, so that it may be too late.

    Example (of `merged_flags`, which does the work):
        >>> merged_flags("--xla_cpu_max_isa=AVX2", {"--xla_cpu_max_isa": "SSE4_2", DEVICE_COUNT: "4"})
        '--xla_cpu_max_isa=AVX2 --xla_force_host_platform_device_count=4'
    """
    if count < 1:
        raise ValueError(f"{count=} devices cannot be emulated; the nearest valid count is 1")
    if "jax" in sys.modules:
        raise RuntimeError("emulate_devices must be called before jax is imported")
    wanted = {DEVICE_COUNT: str(count), ORDERED_COLLECTIVES: "false"}
    os.environ["XLA_FLAGS"] = merged_flags(os.environ.get("XLA_FLAGS", ""), wanted)


def merged_flags(given: str, wanted: dict[str, str]) -> str:
    """`given` and those of `wanted` whose name it does not have."""
    names = {flag.split("=", 1)[0] for flag in given.split()}
    return " ".join([*given.split(), *(f"{name}={value}" for name, value in wanted.items() if name not in names)])
