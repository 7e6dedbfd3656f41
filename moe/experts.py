"""Experts as a grouped matmul over blocks of rows.

Rows are sorted by expert and each expert's group is padded to whole blocks, so that a block meets one weight matrix.
The number of blocks is a value, not a shape: loops run over the blocks in use, whatever the worst case is.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from moe.dispatch import Received
from moe.rows import RowMap, pack, row_map, unpack


def swiglu(
    x: Float[Array, "... D"], gate: Float[Array, "D F"], up: Float[Array, "D F"], down: Float[Array, "F D"]
) -> Float[Array, "... D"]:
    """(silu(x gate) * (x up)) down."""
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


_BLOCKS_AT_ONCE = 3  # that meet a matrix in one product where an expert has as many


class Groups(NamedTuple):
    """Rows in blocks, sorted by expert.

    Attributes:
        rows: from (received row, choice) to place, for what belongs to a row.
        choices: the same with each (row, choice) as a row of its own, for what belongs to a choice.
        blocks: blocks of each expert; its places start where those of the experts before it end.
    """

    rows: RowMap
    choices: RowMap
    blocks: Int32[Array, " E"]


def group_rows(idx: Int32[Array, "rows k"], num_experts: int, block_size: int) -> Groups:
    """Places for all (row, choice) with an expert (idx >= 0), in order of expert, then row."""
    rows, k = idx.shape
    flat = idx.reshape(-1)
    chosen = flat[:, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, :]
    number = jnp.cumsum(chosen, axis=0, dtype=jnp.int32) - 1
    blocks = -(-jnp.sum(chosen, axis=0, dtype=jnp.int32) // block_size)
    start = (jnp.cumsum(blocks, dtype=jnp.int32) - blocks) * block_size
    place = jnp.sum(jnp.where(chosen, start[None, :] + number, 0), axis=1, dtype=jnp.int32)
    # The worst case: a row has all its choices here (each expert once), and every group ends in a padded block.
    most = rows * min(k, num_experts) + num_experts * (block_size - 1)
    num_places = -(-most // block_size) * block_size
    choices = row_map(jnp.where(flat >= 0, place, num_places)[:, None], num_places)
    by_row = RowMap(choices.source // k, choices.place.reshape(rows, k))
    return Groups(by_row, choices, blocks)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
    lhs: Float[Array, "places K"], rhs: Float[Array, "E K N"], blocks: Int32[Array, " E"], block_size: int
) -> Float[Array, "places N"]:
    """Each block of rows times its expert's matrix; rows beyond the last block are zero.

    The backward is two independent grouped products, one for lhs and one for rhs, so that a pipeline can run the
    second at another time. Sums are float32.
    """
    return rows_times(lhs, rhs, blocks, block_size, transpose=False)


def rows_times(lhs: Array, rhs: Array, blocks: Array, block_size: int, *, transpose: bool) -> Array:
    """The product of `grouped_matmul` without its gradient, with each expert's matrix or its transpose."""
    # As many blocks at once as there are, then the rest one by one.
    widths = sorted({min(_BLOCKS_AT_ONCE, lhs.shape[0] // block_size), 1}, reverse=True)

    def product(rows: Array, matrix: Array) -> Array:
        if transpose:
            # The matrix first: XLA:CPU is slower in multiplying few rows by a transposed matrix, and would swap them.
            return jax.lax.optimization_barrier(_dot(matrix, rows, 1, 1)).T
        return _dot(rows, matrix, 1, 0)

    def expert(e: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        out, first = state
        matrix = jax.lax.dynamic_index_in_dim(rhs, e, keepdims=False)
        stop = first + blocks[e]
        for width in widths:
            steps = (stop - first) // width

            def step(i: Array, out: Array, first: Array = first, width: int = width) -> Array:
                place = (first + i * width) * block_size
                rows = jax.lax.dynamic_slice_in_dim(lhs, place, width * block_size)
                return jax.lax.dynamic_update_slice_in_dim(out, product(rows, matrix).astype(out.dtype), place, 0)

            out = jax.lax.fori_loop(0, steps, step, out)
            first = first + steps * width
        return out, stop

    out = jnp.zeros((lhs.shape[0], rhs.shape[1 if transpose else 2]), lhs.dtype)
    return jax.lax.fori_loop(0, rhs.shape[0], expert, (out, jnp.int32(0)))[0]


def weight_gradient(lhs: Array, g: Array, blocks: Array, block_size: int, like: Array) -> Array:
    """For each expert the sum over its rows of lhs^T g, in float32; exactly zero for an expert without rows.

    The first few blocks of all experts are one batched product, which writes each matrix once: with few rows an expert
    that costs more than the arithmetic. What further blocks there are is added in a loop.
    """
    width = _BLOCKS_AT_ONCE * block_size
    stop = jnp.cumsum(blocks, dtype=jnp.int32) * block_size
    start = stop - blocks * block_size

    def window(rows: Array, first: Array, stop: Array) -> Array:
        places = first[..., None] + jax.lax.broadcasted_iota(jnp.int32, (*first.shape, width), first.ndim)
        places = jnp.where(places < stop[..., None], places, rows.shape[0])
        return jnp.take(rows, places, axis=0, mode="fill", fill_value=0)

    def expert(e: Array, total: Array) -> Array:
        def step(i: Array, total: Array) -> Array:
            first = start[e] + i * width
            product = _dot(window(lhs, first, stop[e]), window(g, first, stop[e]), 0, 0)
            return total.at[e].add(product, mode="promise_in_bounds")

        return jax.lax.fori_loop(1, -(-(stop[e] - start[e]) // width), step, total)

    total = jax.vmap(partial(_dot, contract_a=0, contract_b=0))(window(lhs, start, stop), window(g, start, stop))
    return jax.lax.fori_loop(0, like.shape[0], expert, total).astype(like.dtype)


def _dot(a: Array, b: Array, contract_a: int, contract_b: int) -> Array:
    """Product of two matrices over these dims, in float32."""
    dims = (((contract_a,), (contract_b,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _grouped_forward(lhs: Array, rhs: Array, blocks: Array, block_size: int) -> tuple[Array, tuple[Array, ...]]:
    return grouped_matmul(lhs, rhs, blocks, block_size), (lhs, rhs, blocks)


def _grouped_backward(block_size: int, kept: tuple[Array, ...], g: Array) -> tuple[Array, Array, None]:
    lhs, rhs, blocks = kept
    dlhs = rows_times(g, rhs, blocks, block_size, transpose=True)
    return dlhs, weight_gradient(lhs, g, blocks, block_size, rhs), None


grouped_matmul.defvjp(_grouped_forward, _grouped_backward)


def experts(
    received: Received,
    gate_up: Float[Array, "E D 2F"],
    down: Float[Array, "E F D"],
    block_size: int,
) -> Float[Array, "rows D"]:
    """For each received row the weighted sum of its experts here: sum_e w_e (silu(x G_e) * (x U_e)) D_e.

    The weight is applied to the hidden row, in float32, before the last matmul: the same sum, and its gradient needs
    no stored output. Rows without an expert here come out zero.

    Args:
        gate_up: G and U of each expert side by side.
    """
    num_experts = gate_up.shape[0]
    groups = group_rows(received.idx, num_experts, block_size)
    x = pack(received.x, groups.rows)
    weights = pack(received.weights.reshape(-1, 1), groups.choices)
    with jax.named_scope("experts"):
        gate, up = jnp.split(grouped_matmul(x, gate_up, groups.blocks, block_size), 2, axis=-1)
        hidden = ((jax.nn.silu(gate) * up).astype(jnp.float32) * weights).astype(x.dtype)
        y = grouped_matmul(hidden, down, groups.blocks, block_size)
    return unpack(y, groups.rows)
