"""What XLA is told when it compiles a step for GPUs, each with its reason."""

from __future__ import annotations

GPU_OPTIONS: dict[str, tuple[bool | int, str]] = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": (
        4,
        "the all-to-alls of two microbatches and messages to both neighbours may travel at once; with 1, the default, "
        "each waits for the one before although nothing connects them",
    ),
}


def compiler_options(platform: str) -> dict[str, bool | int]:
    """For `jax.jit(..., compiler_options=)`, by the platform of the devices that it compiles for.

    Example:
        >>> sorted(compiler_options("cpu"))
        []
    """
    return {name: value for name, (value, _) in GPU_OPTIONS.items()} if platform in ("gpu", "cuda") else {}
