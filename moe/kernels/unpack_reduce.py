"""Weighted sum of each row's places, and its transpose: both read every row they need once and write every row once.

    unpack_reduce    y[t] = sum_k w[t, k] rows[place[t, k]]
    scaled_pack      rows[p] = w[p] x[source[p]]

A block of either kernel is one row, or a piece of it, in registers; it loads straight from device memory, neighbouring
threads next to each other. Sums are float32, choice by choice in order, so that results do not depend on the grid.

References:
    DeepSeek-AI, DeepEP (combine as a sum of the copies of a token).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from moe.kernels.launch import PARAMS, divisor, multiple, on_cuda
from moe.rows import RowMap, pack

LANES = 128  # threads of a block: a piece is a multiple of them
_PIECES = (1024, 512, 256, 128)  # columns; up to 16 bytes of bfloat16 a thread


@jax.custom_vjp
def unpack_reduce(
    places: Float[Array, "places D"], weights: Float[Array, "rows k"], rows: RowMap
) -> Float[Array, "rows D"]:
    """y[t] = sum_k weights[t, k] places[rows.place[t, k]], without the choices that have no place.

    Products and sums are float32, in order of k; the result has the dtype of `places`. The gradient for `places` is
    `scaled_pack`, the one for `weights` a product of rows for each choice.

    On CUDA the kernel, if D is a multiple of 128; elsewhere jnp.
    """
    if places.shape[1] % LANES:
        return unpack_reduce_reference(places, weights, rows.place)
    return on_cuda(unpack_reduce_kernel, unpack_reduce_reference, places, weights, rows.place)


def scaled_pack(
    x: Float[Array, "rows D"], weights: Float[Array, " places"], source: Int32[Array, " places"]
) -> Float[Array, "places D"]:
    """weights[p] x[source[p]] at place p, multiplied in float32, in the dtype of x; zeros where source[p] is no row.

    On CUDA the kernel, if D is a multiple of 128; elsewhere jnp.
    """
    if x.shape[1] % LANES:
        return scaled_pack_reference(x, weights, source)
    return on_cuda(scaled_pack_kernel, scaled_pack_reference, x, weights, source)


def _forward(places: Array, weights: Array, rows: RowMap) -> tuple[Array, tuple[Array, Array, RowMap]]:
    return unpack_reduce(places, weights, rows), (places, weights, rows)


def _backward(kept: tuple[Array, Array, RowMap], dy: Array) -> tuple[Array, Array, None]:
    places, weights, rows = kept
    choices = rows.place.shape[1]
    dweights = [_dot(_take(places, rows.place[:, k]), dy) for k in range(choices)]
    at_places = jnp.zeros(places.shape[0], weights.dtype).at[rows.place].set(weights, mode="drop")
    return scaled_pack(dy, at_places, rows.source), jnp.stack(dweights, axis=1).astype(weights.dtype), None


unpack_reduce.defvjp(_forward, _backward)


def _dot(a: Array, b: Array) -> Array:
    return jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32), axis=1)


def _take(rows: Array, index: Array) -> Array:
    return jnp.take(rows, index, axis=0, mode="fill", fill_value=0)


def unpack_reduce_reference(places: Array, weights: Array, place: Array) -> Array:
    """The same in jnp."""
    total = jnp.zeros((place.shape[0], places.shape[1]), jnp.float32)
    for k in range(place.shape[1]):
        total += weights[:, k, None].astype(jnp.float32) * _take(places, place[:, k]).astype(jnp.float32)
    return total.astype(places.dtype)


def scaled_pack_reference(x: Array, weights: Array, source: Array) -> Array:
    """The same in jnp."""
    packed = pack(x, RowMap(source, source[:, None]))
    return (weights[:, None].astype(jnp.float32) * packed.astype(jnp.float32)).astype(x.dtype)


def unpack_reduce_kernel(places: Array, weights: Array, place: Array, *, interpret: Any = None) -> Array:
    """The same as a kernel.

    Raises:
        ValueError: if D is no multiple of 128.
    """
    return _weighted_sum(places, weights, place, "unpack_reduce", interpret)


def scaled_pack_kernel(x: Array, weights: Array, source: Array, *, interpret: Any = None) -> Array:
    """The same as a kernel.

    Raises:
        ValueError: if D is no multiple of 128.
    """
    return _weighted_sum(x, weights[:, None], source[:, None], "scaled_pack", interpret)


def _weighted_sum(rows: Array, weights: Array, index: Array, name: str, interpret: Any) -> Array:
    """sum_k weights[t, k] rows[index[t, k]]: both functions of this module are this, one with a single choice."""
    (num_rows, width), (outputs, choices) = rows.shape, index.shape
    multiple("width", width, LANES)
    piece = divisor(width, _PIECES)

    def body(rows_g: Any, weights_g: Any, index_g: Any, out_g: Any) -> None:
        t, columns = jax.lax.axis_index("row"), pl.ds(jax.lax.axis_index("piece") * piece, piece)
        total = jnp.zeros(piece, jnp.float32)
        for k in range(choices):
            i = index_g[t, k]
            there = (i >= 0) & (i < num_rows)
            row = rows_g[jnp.where(there, i, 0), columns].astype(jnp.float32)
            total += jnp.where(jnp.broadcast_to(there, row.shape), weights_g[t, k] * row, 0.0)
        out_g[t, columns] = total.astype(out_g.dtype)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((outputs, width), rows.dtype),
        grid=(outputs, width // piece),
        grid_names=("row", "piece"),
        compiler_params=PARAMS,
        kernel_name=name,
        interpret=interpret,
    )
    return kernel(rows, weights.astype(jnp.float32), index)
