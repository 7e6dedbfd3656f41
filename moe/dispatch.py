"""Send tokens to the ranks that have their experts, and sum up what comes back.

A token goes to a rank once, however many of its experts live there; the rank learns which and with what weights.
`dispatch` and `combine` are each other's transpose. Ranks exchange buffers of fixed size, `capacity` rows for each
pair: with capacity = T nothing can be dropped.

References:
    DeepSeek-AI, DeepEP (the layout: one copy a rank, weights applied at the experts, unweighted combine).
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from moe.rows import RowMap, pack, row_map, unpack


class Handle(NamedTuple):
    """How one batch of tokens is laid out for the exchange.

    Attributes:
        rows: token t's copy for rank r is at place r * capacity + its number among the tokens for r.
        sent_idx: for each place, the token's expert indices *within the receiving rank*, -1 for experts elsewhere.
        dropped: (token, expert) assignments that found no room.
    """

    rows: RowMap
    sent_idx: Int32[Array, "places k"]
    dropped: Int32[Array, ""]


def capacity_rows(num_tokens: int, top_k: int, num_ranks: int, factor: float | None) -> int:
    """Rows that a rank may send to another: all tokens, or `factor` times an even spread, rounded up.

    >>> capacity_rows(100, top_k=2, num_ranks=8, factor=None), capacity_rows(100, top_k=2, num_ranks=8, factor=1.25)
    (100, 32)
    """
    if factor is None:
        return num_tokens
    return max(1, min(num_tokens, math.ceil(factor * num_tokens * min(1.0, top_k / num_ranks))))


def layout(topk_idx: Int32[Array, "T k"], num_experts: int, num_ranks: int, capacity: int) -> Handle:
    """Number each rank's tokens in order; those beyond `capacity` are dropped for that rank.

    Args:
        topk_idx: experts of each token, all different; -1 for none (a choice that does not count).

    Raises:
        ValueError: if the experts cannot be spread evenly over the ranks.
    """
    if num_experts % num_ranks:
        nearest = min((n for n in range(1, num_experts + 1) if num_experts % n == 0), key=lambda n: abs(n - num_ranks))
        raise ValueError(f"{num_experts=} must be a multiple of {num_ranks=}; the nearest valid num_ranks is {nearest}")
    experts_per_rank = num_experts // num_ranks
    owner = topk_idx // experts_per_rank
    ranks = jnp.arange(num_ranks, dtype=jnp.int32)
    here = owner[:, :, None] == ranks[None, None, :]
    wanted = jnp.any(here, axis=1)
    number = jnp.cumsum(wanted, axis=0, dtype=jnp.int32) - 1
    kept = wanted & (number < capacity)
    places = num_ranks * capacity
    rows = row_map(jnp.where(kept, ranks[None, :] * capacity + number, places), places)
    rank_of_place = jnp.repeat(ranks, capacity)[:, None]
    idx = jnp.take(topk_idx, rows.source, axis=0, mode="fill", fill_value=-1)
    local = jnp.where(idx // experts_per_rank == rank_of_place, idx % experts_per_rank, -1)
    dropped = jnp.sum(here & ~kept[:, None, :], dtype=jnp.int32)
    return Handle(rows, jnp.where(idx >= 0, local, -1), dropped)


class Received(NamedTuple):
    """What a rank got: token rows, each with its experts here (-1: none) and their weights."""

    x: Float[Array, "places D"]
    idx: Int32[Array, "places k"]
    weights: Float[Array, "places k"]


def dispatch(x: Float[Array, "T D"], topk_weights: Float[Array, "T k"], handle: Handle, axis: str | None) -> Received:
    """Every rank's tokens for this one, rank by rank, each with `capacity` places; one `all_to_all`, none without axis.

    Sent as they are, whatever their dtypes. Neither the exchange nor its gradient is ever two collectives at once:
    devices could start independent ones in different orders, and wait for ever.
    """
    tokens, weights = pack(x, handle.rows), pack(topk_weights, handle.rows)
    if axis is None:
        return Received(tokens, handle.sent_idx, weights)
    return _exchange_together(tokens, handle.sent_idx, weights, axis)


def combine(y: Float[Array, "places D"], handle: Handle, axis: str | None) -> Float[Array, "T D"]:
    """Send rows back to where they came from, and sum each token's rows, unweighted, in order of rank."""
    return unpack(y if axis is None else _exchange(y, axis), handle.rows)


def _exchange(rows: Array, axis: str) -> Array:
    return jax.lax.all_to_all(rows, axis, split_axis=0, concat_axis=0, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _exchange_together(x: Array, idx: Array, weights: Array, axis: str) -> Received:
    return Received(*_as_one_message((x, idx, weights), axis))


def _exchange_gradients(axis: str, _: None, g: Received) -> tuple[Array, None, Array]:
    x, weights = _as_one_message((g.x, g.weights), axis)  # the exchange is its own transpose
    return x, None, weights


_exchange_together.defvjp(
    lambda x, idx, weights, axis: (_exchange_together(x, idx, weights, axis), None), _exchange_gradients
)


def _as_one_message(arrays: tuple[Array, ...], axis: str) -> list[Array]:
    """Exchange the rows of several arrays side by side, as bits in words of the first one's size."""
    bits = 8 * arrays[0].dtype.itemsize
    words = [_to_words(a, jnp.dtype(f"uint{bits}")) for a in arrays]
    ends = list(itertools.accumulate(w.shape[1] for w in words))
    received = jnp.split(_exchange(jnp.concatenate(words, axis=1), axis), ends[:-1], axis=1)
    return [_from_words(w, a.dtype) for w, a in zip(received, arrays, strict=True)]


def _to_words(a: Array, word: jnp.dtype) -> Array:
    """[rows, n] of a dtype no smaller than a word -> [rows, n * words a value]."""
    return jax.lax.bitcast_convert_type(a, word).reshape(a.shape[0], -1)


def _from_words(words: Array, dtype: jnp.dtype) -> Array:
    ratio = dtype.itemsize // words.dtype.itemsize
    shaped = words if ratio == 1 else words.reshape(words.shape[0], -1, ratio)
    return jax.lax.bitcast_convert_type(shaped, dtype)
