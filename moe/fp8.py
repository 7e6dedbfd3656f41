"""Matrix products in FP8 with their own backward, dense and grouped by expert.

A product contracts along 1 x 128 tiles of one operand, and 128 x 128 blocks or tiles along the same dim of the other:

    y  = x w        x in 1 x 128 tiles,    w in 128 x 128
    dx = dy w^T     dy in 1 x 128 tiles,   the same w: its blocks are square
    dw = x^T dy     both in 128 x 1 tiles, along the tokens

Kept for the backward is x in FP8, re-tiled for dw; its scales are powers of two, so that re-tiling moves exponents
and rounds nothing but what becomes subnormal. Gradients pass through the rounding as if it were not there.

On CUDA the products are kernels where the sizes fit (multiples of 128): FP8 tensor cores, whose sums are added up in
float32 every 128 products. Elsewhere FP8 values are widened to float32 and multiplied there: the same numbers but for
the order of float32 sums.

References:
    DeepSeek-AI, DeepSeek-V3 Technical Report, section 3.3 (fine-grained quantization, increased accumulation
    precision, 128 x 1 tiles in the backward, power-of-two scales for what is cached).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from moe.experts import rows_times, weight_gradient
from moe.kernels import fp8_grouped_matmul as kernels
from moe.kernels.launch import on_cuda
from moe.quantize import COLUMN_TILES, ROW_TILES, SQUARE_TILES, TILE, Quantized, dequantize, quantize


@jax.custom_vjp
def fp8_matmul(x: Float[Array, "... K"], w: Float[Array, "K N"]) -> Float[Array, "... N"]:
    """x w in FP8 with float32 sums; the two halves of the backward are FP8 products too, independent of each other.

    Output and gradients have the dtypes of x and w.

    Example:
        >>> fp8_matmul(jnp.full((1, 2), 3.0), jnp.array([[1.0], [0.5]])).tolist()
        [[4.5]]
    """
    return _forward(x, w)[0]


def _forward(x: Array, w: Array) -> tuple[Array, tuple[Quantized, Array]]:
    kept = quantize(x.reshape(-1, x.shape[-1]), ROW_TILES, power_of_two=True)
    # Weights are kept as they are: a parameter costs no memory in a residual, its FP8 copy would.
    return _times_weights(kept, w, x.dtype, transpose=False).reshape(*x.shape[:-1], -1), (kept, w)


def _backward(kept: tuple[Quantized, Array], dy: Array) -> tuple[Array, Array]:
    x, w = kept
    g = dy.reshape(-1, dy.shape[-1])
    dx = _times_weights(quantize(g, ROW_TILES), w, dy.dtype, transpose=True)
    return dx.reshape(*dy.shape[:-1], -1), _weight_gradient(_columns_of(x, TILE), quantize(g, COLUMN_TILES), w)


fp8_matmul.defvjp(_forward, _backward)


def _times_weights(x: Quantized, w: Array, dtype: jnp.dtype, *, transpose: bool) -> Array:
    def plain(x: Quantized, w: Quantized) -> Array:
        weights = dequantize(w, SQUARE_TILES)
        return (dequantize(x, ROW_TILES) @ (weights.T if transpose else weights)).astype(dtype)

    def kernel(x: Quantized, w: Quantized) -> Array:
        one = Quantized(w.values[None], w.scales[None])
        return kernels.rows_times_kernel(x, one, _all_blocks(x), TILE, transpose=transpose, dtype=dtype)

    args = x, quantize(w, SQUARE_TILES)
    return on_cuda(kernel, plain, *args) if kernels.fits(*x.values.shape, *w.shape, TILE) else plain(*args)


def _weight_gradient(x: Quantized, g: Quantized, w: Array) -> Array:
    def plain(x: Quantized, g: Quantized) -> Array:
        return (dequantize(x, COLUMN_TILES).T @ dequantize(g, COLUMN_TILES)).astype(w.dtype)

    def kernel(x: Quantized, g: Quantized) -> Array:
        return kernels.weight_gradient_kernel(x, g, _all_blocks(x), TILE, dtype=w.dtype)[0]

    return on_cuda(kernel, plain, x, g) if kernels.fits(*x.values.shape, *w.shape, TILE) else plain(x, g)


def _all_blocks(x: Quantized) -> Array:
    """A dense product is a grouped one with a single group."""
    return jnp.full(1, x.values.shape[0] // TILE, jnp.int32)


def _columns_of(x: Quantized, rows: int) -> Quantized:
    """Re-tiled from 1 x 128 to `rows` x 1, scales powers of two before and after."""
    return quantize(dequantize(x, ROW_TILES), (rows, 1), power_of_two=True)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def fp8_grouped_matmul(
    lhs: Float[Array, "places K"], rhs: Float[Array, "E K N"], blocks: Int32[Array, " E"], block_size: int
) -> Float[Array, "places N"]:
    """moe.experts.grouped_matmul in FP8: each block of rows times its expert's matrix; rows beyond are zero.

    In dw the tiles of 128 tokens stay within a block, and are as long as a block where that is shorter. Empty places
    are exactly zero, and an expert without rows has a gradient of exactly zero.

    Raises:
        ValueError: if a block is longer than a tile and no multiple of it.
    """
    return _grouped_forward(lhs, rhs, blocks, block_size)[0]


def _grouped_forward(
    lhs: Array, rhs: Array, blocks: Array, block_size: int
) -> tuple[Array, tuple[Quantized, Array, Array]]:
    if block_size > TILE and block_size % TILE:
        nearest = max(1, round(block_size / TILE)) * TILE
        raise ValueError(f"{block_size=} must be at most {TILE} or a multiple of it; the nearest valid is {nearest}")
    kept = quantize(lhs, ROW_TILES, power_of_two=True)
    y = _rows_times(kept, rhs, blocks, block_size, lhs.dtype, transpose=False)
    return y, (kept, rhs, blocks)


def _grouped_backward(block_size: int, kept: tuple[Quantized, Array, Array], dy: Array) -> tuple[Array, Array, None]:
    lhs, rhs, blocks = kept
    dlhs = _rows_times(quantize(dy, ROW_TILES), rhs, blocks, block_size, dy.dtype, transpose=True)
    rows = min(TILE, block_size)
    columns = _columns_of(lhs, rows), quantize(dy, (rows, 1))
    return dlhs, _grouped_weight_gradient(*columns, blocks, block_size, rhs), None


fp8_grouped_matmul.defvjp(_grouped_forward, _grouped_backward)


def _rows_times(
    lhs: Quantized, rhs: Array, blocks: Array, block_size: int, dtype: jnp.dtype, *, transpose: bool
) -> Array:
    def plain(lhs: Quantized, rhs: Quantized, blocks: Array) -> Array:
        wide = dequantize(lhs, ROW_TILES), dequantize(rhs, SQUARE_TILES)
        return rows_times(*wide, blocks, block_size, transpose=transpose).astype(dtype)

    kernel = partial(kernels.rows_times_kernel, block_size=block_size, transpose=transpose, dtype=dtype)
    args = lhs, quantize(rhs, SQUARE_TILES), blocks
    fits = kernels.fits(*lhs.values.shape, *rhs.shape[1:], block_size)
    return on_cuda(kernel, plain, *args) if fits else plain(*args)


def _grouped_weight_gradient(lhs: Quantized, g: Quantized, blocks: Array, block_size: int, like: Array) -> Array:
    def plain(lhs: Quantized, g: Quantized, blocks: Array) -> Array:
        tile = min(TILE, block_size), 1
        return weight_gradient(dequantize(lhs, tile), dequantize(g, tile), blocks, block_size, like)

    kernel = partial(kernels.weight_gradient_kernel, block_size=block_size, dtype=like.dtype)
    fits = kernels.fits(*lhs.values.shape, *like.shape[1:], block_size)
    return on_cuda(kernel, plain, lhs, g, blocks) if fits else plain(lhs, g, blocks)
