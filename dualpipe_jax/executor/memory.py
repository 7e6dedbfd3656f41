"""What a step keeps on a device from tick to tick, in bytes: known from shapes alone, before anything is compiled."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from dualpipe_jax.executor.cells import State

PyTree = Any


class MemoryPlan(NamedTuple):
    """Bytes on one device; slots are as many as the fullest rank needs.

    Attributes:
        inboxes: activations and output gradients that wait for their F, B or I.
        residuals: kept from F to B or I. weight_residuals: from F to B or W. cuts: from I to W.
        gradients: float32 sums over microbatches. messages: what a tick sends. statistics: sums.
        parameters: of both directions' stages, where each has a copy of its own.
    """

    inboxes: int
    residuals: int
    weight_residuals: int
    cuts: int
    gradients: int
    messages: int
    statistics: int
    parameters: int

    @property
    def total(self) -> int:
        return sum(self)

    @classmethod
    def of(cls, state: State, copies: PyTree = ()) -> MemoryPlan:
        """From the shapes of a device's state, and of its copies of parameters."""
        return cls(
            inboxes=tree_bytes((state.activations, state.gradients)),
            residuals=tree_bytes(state.residual),
            weight_residuals=tree_bytes(state.weight_residual),
            cuts=tree_bytes(state.cut),
            gradients=tree_bytes((state.stage_grads, state.shared_grads)),
            messages=tree_bytes((state.sent_activation, state.sent_gradient)),
            statistics=tree_bytes((state.stage_stats, state.last_stats, state.loss, state.order)),
            parameters=tree_bytes(copies),
        )


def tree_bytes(tree: PyTree) -> int:
    """Of all arrays, or shapes with dtypes, of a pytree.

    Example:
        >>> tree_bytes({"a": jax.ShapeDtypeStruct((2, 3), "bfloat16")})
        12
    """
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
