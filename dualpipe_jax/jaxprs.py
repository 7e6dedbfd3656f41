"""The little that this project needs to know about jaxprs; every use of `jax.extend.core` is here.

`tests/test_jaxprs.py` states what is relied on: the names of the call-like primitives, that an equation can be bound
again from its parameters, and that `make_jaxpr` keeps the order of inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core as jex

Atom = Any  # jex.Var | jex.Literal
Equation = Any  # jex.JaxprEqn

# Calls whose body is evaluated in place, so that each equation can be scheduled by itself. Recomputation
# (`checkpoint`) is among them: its policy has been applied by the time a backward pass has been traced.
_JAXPR_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
_OPEN_CALLS = frozenset({"remat2", "remat", "checkpoint"})

COLLECTIVES = frozenset(
    ("all_to_all", "ragged_all_to_all", "all_gather", "reduce_scatter", "psum", "psum_invariant", "ppermute")
)
MATMULS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})


def is_var(atom: Atom) -> bool:
    return not isinstance(atom, jex.Literal)


def bind(equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """Run one equation on values (or tracers) and return its results as a list."""
    params = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        outputs = equation.primitive.bind(*inputs, **params)
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def evaluate(equations: Iterable[Equation], env: dict[Any, Any], outvars: Sequence[Atom]) -> list[Any]:
    """Run `equations` in order from the values in `env` (extended in place); return the values of `outvars`."""

    def read(atom: Atom) -> Any:
        return env[atom] if is_var(atom) else atom.val

    for equation in equations:
        env.update(zip(equation.outvars, bind(equation, [read(v) for v in equation.invars]), strict=True))
    return [read(v) for v in outvars]


def _evaluate_inline(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Atom) -> Any:
        return env[atom] if is_var(atom) else atom.val

    for equation in jaxpr.eqns:
        inputs = [read(v) for v in equation.invars]
        name = equation.primitive.name
        if name in _JAXPR_CALLS:
            inner = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
            outputs = _evaluate_inline(inner.jaxpr, inner.consts, *inputs)
        elif name in _OPEN_CALLS:
            outputs = _evaluate_inline(equation.params["jaxpr"], (), *inputs)
        else:
            outputs = bind(equation, inputs)
        env.update(zip(equation.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def flat_jaxpr(f: Callable[..., Sequence[Any]], *args: Any) -> jex.ClosedJaxpr:
    """Trace `f(*args)`, a function from arrays to a flat sequence of arrays, with nested calls inlined.

    Args:
        f: takes and returns flat sequences of arrays.
        args: arrays or `jax.ShapeDtypeStruct`s.
    """
    closed = jax.make_jaxpr(f)(*args)
    return jax.make_jaxpr(lambda *a: _evaluate_inline(closed.jaxpr, closed.consts, *a))(*args)


def inline(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same jaxpr with nested calls inlined."""
    return flat_jaxpr(lambda *a: _evaluate_inline(closed.jaxpr, closed.consts, *a), *map(shape_of, closed.jaxpr.invars))


def shape_of(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def pick(items: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    """The items where `mask` holds."""
    return [item for item, chosen in zip(items, mask, strict=True) if chosen]


@dataclass(frozen=True)
class Scan:
    """A `scan` equation taken apart. Its operands are constants, initial carry and xs; its results the carry and ys.

    Attributes:
        body: of one iteration, nested calls inlined.
        length, reverse, unroll: as in `lax.scan`.
        num_consts, num_carry: how many of the operands are what.
    """

    body: jex.ClosedJaxpr
    length: int
    reverse: bool
    unroll: int
    num_consts: int
    num_carry: int

    @classmethod
    def of(cls, equation: Equation) -> Scan:
        p = equation.params
        if "ft_in" in p:  # since jax 0.11: trees of the operands, one for each kind
            num_consts, num_carry, _ = map(len, p["ft_in"].unpack())
        else:
            num_consts, num_carry = p["num_consts"], p["num_carry"]
        return cls(inline(p["jaxpr"]), p["length"], p["reverse"], p["unroll"], num_consts, num_carry)

    def consts_of(self, operands: Sequence[Atom]) -> list[Atom]:
        return list(operands[: self.num_consts])

    def init_of(self, operands: Sequence[Atom]) -> list[Atom]:
        return list(operands[self.num_consts : self.num_consts + self.num_carry])

    def xs_of(self, operands: Sequence[Atom]) -> list[Atom]:
        return list(operands[self.num_consts + self.num_carry :])

    def carry_of(self, results: Sequence[Atom]) -> list[Atom]:
        return list(results[: self.num_carry])

    def ys_of(self, results: Sequence[Atom]) -> list[Atom]:
        return list(results[self.num_carry :])

    consts = property(lambda self: self.consts_of(self.body.jaxpr.invars))
    carry = property(lambda self: self.init_of(self.body.jaxpr.invars))
    xs = property(lambda self: self.xs_of(self.body.jaxpr.invars))
    carry_out = property(lambda self: self.carry_of(self.body.jaxpr.outvars))
    ys = property(lambda self: self.ys_of(self.body.jaxpr.outvars))

    def closure(self, wanted: Sequence[int], without: Sequence[int] = ()) -> list[int]:
        """`wanted` results and the carries that some iteration needs for them, other than those in `without`."""
        found = set(wanted) - set(without)
        while True:
            reads = set(read_by(self.body.jaxpr.eqns, [self.body.jaxpr.outvars[i] for i in found]))
            more = {i for i, v in enumerate(self.carry) if v in reads} - found - set(without)
            if not more:
                return sorted(found)
            found |= more


def read_by(equations: Sequence[Equation], outputs: Sequence[Atom]) -> list[Any]:
    """Variables from outside that computing `outputs` reads."""
    return inputs_of(pick(equations, needed_for(equations, outputs)), outputs)


def has_side_effects(equation: Equation) -> bool:
    """Whether an equation does more than return its results; collectives do not, though JAX notes their axes."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)


def needed_for(
    equations: Sequence[Equation],
    outputs: Iterable[Atom],
    *,
    available: Iterable[Any] = (),
    side_effects: bool = False,
) -> list[bool]:
    """For each equation, whether some of `outputs` depend on it.

    Args:
        available: variables whose values are at hand, so that what computes them is not needed.
        side_effects: keep equations with side effects, too.
    """
    at_hand = set(available)
    needed = {v for v in outputs if is_var(v) and v not in at_hand}
    keep = [False] * len(equations)
    for i in reversed(range(len(equations))):
        effect = side_effects and has_side_effects(equations[i])
        if effect or any(v in needed for v in equations[i].outvars):
            keep[i] = True
            needed.update(v for v in equations[i].invars if is_var(v) and v not in at_hand)
    return keep


def dependents(equations: Sequence[Equation], sources: Iterable[Atom]) -> set[Any]:
    """`sources` and all variables computed from them."""
    reached = set(sources)
    for equation in equations:
        if any(is_var(v) and v in reached for v in equation.invars):
            reached.update(equation.outvars)
    return reached


def substitute(equations: Iterable[Equation], values: dict[Any, Atom]) -> list[Equation]:
    """Equations that read `values[v]` wherever they read `v`."""
    return [e.replace(invars=[values.get(v, v) if is_var(v) else v for v in e.invars]) for e in equations]


def inputs_of(equations: Sequence[Equation], outputs: Iterable[Atom]) -> list[Any]:
    """Variables that `equations` and `outputs` read and `equations` do not define, in order of first use."""
    defined = {v for equation in equations for v in equation.outvars}
    reads = [v for equation in equations for v in equation.invars] + list(outputs)
    return list(dict.fromkeys(v for v in reads if is_var(v) and v not in defined))


def count(jaxpr: Any, names: frozenset[str]) -> int:
    """How many equations named in `names` a jaxpr holds, those in nested jaxprs included (each counted once)."""
    return sum(
        (equation.primitive.name in names) + sum(count(inner, names) for inner in nested(equation))
        for equation in jaxpr.eqns
    )


def nested(equation: Equation) -> list[Any]:
    """The jaxprs that an equation calls."""
    is_jaxpr = lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")  # noqa: E731
    leaves = jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr)
    inner = (getattr(leaf, "jaxpr", leaf) for leaf in leaves)
    return [jaxpr for jaxpr in inner if hasattr(jaxpr, "eqns")]
