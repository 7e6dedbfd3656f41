"""Fixed buffers with numbered slots. A slot is one element along the first dim of every leaf."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


def allocate(num_slots: int, shapes: PyTree) -> PyTree:
    """Zeroed buffers [num_slots, ...] for values of the given shapes and dtypes."""
    return jax.tree.map(lambda s: jnp.zeros((num_slots, *s.shape), s.dtype), shapes)


def read(buffer: PyTree, slot: jax.Array) -> PyTree:
    """The value in a slot."""
    index = partial(jax.lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False)
    return jax.tree.map(lambda b: index(b, slot, 0), buffer)


def write(buffer: PyTree, slot: jax.Array, value: PyTree) -> PyTree:
    """The buffer with `value` in a slot; XLA updates it in place where the old buffer is not read again."""
    update = partial(jax.lax.dynamic_update_index_in_dim, allow_negative_indices=False)
    return jax.tree.map(lambda b, v: update(b, v, slot, 0), buffer, value)


def accumulate(totals: PyTree, values: PyTree) -> PyTree:
    """Add `values` to `totals` in the totals' dtypes; None in `values` (a gradient that is zero) adds nothing."""
    return jax.tree.map(lambda t, v: t if v is None else t + v.astype(t.dtype), totals, values)
