"""What a split backward costs: arithmetic, memory and communication of F, I and W."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax

from dualpipe_jax import jaxprs, residuals
from dualpipe_jax.cut import Cut
from dualpipe_jax.residuals import Policy
from dualpipe_jax.split_vjp import split_vjp

PyTree = Any
# Operations whose work is not known from shapes: a loop of unknown length counts once, a foreign kernel not at all.
_UNKNOWN = frozenset({"while", "pallas_call", "ffi_call", "custom_call", "pure_callback", "io_callback"})


class Parts(NamedTuple):
    """A number for each part."""

    forward: int
    backward_input: int
    backward_weight: int


@dataclass(frozen=True)
class SplitReport:
    """Made by `split_report`.

    Attributes:
        flops: of matrix products, convolutions and grouped products; a multiply-add counts 2.
        flops_whole: the same of `jax.vjp`: (its forward, its backward).
        bytes_input: kept from F to I. bytes_weight: from F to W. bytes_cut: from I to W.
        collectives: how many.
        not_split: paths of parameters whose gradient's product runs in I, since dx needs it.
        flops_not_split: of those products.
        uncounted: primitives whose work is not in `flops`; "while" counts one iteration.
    """

    flops: Parts
    flops_whole: tuple[int, int]
    bytes_input: int
    bytes_weight: int
    bytes_cut: int
    collectives: Parts
    not_split: tuple[str, ...]
    flops_not_split: int
    uncounted: frozenset[str]

    @property
    def weight_share(self) -> float:
        """The part of the weight gradients' flops that W holds."""
        return self.flops.backward_weight / max(1, self.flops.backward_weight + self.flops_not_split)

    @property
    def extra_flops(self) -> int:
        """What the three parts compute beyond what `jax.vjp` does, less where they compute less."""
        return sum(self.flops) - sum(self.flops_whole)

    def __str__(self) -> str:
        rows = [
            ("", "F", "I", "W"),
            ("MFLOP", *(f"{n / 1e6:.3f}" for n in self.flops)),
            ("collectives", *map(str, self.collectives)),
            ("kept for I, KiB", f"{self.bytes_input / 1024:.1f}", "", ""),
            ("kept for W, KiB", f"{self.bytes_weight / 1024:.1f}", f"{self.bytes_cut / 1024:.1f}", ""),
        ]
        lines = [f"{name:<16}" + "".join(f"{cell:>12}" for cell in cells) for name, *cells in rows]
        lines.append(f"weight gradients in W: {self.weight_share:.1%}; more than jax.vjp: {self.extra_flops} FLOP")
        if self.not_split:
            lines.append(f"computed in I, since dx needs them: {', '.join(self.not_split)}")
        if self.uncounted:
            lines.append(f"not counted: {', '.join(sorted(self.uncounted))}")
        return "\n".join(lines)


def split_report(
    f: Callable[..., Any],
    params: PyTree,
    x: PyTree,
    *consts: PyTree,
    has_aux: bool = False,
    policy: Policy = residuals.DEFAULT,
) -> SplitReport:
    """Report what `split_vjp` with the same arguments makes. Nothing is compiled or run.

    Example:
        >>> import jax.numpy as jnp
        >>> report = split_report(lambda w, x: jnp.sin(x @ w), jnp.ones((8, 4)), jnp.ones((2, 8)))
        >>> report.flops, report.weight_share, report.not_split
        (Parts(forward=128, backward_input=128, backward_weight=128), 1.0, ())
    """
    split = split_vjp(f, params, x, *consts, has_aux=has_aux, policy=policy)
    cut, parts = split.parts, (split.parts.forward, split.parts.input, split.parts.weight)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    # The gradients of used leaves, in order.
    own = [_product_in_input(cut, v) for v in split.weight_gradients]
    used = [p for p, u in zip(paths, split.used, strict=True) if u]
    size = lambda shapes: sum(prod(s.shape) * s.dtype.itemsize for s in shapes)  # noqa: E731
    return SplitReport(
        flops=Parts(*map(flops, parts)),
        flops_whole=(flops(split.whole[0]), flops(split.whole[1])),
        bytes_input=size(split.residuals.input),
        bytes_weight=size(split.residuals.weight),
        bytes_cut=size(split.cut),
        collectives=Parts(*split.count(jaxprs.COLLECTIVES)),
        not_split=tuple(p for p, e in zip(used, own, strict=True) if e is not None),
        flops_not_split=flops([e for e in own if e is not None]),
        uncounted=frozenset(name for name in _UNKNOWN if any(split.count(frozenset({name})))),
    )


def flops(equations: Sequence[Any]) -> int:
    """Of matrix products, those in nested jaxprs included: a scan's times its length, a cond's dearest branch."""
    return sum(map(_flops, equations))


def _flops(equation: Any) -> int:
    name, p = equation.primitive.name, equation.params
    if name == "dot_general":
        (contract, _), _ = p["dimension_numbers"]
        lhs = equation.invars[0].aval.shape
        return 2 * prod(equation.outvars[0].aval.shape) * prod(lhs[d] for d in contract)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        outputs = kernel[p["dimension_numbers"].rhs_spec[0]]
        return 2 * prod(equation.outvars[0].aval.shape) * prod(kernel) // outputs
    if name in ("ragged_dot", "ragged_dot_general"):
        lhs, rhs = (v.aval.shape for v in equation.invars[:2])
        return 2 * prod(lhs) * rhs[-1]
    if name == "cond":
        return max(flops(b.jaxpr.eqns) for b in p["branches"])
    times = p["length"] if name == "scan" else 1
    return times * sum(flops(inner.eqns) for inner in jaxprs.nested(equation))


def _product_in_input(cut: Cut, gradient: Any) -> Any:
    """The product in I from which elementwise operations alone make this gradient; None if there is none."""
    made_by = {v: e for e in (*cut.input, *cut.weight) for v in e.outvars}
    in_input = {v for e in cut.input for v in e.outvars}
    pending, size = [gradient], residuals.num_elements(gradient)
    while pending:
        var = pending.pop()
        equation = made_by.get(var)
        if equation is None:
            continue
        if equation.primitive.name in jaxprs.MATMULS and var in in_input:
            return equation
        if residuals.DEFAULT.is_cheap(equation):
            pending += [v for v in equation.invars if jaxprs.is_var(v) and residuals.num_elements(v) == size]
    return None
