"""Move rows between two layouts, by gathers in both directions.

A packed layout has one row for each (source row, choice) that is kept, and empty places. `pack` fills it, `unpack`
sums each source row's packed rows up again. They are each other's transpose, so neither needs a scatter.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


class RowMap(NamedTuple):
    """Where rows go. Every kept (row, choice) has a place of its own.

    Attributes:
        source: for each packed place the source row, or the number of source rows where the place is empty.
        place: for each (row, choice) its packed place, or the number of places where it is not kept.
    """

    source: Int32[Array, " places"]
    place: Int32[Array, "rows choices"]


def row_map(place: Int32[Array, "rows choices"], num_places: int) -> RowMap:
    """The map with these places; any outside 0..num_places-1 are not kept."""
    rows, choices = place.shape
    place = jnp.where((place >= 0) & (place < num_places), place, num_places)
    row = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32)[:, None], (rows, choices))
    source = jnp.full(num_places + 1, rows, jnp.int32).at[place.reshape(-1)].set(row.reshape(-1))
    return RowMap(source[:num_places], place)


@jax.custom_vjp
def pack(x: Float[Array, "rows D"], rows: RowMap) -> Float[Array, "places D"]:
    """Each place's source row; zeros in empty places."""
    return jnp.take(x, rows.source, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def unpack(y: Float[Array, "places D"], rows: RowMap) -> Float[Array, "rows D"]:
    """Sum of each row's places, choice by choice in order."""
    total = jnp.take(y, rows.place[:, 0], axis=0, mode="fill", fill_value=0)
    for choice in range(1, rows.place.shape[1]):
        total = total + jnp.take(y, rows.place[:, choice], axis=0, mode="fill", fill_value=0)
    return total


pack.defvjp(lambda x, rows: (pack(x, rows), rows), lambda rows, g: (unpack(g, rows), None))
unpack.defvjp(lambda y, rows: (unpack(y, rows), rows), lambda rows, g: (pack(g, rows), None))
