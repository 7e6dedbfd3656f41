"""Gather rows into their places and quantise them to FP8 on the way: one read, one write of half the bytes.

A block of the kernel is 64 tiles of 1 x 128: some places, and for each the same few neighbouring tiles. Its rows are
copied to shared memory by TMA, one copy a place, and the tiles' scales are reductions along the rows of a 64 x 128
matrix. Latency is hidden by having several blocks on each SM.

References:
    DeepSeek-AI, DeepSeek-V3 Technical Report, section 3.3.2 (1 x 128 tiles); DeepEP (FP8 dispatch).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from moe.kernels.launch import PARAMS, divisor, in_rows_of_a_warp, multiple, on_cuda, tiled
from moe.quantize import (
    ROW_TILES,
    SMALLEST_AMAX,
    TILE,
    Quantized,
    magnitude,
    quantize,
    round_to_e4m3,
    scale_and_inverse,
)

_TILES = 64  # of a block: the rows of the smallest matrix that a warpgroup lays out


def quantize_pack(
    x: Float[Array, "rows D"], source: Int32[Array, " places"], *, power_of_two: bool = False
) -> Quantized:
    """Row source[p] of x at place p, in FP8 with a scale for each 128 columns; zeros where source[p] is no row.

    Args:
        x: bfloat16 or float32.
        source: as in moe.rows.RowMap: a row of x, or the number of rows where the place is empty.
        power_of_two: round scales up to powers of two.

    On CUDA the kernel, if D is a multiple of 128; elsewhere jnp.
    """
    reference = partial(quantize_pack_reference, power_of_two=power_of_two)
    if x.shape[1] % TILE:
        return reference(x, source)
    return on_cuda(partial(quantize_pack_kernel, power_of_two=power_of_two), reference, x, source)


def quantize_pack_reference(x: Array, source: Array, *, power_of_two: bool = False) -> Quantized:
    """The same in jnp."""
    packed = jnp.take(x, source, axis=0, mode="fill", fill_value=0)
    return quantize(packed, ROW_TILES, power_of_two=power_of_two)


def quantize_pack_kernel(x: Array, source: Array, *, power_of_two: bool = False, interpret: Any = None) -> Quantized:
    """The same as a kernel.

    Raises:
        ValueError: if D is no multiple of 128.
    """
    (rows, width), places = x.shape, source.shape[0]
    multiple("width", width, TILE)
    tiles = width // TILE
    together = divisor(tiles, (16, 8, 4, 2, 1))  # neighbouring tiles of a row in one block
    height = _TILES // together  # places of a block
    padded = -(-places // height) * height
    source = jnp.pad(source, (0, padded - places), constant_values=rows)
    kept = (source >= 0) & (source < rows)
    row = jnp.where(kept, source, 0)
    kept_tiles = jnp.repeat(kept.astype(jnp.float32), together).reshape(-1, _TILES)
    blocks, chunks = padded // height, tiles // together

    def smem_tiling(dtype: Any) -> tuple[Any, ...]:
        return tiled(TILE, dtype) if together % 8 == 0 else ()  # a copy must fill whole groups of 8

    def body(*refs: Any) -> None:
        x_g, row_g, kept_g, values_g, scales_g, x_s, kept_s, values_s, scales_s, arrived = refs
        block, chunk = jax.lax.axis_index("block"), jax.lax.axis_index("chunk")
        columns = pl.ds(chunk * together, together)
        for i in range(height):
            piece = x_s.at[pl.ds(i * together, together)]
            plgpu.copy_gmem_to_smem(x_g.at[row_g[block * height + i], columns], piece, arrived)
        plgpu.copy_gmem_to_smem(kept_g.at[block], kept_s, arrived)
        plgpu.barrier_wait(arrived)
        x = in_rows_of_a_warp(x_s[...].astype(jnp.float32), interpret)
        x = jnp.where(_along_rows(kept_s[...]) > 0, x, 0.0)
        amax = jnp.maximum(jnp.max(magnitude(x), axis=1), SMALLEST_AMAX)
        scales, inverse = scale_and_inverse(amax, power_of_two=power_of_two)
        scales_s[...] = scales
        values_s[...] = round_to_e4m3(x * _along_rows(inverse))
        plgpu.commit_smem()
        for i in range(height):
            piece = values_s.at[pl.ds(i * together, together)]
            plgpu.copy_smem_to_gmem(piece, values_g.at[block * height + i, columns])
        plgpu.copy_smem_to_gmem(scales_s, scales_g.at[block, chunk])
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((padded, tiles, TILE), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((blocks, chunks, _TILES), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((_TILES, TILE), x.dtype, transforms=smem_tiling(x.dtype)),
            plgpu.SMEM((_TILES,), jnp.float32),
            plgpu.SMEM((_TILES, TILE), jnp.float8_e4m3fn, transforms=smem_tiling(jnp.float8_e4m3fn)),
            plgpu.SMEM((_TILES,), jnp.float32),
            plgpu.Barrier(num_arrivals=height + 1),
        ),
        grid=(blocks, chunks),
        grid_names=("block", "chunk"),
        compiler_params=PARAMS,
        kernel_name="quantize_pack",
        interpret=interpret,
    )
    values, scales = kernel(x.reshape(rows, tiles, TILE), row, kept_tiles)
    scales = scales.reshape(blocks, chunks, height, together).transpose(0, 2, 1, 3).reshape(padded, tiles)
    return Quantized(values.reshape(padded, width)[:places], scales[:places])


def _along_rows(column: Array) -> Array:
    return jax.lax.broadcast_in_dim(column, (_TILES, TILE), (0,))
