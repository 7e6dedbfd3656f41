"""Send tokens to the ranks that have their experts, and sum up what comes back.

A token goes to a rank once, however many of its experts live there; the rank learns which and with what weights.
`dispatch` and `combine` are each other's transpose. Ranks exchange buffers of fixed size, `capacity` rows for each
pair: with capacity = T nothing can be dropped.

References:
    DeepSeek-AI, DeepEP (the layout: one copy a rank, weights applied at the experts, unweighted combine).
"""

from __future__ import annotations

import math
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
    """Rows that a rank may send to another: all tokens, or `factor` times an even spread, rounded up."""
    if factor is None:
        return num_tokens
    return max(1, min(num_tokens, math.ceil(factor * num_tokens * min(1.0, top_k / num_ranks))))


def layout(topk_idx: Int32[Array, "T k"], num_experts: int, num_ranks: int, capacity: int) -> Handle:
    """Number each rank's tokens in order; those beyond `capacity` are dropped for that rank."""
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
    """Every rank's tokens for this one, rank by rank, each with `capacity` places."""
    sent_weights = pack(topk_weights, handle.rows)
    if axis is None:
        return Received(pack(x, handle.rows), handle.sent_idx, sent_weights)
    # Indices and weights travel in one message: small integers are exact in float32. The tokens are tied to it, since
    # independent collectives may be started in different orders on different devices and wait for ever.
    message = jnp.concatenate([sent_weights, handle.sent_idx.astype(jnp.float32)], axis=-1)
    message = _exchange(message, axis)
    weights, idx = jnp.split(message, 2, axis=-1)
    idx = jax.lax.stop_gradient(idx).astype(jnp.int32)
    tokens, idx = jax.lax.optimization_barrier((pack(x, handle.rows), idx))
    return Received(_exchange(tokens, axis), idx, weights)


def combine(y: Float[Array, "places D"], handle: Handle, axis: str | None) -> Float[Array, "T D"]:
    """Send rows back to where they came from, and sum each token's rows, unweighted, in order of rank."""
    return unpack(y if axis is None else _exchange(y, axis), handle.rows)


def _exchange(rows: Float[Array, "places D"], axis: str) -> Float[Array, "places D"]:
    return jax.lax.all_to_all(rows, axis, split_axis=0, concat_axis=0, tiled=True)
