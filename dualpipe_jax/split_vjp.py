"""Split backward: the input gradient now (B_I), the weight gradient whenever there is time (B_W).

For y = f(p, x) and a cotangent dy, reverse-mode differentiation computes dx = dy . df/dx and dp = dy . df/dp. A
pipeline needs dx at once, since the previous stage waits for it, and dp only before the optimizer runs. `split_vjp`
traces the
backward of any pure function once and cuts it in two: what dx depends on is `backward_input`, the rest is
`backward_weight`. What crosses the cut is kept in between.

    forward                       F   p, x        -> y, residuals = (input, weight)
    backward_input                I   residuals, dy -> dx, cut
    backward_weight               W   residuals.weight, cut -> dp

As few bytes are kept as cheap operations allow (see `residuals`); parameters and constant inputs are at hand anyway.
A
value is kept only as long as needed: `residuals.input` is dead after `backward_input`, `residuals.weight` lives until
`backward_weight`, which reads it where it lies.

References:
    Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2 (B and W passes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualpipe_jax import jaxprs, residuals
from dualpipe_jax.cut import Cut, cut_backward
from dualpipe_jax.residuals import Policy
from dualpipe_jax.split_loops import Traced, split_loops

PyTree = Any
Arrays = tuple[jax.Array, ...]


class Residuals(NamedTuple):
    """What the forward leaves for the backward.

    Attributes:
        input: arrays that only `backward_input` reads.
        weight: arrays that `backward_weight` reads (and perhaps `backward_input` too).
    """

    input: Arrays
    weight: Arrays


@dataclass(frozen=True)
class SplitVJP:
    """The three parts of a function's forward and backward; see the module's docstring. Made by `split_vjp`.

    Attributes:
        output: shapes and dtypes of y.
        aux: shapes and dtypes of the auxiliary output, None without.
        residuals, cut: shapes and dtypes of what is kept between the parts.
        used: for each leaf of params, whether its gradient can be other than zero.
        parts: equations of the three parts, and the variables kept. whole: equations of `jax.vjp`'s forward and
            backward. weight_gradients: variables of the used leaves' gradients. For `split_report`.
    """

    output: PyTree
    aux: PyTree
    residuals: Residuals
    cut: Arrays
    used: tuple[bool, ...]
    _forward: Callable[..., Any]
    _input: Callable[..., Any]
    _weight: Callable[..., Any]
    parts: Cut
    whole: tuple[list[Any], list[Any]]
    weight_gradients: tuple[Any, ...]

    def forward(self, params: PyTree, x: PyTree, *consts: PyTree) -> tuple[PyTree, PyTree, Residuals]:
        """Return (y, aux, residuals)."""
        return self._forward(params, x, consts)

    def backward_input(
        self, params: PyTree, residuals: Residuals, dy: PyTree, *consts: PyTree
    ) -> tuple[PyTree, Arrays]:
        """Return (dx, cut). `dy` has y's structure; dx has x's, None in place of integer leaves."""
        return self._input(params, residuals, dy, consts)

    def backward_weight(self, params: PyTree, weight: Arrays, cut: Arrays, *consts: PyTree) -> PyTree:
        """Return dparams, in params' dtypes; None for a leaf whose gradient is identically zero (see `used`).

        Args:
            weight: `residuals.weight` as the forward returned it.
            cut: as `backward_input` returned it.
        """
        return self._weight(params, weight, cut, consts)

    def count(self, names: frozenset[str]) -> tuple[int, int, int]:
        """How many equations with such names are in (F, I, W)."""
        forward, backward_input, backward_weight = (
            jaxprs.count(_Equations(equations), names)
            for equations in (self.parts.forward, self.parts.input, self.parts.weight)
        )
        return forward, backward_input, backward_weight


class _Equations(NamedTuple):
    eqns: list[Any]


def split_vjp(
    f: Callable[..., Any],
    params: PyTree,
    x: PyTree,
    *consts: PyTree,
    has_aux: bool = False,
    policy: Policy = residuals.DEFAULT,
) -> SplitVJP:
    """Trace the forward and backward of `f` once and cut the backward in two.

    Args:
        f: pure function `f(params, x, *consts) -> y`, or `(y, aux)` with `has_aux`. It may hold jit,
            `jax.checkpoint`, `lax.scan` over layers (split inside), `lax.cond` (what both halves need is computed in
            both), collectives over named axes, functions with their own VJP.
        params, x, consts: arrays or `jax.ShapeDtypeStruct`s in pytrees. Integer and None leaves are fine and get no
            gradient. `consts` are inputs without gradient that can be had again at any time (token ids, masks).
        policy: what may be computed again in order to store less, and what shall be stored.

    Returns:
        The three parts; gradients equal `jax.vjp`'s.

    Example:
        >>> import jax.numpy as jnp
        >>> split = split_vjp(lambda w, x: x * w * w, jnp.float32(2), jnp.float32(3))
        >>> y, _, residuals = split.forward(jnp.float32(2), jnp.float32(3))
        >>> dx, cut = split.backward_input(jnp.float32(2), residuals, jnp.float32(1))
        >>> dw = split.backward_weight(jnp.float32(2), residuals.weight, cut)
        >>> float(y), float(dx), float(dw)
        (12.0, 4.0, 12.0)
    """
    return _Tracer(f, params, x, consts, has_aux).split(policy)


def _shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jax.dtypes.result_type(a)), tree)


def _inexact(leaves: Sequence[Any]) -> list[bool]:
    return [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]


def _merge(mask: Sequence[bool], chosen: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Undo `pick`: the next of `chosen` where `mask` holds, the next of `others` elsewhere."""
    yes, no = iter(chosen), iter(others)
    return [next(yes) if m else next(no) for m in mask]


def _spread(mask: Sequence[bool], chosen: Sequence[Any]) -> list[Any]:
    """`chosen` where `mask` holds, None elsewhere."""
    yes = iter(chosen)
    return [next(yes) if m else None for m in mask]


def _not(mask: Sequence[bool]) -> list[bool]:
    return [not m for m in mask]


class _Tracer:
    """Holds the two traced halves while `split` decides what goes where; all in terms of flat lists of leaves."""

    def __init__(self, f: Callable[..., Any], params: PyTree, x: PyTree, consts: PyTree, has_aux: bool) -> None:
        self.trees: list[Any] = [jax.tree.structure(t) for t in (params, x, consts)]
        self.shapes = [jax.tree.leaves(_shapes(t)) for t in (params, x, consts)]
        self.differentiable = [_inexact(leaves) for leaves in self.shapes[:2]]
        self.sizes = [len(leaves) for leaves in self.shapes]
        self.f, self.has_aux = f, has_aux
        self.y_tree: Any = None
        self.aux_tree: Any = None
        self.vjp_tree: Any = None
        self._trace_forward()
        self._trace_backward()

    # ---------------------------------------------------------------- tracing

    def _groups(self, flat: Sequence[Any]) -> list[list[Any]]:
        p, x, _ = self.sizes
        return [list(flat[:p]), list(flat[p : p + x]), list(flat[p + x :])]

    def _vjp(self, *flat: Any) -> list[Any]:
        """The forward: (y leaves, aux leaves, residual leaves), and notes how to put them together again."""
        groups = self._groups(flat)

        def call(p: list[Any], x: list[Any]) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
            masks = self.differentiable
            leaves = [_merge(m, v, jaxprs.pick(g, _not(m))) for m, v, g in zip(masks, (p, x), groups[:2], strict=True)]
            args = [t.unflatten(v) for t, v in zip(self.trees, [*leaves, groups[2]], strict=True)]
            result = self.f(args[0], args[1], *args[2])
            y, aux = result if self.has_aux else (result, None)
            y_leaves, self.y_tree = jax.tree.flatten(y)
            aux_leaves, self.aux_tree = jax.tree.flatten(aux)
            self.y_inexact = _inexact([jnp.asarray(v) for v in y_leaves])
            return jaxprs.pick(y_leaves, self.y_inexact), (jaxprs.pick(y_leaves, _not(self.y_inexact)), aux_leaves)

        inputs = [jaxprs.pick(g, mask) for g, mask in zip(groups[:2], self.differentiable, strict=True)]
        y, vjp, (others, aux) = jax.vjp(call, *inputs, has_aux=True)
        y_all = _merge(self.y_inexact, y, others)
        leaves, self.vjp_tree = jax.tree.flatten(vjp)
        self.num_y, self.num_aux = len(y_all), len(aux)
        return [*y_all, *aux, *leaves]

    def _trace_forward(self) -> None:
        flat = [leaf for leaves in self.shapes for leaf in leaves]
        self.fwd = jaxprs.flat_jaxpr(self._vjp, *flat)
        outvars = self.fwd.jaxpr.outvars
        self.result_vars = outvars[: self.num_y + self.num_aux]
        self.residual_vars = outvars[self.num_y + self.num_aux :]  # variables or literals
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in outvars]
        self.y_shapes = shapes[: self.num_y]
        self.aux_shapes = shapes[self.num_y : self.num_y + self.num_aux]
        self.residual_shapes = shapes[self.num_y + self.num_aux :]

    def _trace_backward(self) -> None:
        num = len(self.residual_shapes)

        def backward(*flat: Any) -> list[Any]:
            dp, dx = self.vjp_tree.unflatten(flat[:num])(list(flat[num:]))
            return [*dx, *dp]

        dy = jaxprs.pick(self.y_shapes, self.y_inexact)
        self.bwd = jaxprs.flat_jaxpr(backward, *self.residual_shapes, *dy)
        jaxpr = self.bwd.jaxpr
        # From here on both traces are one list of equations over one set of variables.
        alias = dict(zip(jaxpr.invars[:num], self.residual_vars, strict=True))
        outvars = [alias.get(v, v) if jaxprs.is_var(v) else v for v in jaxpr.outvars]
        self.backward_equations = jaxprs.substitute(jaxpr.eqns, alias)
        self.equations = [*self.fwd.jaxpr.eqns, *self.backward_equations]
        self.dy_vars = jaxpr.invars[num:]
        num_dx = sum(self.differentiable[1])
        self.dx_vars, self.dp_vars = outvars[:num_dx], outvars[num_dx:]

    # ---------------------------------------------------------------- cutting

    def split(self, policy: residuals.Policy) -> SplitVJP:
        self._cut(policy)
        until_input, until_weight, crossing = (
            tuple(map(jaxprs.shape_of, kept)) for kept in (self.cut.kept_input, self.cut.kept_weight, self.cut.crossing)
        )
        used = [bool(u) for u in _spread(self.differentiable[0], self.dp_nonzero)]
        shapes: Any = Residuals(until_input, until_weight)  # type: ignore[arg-type]
        cut: Any = crossing
        return SplitVJP(
            output=self.y_tree.unflatten(self.y_shapes),
            aux=self.aux_tree.unflatten(self.aux_shapes),
            residuals=shapes,
            cut=cut,
            used=tuple(used),
            _forward=self._forward,
            _input=self._backward_input,
            _weight=self._backward_weight,
            parts=self.cut,
            whole=(self.fwd.jaxpr.eqns, self.backward_equations),
            weight_gradients=tuple(self.dp),
        )

    def _cut(self, policy: residuals.Policy) -> None:
        """Cut the backward; a dp that does not depend on dy is zero."""
        from_dy = jaxprs.dependents(self.backward_equations, self.dy_vars)
        self.dp_nonzero = [jaxprs.is_var(v) and v in from_dy for v in self.dp_vars]
        invars = self.fwd.jaxpr.invars
        consts: dict[Any, Any] = {}
        for closed in (self.fwd, self.bwd):
            consts.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        p, x, _ = self.sizes
        traced = split_loops(
            Traced(
                forward=self.fwd.jaxpr.eqns,
                backward=self.backward_equations,
                results=self.result_vars,
                dx=self.dx_vars,
                dp=jaxprs.pick(self.dp_vars, self.dp_nonzero),
                at_hand=[*invars[:p], *invars[p + x :], *consts],
                consts=consts,
            ),
            policy,
        )
        self.consts, self.results, self.dx, self.dp = traced.consts, traced.results, traced.dx, traced.dp
        self.cut = cut_backward(
            traced.forward,
            traced.backward,
            inputs=invars,
            at_hand=traced.at_hand,
            results=traced.results,
            dx=traced.dx,
            dp=traced.dp,
            policy=policy,
        )

    # ---------------------------------------------------------------- running

    def _env(self, params: PyTree, consts: PyTree) -> dict[Any, Any]:
        p, n, _ = self.sizes
        invars = self.fwd.jaxpr.invars
        env = dict(self.consts)
        env.update(zip(invars[:p], self.trees[0].flatten_up_to(params), strict=True))
        env.update(zip(invars[p + n :], self.trees[2].flatten_up_to(consts), strict=True))
        return env

    def _forward(self, params: PyTree, x: PyTree, consts: PyTree) -> tuple[PyTree, PyTree, Residuals]:
        env = self._env(params, consts)
        p, n, _ = self.sizes
        env.update(zip(self.fwd.jaxpr.invars[p : p + n], self.trees[1].flatten_up_to(x), strict=True))
        outvars = [*self.results, *self.cut.kept_input, *self.cut.kept_weight]
        out = iter(jaxprs.evaluate(self.cut.forward, env, outvars))
        take = lambda count: [next(out) for _ in range(count)]  # noqa: E731
        y, aux = take(self.num_y), take(self.num_aux)
        kept = Residuals(tuple(take(len(self.cut.kept_input))), tuple(take(len(self.cut.kept_weight))))
        return self.y_tree.unflatten(y), self.aux_tree.unflatten(aux), kept

    def _backward_input(self, params: PyTree, kept: Residuals, dy: PyTree, consts: PyTree) -> tuple[PyTree, Arrays]:
        env = self._env(params, consts)
        env.update(zip(self.cut.kept_input, kept.input, strict=True))
        env.update(zip(self.cut.kept_weight, kept.weight, strict=True))
        env.update(zip(self.dy_vars, jaxprs.pick(self.y_tree.flatten_up_to(dy), self.y_inexact), strict=True))
        out = jaxprs.evaluate(self.cut.input, env, [*self.dx, *self.cut.crossing])
        dx = [jnp.asarray(v) for v in out[: len(self.dx)]]
        return self.trees[1].unflatten(_spread(self.differentiable[1], dx)), tuple(out[len(self.dx) :])

    def _backward_weight(self, params: PyTree, weight: Arrays, cut: Arrays, consts: PyTree) -> PyTree:
        env = self._env(params, consts)
        env.update(zip(self.cut.kept_weight, weight, strict=True))
        env.update(zip(self.cut.crossing, cut, strict=True))
        dp = jaxprs.evaluate(self.cut.weight, env, self.dp)
        inexact = _spread(self.dp_nonzero, dp)
        return self.trees[0].unflatten(_spread(self.differentiable[0], inexact))
