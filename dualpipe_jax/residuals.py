"""What to keep between two parts of a computation: the fewest bytes from which the rest is had again for little.

A value that a later part needs is either stored, or computed again by *cheap* operations (elementwise, casts, reshapes)
from stored ones. The least number of stored bytes is a minimum vertex cut between what cheap operations cannot
compute (matmul results, reductions, the inputs) and what is needed. Of several minimal cuts the latest is taken:
least work is repeated.

References:
    Ford and Fulkerson, Maximal flow through a network, 1956. The use of a cut for recomputation is known from
    compilers of fused backward passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from dualpipe_jax.jaxprs import Equation, is_var

# Cheap to run again: a few operations an element, or none at all.
# fmt: off
CHEAP = frozenset((
    "abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp", "concatenate", "convert_element_type",
    "copy", "copy_p", "cos", "div", "eq", "erf", "exp", "exp2", "expand_dims", "expm1", "floor", "ge", "gt",
    "integer_pow", "iota", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne",
    "neg", "not", "optimization_barrier", "or", "pad", "pow", "real", "rem", "reshape", "rev", "round", "rsqrt",
    "select_n", "sign", "sin", "slice", "split", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tan",
    "tanh", "transpose", "xor",
))
# fmt: on
_UNLIMITED = 2**30  # more than any sum of capacities, which are scaled to stay below


@dataclass(frozen=True)
class Policy:
    """What may be computed again, and what shall be stored.

    Attributes:
        cheap: names of primitives that may run again.
        store: names given with `jax.ad_checkpoint.checkpoint_name` whose values are stored where they are needed,
            however cheap they are. Other names have no effect.
    """

    cheap: frozenset[str] = CHEAP
    store: frozenset[str] = frozenset()

    def is_cheap(self, equation: Equation) -> bool:
        return equation.primitive.name in self.cheap or (
            equation.primitive.name == "name" and not self.stores(equation)
        )

    def stores(self, equation: Equation) -> bool:
        return equation.primitive.name == "name" and equation.params["name"] in self.store


DEFAULT = Policy()


def num_elements(var: Any) -> int:
    return prod(var.aval.shape)


def num_bytes(var: Any) -> int:
    """Bytes of a variable's value (a random key counts as its 8 bytes of data)."""
    return num_elements(var) * (8 if jnp.issubdtype(var.aval.dtype, jax.dtypes.extended) else var.aval.dtype.itemsize)


def free_values(equations: Iterable[Equation], available: Iterable[Any], policy: Policy = DEFAULT) -> set[Any]:
    """`available` variables, and those that cheap operations compute from them alone."""
    free = set(available)
    for equation in equations:
        if policy.is_cheap(equation) and all(v in free for v in equation.invars if is_var(v)):
            free.update(equation.outvars)
    return free


def cheapest_to_store(
    equations: Sequence[Equation], needed: Iterable[Any], free: set[Any], policy: Policy = DEFAULT
) -> list[Any]:
    """The variables to store so that `needed` can be had again from them and `free` values by cheap operations.

    Args:
        equations: define the variables, in order; whatever they read without defining it counts as an input.
        needed: variables that a later part reads.
        free: variables that cost nothing to keep.
    """
    graph = _Graph(equations, [v for v in needed if v not in free], free, policy)
    return graph.latest_minimal_cut() if graph.order else []


class _Graph:
    """Each variable is an edge from its entry (node 2i + 2) to its exit (2i + 3); node 0 is the source, 1 the
    sink."""

    def __init__(self, equations: Sequence[Equation], needed: Sequence[Any], free: set[Any], policy: Policy) -> None:
        producer = {v: equation for equation in equations for v in equation.outvars}
        self.needed, self.free = needed, free
        self.order: dict[Any, int] = {}
        self.cost: dict[Any, int] = {}
        self.sources: list[Any] = []
        self.uses: list[tuple[Any, Any]] = []
        pending = list(needed)
        while pending:
            var = pending.pop()
            if var in self.order:
                continue
            self.order[var] = len(self.order)
            equation = producer.get(var)
            wanted = equation is not None and policy.stores(equation)
            self.cost[var] = 0 if wanted else num_bytes(var)
            if equation is None or not policy.is_cheap(equation):
                self.sources.append(var)
                continue
            inputs = [v for v in equation.invars if is_var(v) and v not in free]
            self.uses += [(v, var) for v in inputs]
            pending += inputs

    def latest_minimal_cut(self) -> list[Any]:
        flow_graph = self._capacities()
        flow = maximum_flow(flow_graph, 0, 1).flow
        left = csr_array(flow_graph - flow)
        left.eliminate_zeros()
        # What can still send something to the sink lies behind the cut that is nearest to it.
        behind = set(breadth_first_order(csr_array(left.T), 1, return_predecessors=False).tolist())
        return [v for v, i in self.order.items() if 2 * i + 3 in behind and 2 * i + 2 not in behind]

    def _capacities(self) -> csr_array:
        order = self.order
        total = sum(self.cost.values())
        unit = max(1, -(-total // (_UNLIMITED // 2)))
        edges = [(2 * i + 2, 2 * i + 3, max(1, self.cost[v] // unit)) for v, i in order.items()]
        edges += [(0, 2 * order[v] + 2, _UNLIMITED) for v in self.sources]
        edges += [(2 * order[v] + 3, 1, _UNLIMITED) for v in self.needed]
        edges += [(2 * order[a] + 3, 2 * order[b] + 2, _UNLIMITED) for a, b in set(self.uses)]
        start, stop, capacity = np.array(sorted(set(edges)), dtype=np.int32).T
        size = 2 * len(order) + 2
        return csr_array((capacity, (start, stop)), shape=(size, size))
