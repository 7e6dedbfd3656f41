"""Several documents in one row: which tokens belong together, and each one's position in its document."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

PyTree = Any


class Packing(NamedTuple):
    """Attributes:
    segment: number of the token's document in its row.
    position: of the token in its document.
    """

    segment: Int[Array, "B S"]
    position: Int[Array, "B S"]


def packing_of(microbatch: PyTree) -> Packing | None:
    """From a microbatch's optional `segments` int32 [rows, seq]; None: each row is one document.

    A document is a run of equal numbers, padding one of its own; a number that comes again starts another document.
    """
    if "segments" not in microbatch:
        return None
    segments = microbatch["segments"]
    index = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32)[None, :], segments.shape)
    first = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    start = jax.lax.cummax(jnp.where(first, index, 0), axis=1)
    return Packing(jnp.cumsum(first, axis=1, dtype=jnp.int32), index - start)


def positions(packing: Packing | None, length: int) -> Int[Array, "#B S"]:
    """Of each token: in its document, or in its row."""
    return jnp.arange(length, dtype=jnp.int32)[None, :] if packing is None else packing.position


def same_document(packing: Packing | None) -> Bool[Array, "B 1 S S"] | None:
    """Which pairs of tokens are in one document; None: all."""
    if packing is None:
        return None
    return packing.segment[:, None, :, None] == packing.segment[:, None, None, :]
