"""How parameters and batches are spread over the mesh: `PartitionSpec`s for each leaf, and what they may be made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from dualpipe_jax.executor.mesh import data_axes

PyTree = Any


@dataclass(frozen=True, eq=False)
class Specs:
    """A prefix pytree of `PartitionSpec`s, spread over the leaves that it governs."""

    specs: PyTree

    def full(self, tree: PyTree) -> PyTree:
        """One for each leaf of a tree."""
        return jax.tree.map(lambda s, t: jax.tree.map(lambda _: s, t), self.specs, tree, is_leaf=_is_spec)

    def prefixed(self, tree: PyTree, axis: str) -> PyTree:
        """The same for leaves that are stacked along a new first dim, which is split over `axis`."""
        return jax.tree.map(lambda s: PartitionSpec(axis, *s), self.full(tree), is_leaf=_is_spec)


def batch_specs(batch: PyTree, mesh: Mesh, given: PyTree = None) -> PyTree:
    """The `PartitionSpec` of each leaf [num_microbatches, rows, ...] or [num_microbatches] of a batch.

    Args:
        given: a prefix pytree of specs. None: rows over the data axes; one value a microbatch, on every shard.
    """
    if given is not None:
        return Specs(given).full(batch)
    rows = PartitionSpec(None, data_axes(mesh))
    return jax.tree.map(lambda leaf: rows if leaf.ndim > 1 else PartitionSpec(), batch)


def check_batch(batch: PyTree, num_microbatches: int) -> None:
    """Raise ValueError where a leaf has not that many microbatches."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if leaf.ndim < 1 or leaf.shape[0] != num_microbatches:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} has shape {leaf.shape}; dim 0 must be the schedule's "
                f"{num_microbatches} microbatches, dim 1 (if any) the rows of each"
            )


def check_no_typed_keys(trees: dict[str, PyTree]) -> None:
    """Raise ValueError at a typed random key: buffers, sums and messages between ranks are made of numbers."""
    for name, tree in trees.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
                raise ValueError(
                    f"{name}{jax.tree_util.keystr(path)} holds typed random keys ({leaf.dtype}); pass "
                    "jax.random.key_data(keys), and jax.random.wrap_key_data inside the functions "
                    "(for dropout: dualpipe_jax.dropout_leaves and dropout_key)"
                )


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)
