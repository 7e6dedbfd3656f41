"""A flax nnx module as a static definition and a plain dict of arrays.

The pipeline wants pure functions of arrays, and stages that compare equal when they run the same code. `Definition`
is
both: hashable, and `apply` is a pure function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

PyTree = Any


@dataclass(frozen=True)
class Definition:
    """How to make a module: `make(config, rngs=...)`.

    Attributes:
        make: an `nnx.Module` class.
        config: hashable; all that the module needs to know.
    """

    make: Callable[..., nnx.Module]
    config: Any

    def init(self, key: jax.Array) -> PyTree:
        """Fresh parameters, a nested dict of arrays."""
        return nnx.to_pure_dict(nnx.state(self.make(self.config, rngs=nnx.Rngs(params=key))))

    def apply(self, params: PyTree, *args: Any) -> Any:
        """Call the module with these parameters."""
        abstract = nnx.eval_shape(lambda: self.make(self.config, rngs=nnx.Rngs(params=0)))
        graph, state = nnx.split(abstract)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(*args)
