"""Split the loops and conditionals of a backward, so that no weight gradient is computed with the input gradient.

The backward of `lax.scan` over layers is one loop that computes dx and every dp together. It becomes two: one carries
dx and puts out what the second needs; the second computes dp. What an iteration keeps is decided inside its body by the
rule that holds for straight code (`cut`), the forward loop's body included, so that a scanned stack of layers keeps
what an unrolled one would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from dualpipe_jax import jaxprs, residuals
from dualpipe_jax.cut import cut_backward
from dualpipe_jax.jaxprs import Atom, Equation

Var = Any
Consts = dict[Var, Any]


class Traced(NamedTuple):
    """A forward and a backward, and which variables matter.

    Attributes:
        forward, backward: equations in order, over one set of variables.
        results, dx, dp: what the forward returns; gradients of the input and of parameters.
        at_hand: variables that every part can read without storing them; `consts` among them, with their values.
    """

    forward: list[Equation]
    backward: list[Equation]
    results: list[Atom]
    dx: list[Atom]
    dp: list[Atom]
    at_hand: list[Var]
    consts: Consts


def split_loops(traced: Traced, policy: residuals.Policy = residuals.DEFAULT) -> Traced:
    """Replace each scan and cond of the backward that serves dx and dp by one for each."""
    done: set[Var] = set()
    while (found := _find_mixed(traced, done)) is not None:
        index, for_dx, for_dp = found
        equation = traced.backward[index]
        if equation.primitive.name == "scan":
            traced, new = _ScanPair(traced, index, for_dx, for_dp, policy).replaced()
        else:
            traced, new = _duplicated_cond(traced, index, for_dx, for_dp)
        done.update(v for e in new for v in e.outvars)
    return traced


def _find_mixed(traced: Traced, done: set[Var]) -> tuple[int, list[int], list[int]] | None:
    """The last equation to split: (index, results that dx needs, others that dp needs)."""
    for_dx, for_dp = ({v for v in wanted if jaxprs.is_var(v)} for wanted in (traced.dx, traced.dp))
    for index in reversed(range(len(traced.backward))):
        equation = traced.backward[index]
        mine = [i for i, v in enumerate(equation.outvars) if v in for_dx]
        theirs = [i for i, v in enumerate(equation.outvars) if v in for_dp]
        splittable = equation.primitive.name in ("scan", "cond") and done.isdisjoint(equation.outvars)
        if not splittable:
            if mine or jaxprs.has_side_effects(equation):
                for_dx.update(filter(jaxprs.is_var, equation.invars))
            elif theirs:
                for_dp.update(filter(jaxprs.is_var, equation.invars))
            continue
        if equation.primitive.name == "scan":
            scan = jaxprs.Scan.of(equation)
            mine = scan.closure(mine)
            theirs = scan.closure(theirs, without=mine)
        theirs = [i for i in theirs if i not in mine]
        if mine and theirs:
            return index, mine, theirs
        (for_dx if mine else for_dp).update(filter(jaxprs.is_var, equation.invars if mine or theirs else ()))
    return None


def _rename(traced: Traced, alias: dict[Var, Atom], forward: list[Equation], backward: list[Equation]) -> Traced:
    def rename(atoms: Iterable[Atom]) -> list[Atom]:
        return [alias.get(a, a) if jaxprs.is_var(a) else a for a in atoms]

    return traced._replace(
        forward=jaxprs.substitute(forward, alias),
        backward=jaxprs.substitute(backward, alias),
        results=rename(traced.results),
        dx=rename(traced.dx),
        dp=rename(traced.dp),
    )


def _embed(function: Callable[..., list[Any]], operands: Sequence[Var]) -> tuple[list[Equation], list[Atom], Consts]:
    """Trace a function of these variables' values: its equations over them, its results, and constants it reads."""
    closed = jax.make_jaxpr(function)(*(jaxprs.shape_of(v) for v in operands))
    alias = dict(zip(closed.jaxpr.invars, operands, strict=True))
    outputs = [alias.get(v, v) if jaxprs.is_var(v) else v for v in closed.jaxpr.outvars]
    consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    return jaxprs.substitute(closed.jaxpr.eqns, alias), outputs, consts


def _variables(atoms: Iterable[Atom]) -> list[Var]:
    return list(dict.fromkeys(a for a in atoms if jaxprs.is_var(a)))


def _reader(values: dict[Var, Any]) -> Callable[[Atom], Any]:
    return lambda atom: values[atom] if jaxprs.is_var(atom) else atom.val


def _duplicated_cond(traced: Traced, index: int, for_dx: list[int], for_dp: list[int]) -> tuple[Traced, list[Equation]]:
    """One cond for each set of results. What both need is computed in both: a branch's values have no common shape."""
    equation = traced.backward[index]
    which, *operands = equation.invars
    branches = [jaxprs.inline(b) for b in equation.params["branches"]]
    alias: dict[Var, Atom] = {}
    new: list[Equation] = []
    consts = dict(traced.consts)
    for wanted in (for_dx, for_dp):
        reads = {
            i
            for b in branches
            for i, v in enumerate(b.jaxpr.invars)
            if v in set(jaxprs.read_by(b.jaxpr.eqns, [b.jaxpr.outvars[j] for j in wanted]))
        }
        variables = _variables([which, *(operands[i] for i in sorted(reads))])

        def run(*values: Any, wanted: list[int] = wanted, variables: list[Var] = variables) -> list[Any]:
            read = _reader(dict(zip(variables, values, strict=True)))
            given = [read(a) if not jaxprs.is_var(a) or a in variables else None for a in operands]

            def branch(body: Any) -> Callable[[], list[Any]]:
                outputs = [body.jaxpr.outvars[j] for j in wanted]
                needed = jaxprs.pick(body.jaxpr.eqns, jaxprs.needed_for(body.jaxpr.eqns, outputs))
                env = dict(zip(body.jaxpr.invars, given, strict=True))
                env |= dict(zip(body.jaxpr.constvars, body.consts, strict=True))
                return lambda: jaxprs.evaluate(needed, env, outputs)

            return list(jax.lax.switch(read(which), [branch(b) for b in branches]))

        equations, outputs, more = _embed(run, variables)
        new += equations
        consts |= more
        alias |= {equation.outvars[i]: v for i, v in zip(wanted, outputs, strict=True)}
    backward = [*traced.backward[:index], *new, *traced.backward[index + 1 :]]
    at_hand = [*traced.at_hand, *(c for c in consts if c not in traced.consts)]
    traced = _rename(traced._replace(at_hand=at_hand, consts=consts), alias, traced.forward, backward)
    return traced, new


class _ScanPair:
    """A backward scan, and the forward scan that made what it reads, if there is one."""

    def __init__(
        self, traced: Traced, index: int, for_dx: list[int], for_dp: list[int], policy: residuals.Policy
    ) -> None:
        self.traced, self.policy = traced, policy
        self.for_dx, self.for_dp = for_dx, for_dp
        self.equation = traced.backward[index]
        self.backward = jaxprs.Scan.of(self.equation)
        self.partner = self._find_partner(traced.backward[:index])
        self.forward = None if self.partner is None else jaxprs.Scan.of(self.partner)
        self.consts: Consts = {}
        # Where a body's variable comes from: an outer value as it is, or its element of each iteration.
        self.whole: dict[Var, Atom] = {}
        self.element: dict[Var, Atom] = {}
        self.body = self._combine_bodies()

    def _find_partner(self, before: Sequence[Equation]) -> Equation | None:
        xs = set(_variables(self.backward.xs_of(self.equation.invars)))
        best, most = None, 0
        for equation in [*self.traced.forward, *before]:
            if equation.primitive.name == "scan" and jaxprs.Scan.of(equation).length == self.backward.length:
                size = sum(residuals.num_bytes(v) for v in equation.outvars if v in xs)
                best, most = (equation, size) if size > most else (best, most)
        return best

    def _combine_bodies(self) -> Traced:
        """One iteration as straight code: forward, then backward, in which it reads what that forward made."""
        alias: dict[Var, Atom] = {}
        if self.forward is not None and self.partner is not None:
            self._note_inputs(self.forward, self.partner, alias)
            made = dict(zip(self.forward.ys_of(self.partner.outvars), self.forward.ys, strict=True))
        else:
            made = {}
        self._note_inputs(self.backward, self.equation, alias, made)
        body = self.backward.body
        forward = list(self.forward.body.jaxpr.eqns) if self.forward else []
        rename = lambda atoms: [alias.get(a, a) if jaxprs.is_var(a) else a for a in atoms]  # noqa: E731
        outputs = rename(body.jaxpr.outvars)
        free = residuals.free_values([*self.traced.forward, *self.traced.backward], self.traced.at_hand, self.policy)
        at_hand = [
            *self.consts,
            *self.whole,
            *(v for v, a in self.element.items() if not jaxprs.is_var(a) or a in free),
        ]
        return Traced(
            forward,
            jaxprs.substitute(body.jaxpr.eqns, alias),
            results=[] if self.forward is None else self._used_results(),
            dx=[outputs[i] for i in self.for_dx],
            dp=[outputs[i] for i in self.for_dp],
            # Sums that W carries are its own; I does not read them.
            at_hand=at_hand + [v for i, v in enumerate(self.backward.carry) if i in self.for_dp],
            consts=self.consts,
        )

    def _note_inputs(
        self, scan: jaxprs.Scan, equation: Equation, alias: dict[Var, Atom], made: dict[Var, Var] | None = None
    ) -> None:
        """Tell where the body's inputs come from; those known already under another name become aliases."""
        self.consts |= dict(zip(scan.body.jaxpr.constvars, scan.body.consts, strict=True))
        known = {(kind, a): v for kind in ("whole", "element") for v, a in getattr(self, kind).items()}
        for kind, inner, outer in (
            ("whole", scan.consts, scan.consts_of(equation.invars)),
            ("element", scan.xs, scan.xs_of(equation.invars)),
        ):
            for var, atom in zip(inner, outer, strict=True):
                if kind == "element" and made and jaxprs.is_var(atom) and atom in made:
                    alias[var] = made[atom]
                elif jaxprs.is_var(atom) and (kind, atom) in known:
                    alias[var] = known[kind, atom]
                else:
                    getattr(self, kind)[var] = atom

    def _used_results(self) -> list[Atom]:
        """Of the forward body: its carry, and those outputs that something else than the backward scan reads."""
        assert self.forward is not None
        assert self.partner is not None
        self.used_ys = self._used_outside(self.forward.ys_of(self.partner.outvars))
        return [*self.forward.carry_out, *jaxprs.pick(self.forward.ys, self.used_ys)]

    def _used_outside(self, variables: Sequence[Var]) -> list[bool]:
        t = self.traced
        reads = {v for e in (*t.forward, *t.backward) if e is not self.equation for v in _variables(e.invars)}
        reads |= set(_variables([*t.results, *t.dx, *t.dp]))
        return [v in reads for v in variables]

    # ---------------------------------------------------------------- new loops

    def replaced(self) -> tuple[Traced, list[Equation]]:
        body = split_loops(self.body, self.policy)
        self.consts |= body.consts
        inputs = [] if self.forward is None else self.forward.body.jaxpr.invars
        cut = cut_backward(
            body.forward,
            body.backward,
            inputs=inputs,
            at_hand=body.at_hand,
            results=_variables(body.results),
            dx=body.dx,
            dp=body.dp,
            policy=self.policy,
        )
        alias: dict[Var, Atom] = {}
        forward_loop: list[Equation] = []
        if self.forward is not None and self.partner is not None:
            kept = [v for v in (*cut.kept_input, *cut.kept_weight) if v not in self.element]
            carry_out = body.results[: len(self.forward.carry)]
            ys = body.results[len(carry_out) :]
            init = self.forward.init_of(self.partner.invars)
            forward_loop, out = self._loop(self.forward, cut.forward, self.forward.carry, init, carry_out, [*ys, *kept])
            old = [
                *self.forward.carry_of(self.partner.outvars),
                *jaxprs.pick(self.forward.ys_of(self.partner.outvars), self.used_ys),
            ]
            alias |= dict(zip(old, out, strict=False))
            self.element |= dict(zip(kept, out[len(old) :], strict=True))
        crossing = [v for v in cut.crossing if v not in self.element]
        input_loop, out = self._part(cut.input, self.for_dx, body.dx, crossing, alias)
        self.element |= dict(zip(crossing, out, strict=True))
        weight_loop, _ = self._part(cut.weight, self.for_dp, body.dp, [], alias)
        return self._insert(forward_loop, input_loop, weight_loop, alias), [*forward_loop, *input_loop, *weight_loop]

    def _part(
        self, equations: list[Equation], wanted: list[int], outputs: list[Atom], more: list[Var], alias: dict[Var, Atom]
    ) -> tuple[list[Equation], list[Atom]]:
        """The loop that computes these results of the backward scan; returns what else it puts out."""
        scan, num_carry = self.backward, len(self.backward.carry)
        carried = [i for i in wanted if i < num_carry]
        init = scan.init_of(self.equation.invars)
        loop, out = self._loop(
            scan,
            equations,
            [scan.carry[i] for i in carried],
            [init[i] for i in carried],
            outputs[: len(carried)],
            [*outputs[len(carried) :], *more],
        )
        alias |= {self.equation.outvars[i]: v for i, v in zip(wanted, out, strict=False)}
        return loop, out[len(wanted) :]

    def _loop(
        self,
        scan: jaxprs.Scan,
        equations: list[Equation],
        carry: list[Var],
        init: list[Atom],
        carry_out: Sequence[Atom],
        ys: Sequence[Atom],
    ) -> tuple[list[Equation], list[Atom]]:
        reads = [v for v in jaxprs.inputs_of(equations, [*carry_out, *ys]) if v not in carry and v not in self.consts]
        whole = [v for v in reads if v in self.whole]
        element = [v for v in reads if v not in self.whole]
        variables = _variables([*init, *(self.whole[v] for v in whole), *(self.element[v] for v in element)])

        def run(*values: Any) -> list[Any]:
            read = _reader(dict(zip(variables, values, strict=True)))
            fixed = {**self.consts, **{v: read(self.whole[v]) for v in whole}}

            def body(state: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
                env = {**fixed, **dict(zip(carry, state, strict=True)), **dict(zip(element, x, strict=True))}
                out = jaxprs.evaluate(equations, env, [*carry_out, *ys])
                return out[: len(carry)], out[len(carry) :]

            state, out = jax.lax.scan(
                body,
                [read(a) for a in init],
                [read(self.element[v]) for v in element],
                length=scan.length,
                reverse=scan.reverse,
                unroll=scan.unroll,
            )
            return [*state, *out]

        loop, outputs, consts = _embed(run, variables)
        self.new_consts = {**getattr(self, "new_consts", {}), **consts}
        return loop, outputs

    def _insert(
        self,
        forward_loop: list[Equation],
        input_loop: list[Equation],
        weight_loop: list[Equation],
        alias: dict[Var, Atom],
    ) -> Traced:
        def rewrite(equations: list[Equation]) -> list[Equation]:
            out: list[Equation] = []
            for e in equations:
                out += [*input_loop, *weight_loop] if e is self.equation else forward_loop if e is self.partner else [e]
            return out

        t = self.traced
        t = t._replace(at_hand=[*t.at_hand, *self.new_consts], consts={**t.consts, **self.new_consts})
        return _rename(t, alias, rewrite(t.forward), rewrite(t.backward))
