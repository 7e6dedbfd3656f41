"""Block-scaled FP8 (e4m3): each tile of a matrix has one float32 scale, value = scale * e4m3.

Tiles are 1 x 128 along the contraction of a product for activations and gradients, 128 x 128 for weights.

References:
    DeepSeek-AI, DeepSeek-V3 Technical Report, section 3.3 (fine-grained quantization; power-of-two scales for what is
    cached).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn

TILE = 128
MAX = 448.0  # the largest e4m3 value; anything above becomes NaN in a cast
SMALLEST_AMAX = 1e-4  # a tile is scaled as if it held a value of this size: zero tiles stay finite

ROW_TILES = (1, TILE)
COLUMN_TILES = (TILE, 1)
SQUARE_TILES = (TILE, TILE)


class Quantized(NamedTuple):
    """A matrix (or a stack of them) in FP8 with a scale for each tile.

    The following hold: along each of the last two dims, of length n, there are either n scales or ceil(n / tile);
    tiles start at multiples of the tile, the last one may be shorter; no value is infinite; zero tiles have a finite
    positive scale.
    """

    values: Float8e4m3fn[Array, "... rows columns"]
    scales: Float[Array, "... tile_rows tile_columns"]


def quantize(x: Float[Array, "... rows columns"], tile: tuple[int, int], *, power_of_two: bool = False) -> Quantized:
    """Scale each tile's largest magnitude to 448, and round to e4m3 (to nearest, ties to even).

    scale = max(amax, 1e-4) / 448, rounded up to a power of two on request; value = x / scale. Zeros stay exactly zero.
    A NaN stays where it is and does not touch the scale; an infinity makes its whole tile NaN. Neither is hidden.

    Args:
        tile: rows and columns that share a scale.

    Example:
        >>> q = quantize(jnp.array([[0.5, -2.0, 0.0]]), ROW_TILES, power_of_two=True)
        >>> q.values.astype(jnp.float32).tolist(), q.scales.tolist()
        ([[64.0, -256.0, 0.0]], [[0.0078125]])
    """
    amax = jnp.maximum(_tile_amax(magnitude(x.astype(jnp.float32)), tile), SMALLEST_AMAX)
    scales, inverse = scale_and_inverse(amax, power_of_two=power_of_two)
    return Quantized(round_to_e4m3(x.astype(jnp.float32) * _spread(inverse, x.shape, tile)), scales)


def magnitude(x: Float[Array, ...]) -> Float[Array, ...]:
    """|x|, zero for a NaN: whether a maximum keeps a NaN depends on the compiler."""
    return jnp.where(x == x, jnp.abs(x), 0.0)


def scale_and_inverse(amax: Float[Array, ...], *, power_of_two: bool) -> tuple[Array, Array]:
    """The scale of a tile with this (clamped) amax, and what its values are multiplied by: exact inverses if powers."""
    if not power_of_two:
        return amax * (1 / MAX), MAX / amax
    scale = amax * (1 / MAX)
    bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
    exponent = (bits + 0x7FFFFF) >> 23  # of the power of two that is no smaller
    power = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
    inverse = jax.lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
    finite = scale < jnp.inf
    return jnp.where(finite, power, scale), jnp.where(finite, inverse, jnp.nan)


def round_to_e4m3(x: Float[Array, ...]) -> Float8e4m3fn[Array, ...]:
    """Values that leave the range are its ends: rounding of the scale may put amax just outside."""
    return jnp.where(x == x, jnp.clip(x, -MAX, MAX), x).astype(jnp.float8_e4m3fn)


def dequantize(q: Quantized, tile: tuple[int, int]) -> Float[Array, "... rows columns"]:
    """scale * value, in float32."""
    return q.values.astype(jnp.float32) * _spread(q.scales, q.values.shape, tile)


def _tile_amax(x: Array, tile: tuple[int, int]) -> Array:
    """The largest of each tile; x has no negative values."""
    *lead, rows, columns = x.shape
    padding = [(0, 0)] * len(lead) + [(0, -rows % tile[0]), (0, -columns % tile[1])]
    x = jnp.pad(x, padding)
    x = x.reshape(*lead, x.shape[-2] // tile[0], tile[0], x.shape[-1] // tile[1], tile[1])
    return jnp.max(x, axis=(-3, -1))


def _spread(scales: Array, shape: tuple[int, ...], tile: tuple[int, int]) -> Array:
    """Each tile's scale at each of its values; along a dim with one tile or tiles of one, broadcasting does it."""
    for dim, size in ((-2, tile[0]), (-1, tile[1])):
        if size > 1 and scales.shape[dim] > 1:
            scales = jax.lax.slice_in_dim(jnp.repeat(scales, size, axis=dim), 0, shape[dim], axis=dim % len(shape))
    return jnp.broadcast_to(scales, shape)
