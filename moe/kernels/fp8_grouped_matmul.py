"""Grouped matmul for Hopper in block-scaled FP8, its sums promoted to float32 every 128 products.

FP8 tensor cores read both operands along the contraction only, so the right operand is given transposed, and both are
for the weight gradient. They also add up in fewer bits than float32 has: a step multiplies one tile of 128, scales the
product, and adds it to a total kept in registers. The two warpgroups take turns on the tensor cores while the other
adds. The layout of rows is that of moe.experts.grouped_matmul.

References:
    DeepSeek-AI, DeepSeek-V3 Technical Report, section 3.3.2 (increasing accumulation precision); DeepGEMM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from moe.kernels.grouped_matmul import expert_of_block, transposed
from moe.kernels.launch import H100_SMS, in_rows_of_a_warp, multiple, tiled
from moe.kernels.persistent import Block, Shape, Tile, persistent_products
from moe.quantize import TILE, Quantized

_SHAPE = Shape(64, TILE, split=0)  # total and product of a warpgroup: 64 registers a thread each
_COPIES = 32  # of a weight block's scale: the 128 bytes that TMA aligns to
_SWIZZLED = tiled(TILE, jnp.float8_e4m3fn)


def fits(*sizes: int) -> bool:
    """Whether the kernels can do a product of these sizes (of rows, matrices and blocks) and its gradients."""
    return all(size > 0 and size % TILE == 0 for size in sizes)


def rows_times_kernel(
    lhs: Quantized,
    rhs: Quantized,
    blocks: Array,
    block_size: int,
    *,
    transpose: bool,
    dtype: Any = jnp.bfloat16,
    num_sms: int = H100_SMS,
    interpret: Any = None,
) -> Array:
    """Each block of rows times its expert's matrix, or with its transpose; rows beyond the last block are zero.

    Args:
        lhs: [places, K] in 1 x 128 tiles.
        rhs: [E, K, N] in 128 x 128 tiles; with transpose the contraction is over N.

    Raises:
        ValueError: if a size is no multiple of 128.
    """
    weights, weight_scales = rhs if transpose else (jnp.swapaxes(a, 1, 2) for a in rhs)
    num_experts, columns, contracted = weights.shape
    places = lhs.values.shape[0]
    for name, size in (("block_size", block_size), ("columns", columns), ("contracted", contracted)):
        multiple(name, size, TILE)
    experts = expert_of_block(blocks * (block_size // TILE), places // TILE)
    weight_scales = jnp.broadcast_to(weight_scales[..., None], (*weight_scales.shape, _COPIES))

    def tile(index: tuple[Array, ...], expert_g: Any) -> Tile:
        m, n = index
        expert = expert_g[m]
        used, e = expert < num_experts, jnp.minimum(expert, num_experts - 1)
        steps = jnp.where(used, contracted // TILE, 0)
        maps = lambda k: (m, k), lambda k: (e, n, k), lambda k: (k, m), lambda k: (e, n, k, 0)
        return Tile(steps, maps, m * TILE, n * TILE)

    def step(a: Any, b: Any, a_scale: Any, b_scale: Any, total: Array) -> Array:
        scale = _SHAPE.part(a_scale, _SHAPE.rows)[...] * b_scale[0]
        plgpu.commit_smem()  # orders what threads have read before TMA overwrites it
        return total + _product(a, b) * _down(scale)

    return persistent_products(
        (experts,),
        (lhs.values, weights, lhs.scales.T, weight_scales),
        (
            Block((TILE, TILE), _SWIZZLED),
            Block((None, TILE, TILE), _SWIZZLED),
            Block((None, TILE)),
            Block((None, None, None, _COPIES)),
        ),
        jax.ShapeDtypeStruct((places, columns), dtype),
        (places // TILE, columns // TILE),
        _SHAPE,
        tile,
        _from_zero(interpret),
        step,
        name="fp8_grouped_matmul_dlhs" if transpose else "fp8_grouped_matmul",
        num_sms=num_sms,
        interpret=interpret,
    )


def weight_gradient_kernel(
    lhs: Quantized,
    g: Quantized,
    blocks: Array,
    block_size: int,
    *,
    dtype: Any = jnp.float32,
    num_sms: int = H100_SMS,
    interpret: Any = None,
) -> Array:
    """lhs^T g for each expert, [E, K, N], both operands in 128 x 1 tiles; zero for an expert without rows.

    Raises:
        ValueError: if a size is no multiple of 128.
    """
    (_, height), (_, width) = lhs.values.shape, g.values.shape
    for name, size in (("block_size", block_size), ("K", height), ("N", width)):
        multiple(name, size, TILE)
    steps = blocks * (block_size // TILE)
    first = jnp.cumsum(steps, dtype=jnp.int32) - steps

    def tile(index: tuple[Array, ...], first_g: Any, steps_g: Any) -> Tile:
        e, m, n = index
        start = first_g[e]
        maps: tuple[Callable[[Array], tuple[Any, ...]], ...] = (
            lambda k: (m, start + k),
            lambda k: (n, start + k),
            lambda k: (start + k, m),
            lambda k: (start + k, n),
        )
        return Tile(steps_g[e], maps, m * TILE, n * TILE, (e,))

    def step(a: Any, b: Any, a_scale: Any, b_scale: Any, total: Array) -> Array:
        down, along = _SHAPE.part(a_scale, _SHAPE.rows)[...], b_scale[...]
        plgpu.commit_smem()
        part = _product(a, b) * _down(down)
        return total + part * jax.lax.broadcast_in_dim(along, (_SHAPE.rows, _SHAPE.columns), (1,))

    return persistent_products(
        (first, steps),
        (lhs.values.T, g.values.T, lhs.scales, g.scales),
        (Block((TILE, TILE), _SWIZZLED), Block((TILE, TILE), _SWIZZLED), Block((None, TILE)), Block((None, TILE))),
        jax.ShapeDtypeStruct((blocks.shape[0], height, width), dtype),
        (blocks.shape[0], height // TILE, width // TILE),
        _SHAPE,
        tile,
        _from_zero(interpret),
        step,
        name="fp8_grouped_matmul_drhs",
        num_sms=num_sms,
        interpret=interpret,
    )


def _product(a: Any, b: Any) -> Array:
    """This warpgroup's rows of a times b^T, one tile's worth of products."""

    def scope(acc: Any) -> Array:
        plgpu.wgmma(acc, _SHAPE.part(a, _SHAPE.rows), transposed(b))
        return acc[...]

    return pl.run_scoped(scope, plgpu.ACC((_SHAPE.rows, _SHAPE.columns), jnp.float32))


def _down(column: Array) -> Array:
    return jax.lax.broadcast_in_dim(column, (_SHAPE.rows, _SHAPE.columns), (0,))


def _from_zero(interpret: Any) -> Callable[[Callable[[Any], Any]], Array]:
    zero = lambda: in_rows_of_a_warp(jnp.zeros((_SHAPE.rows, _SHAPE.columns), jnp.float32), interpret)  # noqa: E731
    return lambda run: run(zero())
