"""What all kernels share: the choice of implementation, the number of SMs, layouts of tiles in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

H100_SMS = 132
# The compiler chooses register layouts, so that kernels say what they compute and not which thread holds it.
PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def on_cuda(kernel: Callable[..., Any], otherwise: Callable[..., Any], *args: Any) -> Any:
    """kernel(*args) where the program is lowered for CUDA, otherwise(*args) anywhere else."""
    return jax.lax.platform_dependent(*args, cuda=kernel, default=otherwise)


def divisor(n: int, candidates: tuple[int, ...]) -> int:
    """The first candidate that divides n.

    >>> divisor(768, (512, 256, 128))
    256
    """
    return next(c for c in candidates if n % c == 0)


def multiple(name: str, value: int, of: int) -> None:
    """Raise unless value is a positive multiple."""
    if value <= 0 or value % of:
        raise ValueError(
            f"{name}={value} must be a multiple of {of}; the nearest valid is {max(1, round(value / of)) * of}"
        )


def tiled(columns: int, dtype: Any) -> tuple[Any, ...]:
    """How TMA lays out a block with this many columns so that tensor cores read it without bank conflicts."""
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * size * 8)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


def in_rows_of_a_warp(x: Array, interpret: Any) -> Array:
    """Held as the tensor cores hold a result: a hint to the compiler, which the interpreter does not know."""
    return x if interpret is not None else plgpu.layout_cast(x, plgpu.Layout.WGMMA)
