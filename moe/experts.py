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
    return _rows_times(lhs, rhs, blocks, block_size, transpose=False)


def _rows_times(lhs: Array, rhs: Array, blocks: Array, block_size: int, *, transpose: bool) -> Array:
    contract = 1 if transpose else 0

    def block(b: Array, matrix: Array, out: Array) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(lhs, b * block_size, block_size)
        dims = (((1,), (contract,)), ((), ()))
        product = jax.lax.dot_general(rows, matrix, dims, preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(out, product.astype(out.dtype), b * block_size, 0)

    def expert(e: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        out, first = state
        matrix = jax.lax.dynamic_index_in_dim(rhs, e, keepdims=False)
        stop = first + blocks[e]
        return jax.lax.fori_loop(first, stop, lambda b, out: block(b, matrix, out), out), stop

    out = jnp.zeros((lhs.shape[0], rhs.shape[1 if transpose else 2]), lhs.dtype)
    return jax.lax.fori_loop(0, rhs.shape[0], expert, (out, jnp.int32(0)))[0]


def _weight_gradient(lhs: Array, g: Array, blocks: Array, block_size: int, like: Array) -> Array:
    """For each expert the sum over its rows of lhs^T g, in float32; exactly zero for an expert without rows."""

    def expert(e: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        out, first = state

        def block(b: Array, total: Array) -> Array:
            rows = jax.lax.dynamic_slice_in_dim(lhs, b * block_size, block_size)
            grads = jax.lax.dynamic_slice_in_dim(g, b * block_size, block_size)
            return total + jax.lax.dot_general(
                rows, grads, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )

        stop = first + blocks[e]
        total = jax.lax.fori_loop(first, stop, block, jnp.zeros(like.shape[1:], jnp.float32))
        return jax.lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), e, 0), stop

    return jax.lax.fori_loop(0, like.shape[0], expert, (jnp.zeros(like.shape, like.dtype), jnp.int32(0)))[0]


def _grouped_forward(lhs: Array, rhs: Array, blocks: Array, block_size: int) -> tuple[Array, tuple[Array, ...]]:
    return grouped_matmul(lhs, rhs, blocks, block_size), (lhs, rhs, blocks)


def _grouped_backward(block_size: int, kept: tuple[Array, ...], g: Array) -> tuple[Array, Array, None]:
    lhs, rhs, blocks = kept
    dlhs = _rows_times(g, rhs, blocks, block_size, transpose=True)
    return dlhs, _weight_gradient(lhs, g, blocks, block_size, rhs), None


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
