"""Functions whose forward, input gradient and weight gradient are written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

PyTree = Any


def hand_written(
    forward: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    backward_input: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]],
    backward_weight: Callable[[PyTree, PyTree, PyTree], PyTree],
) -> Callable[[PyTree, PyTree], PyTree]:
    """A function of (params, x) whose halves of the backward are written by hand, say as kernels.

    Under `split_vjp`, alone or inside a larger function, F, I and W run the three given functions; under `jax.grad`
    they run one after the other.

    Args:
        forward: `(params, x) -> (y, kept)`.
        backward_input: `(params, kept, dy) -> (dx, cut)`, in x's dtypes.
        backward_weight: `(params, kept, cut) -> dparams`, in params' dtypes.

    Example:
        >>> import jax.numpy as jnp
        >>> from dualpipe_jax import split_vjp
        >>> linear = hand_written(
        ...     lambda w, x: (x @ w, x),
        ...     lambda w, x, dy: (dy @ w.T, dy),
        ...     lambda w, x, dy: x.T @ dy,
        ... )
        >>> split = split_vjp(lambda w, x: jnp.sin(linear(w, x)), jnp.eye(2), jnp.ones((3, 2)))
        >>> split.count(frozenset({"dot_general"}))
        (1, 1, 1)
    """

    @jax.custom_vjp
    def run(params: PyTree, x: PyTree) -> PyTree:
        return forward(params, x)[0]

    def forward_rule(params: PyTree, x: PyTree) -> tuple[PyTree, tuple[PyTree, PyTree]]:
        y, kept = forward(params, x)
        return y, (params, kept)

    def backward_rule(saved: tuple[PyTree, PyTree], dy: PyTree) -> tuple[PyTree, PyTree]:
        params, kept = saved
        dx, cut = backward_input(params, kept, dy)
        return backward_weight(params, kept, cut), dx

    run.defvjp(forward_rule, backward_rule)
    return run
