"""Cut a traced backward in two: what the input's gradient needs, and the rest.

Works on two lists of equations over one set of variables, so it serves a whole function as well as the body of a loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from dualpipe_jax import jaxprs, residuals
from dualpipe_jax.jaxprs import Equation

Var = Any


class Cut(NamedTuple):
    """Which part runs what, and what is kept between them.

    Attributes:
        kept_input, kept_weight: values that the forward keeps for I only, and for W (and perhaps I).
        crossing: values that I keeps for W.
        forward, input, weight: the equations of F, I and W, in order. Cheap ones may be in several.
    """

    kept_input: list[Var]
    kept_weight: list[Var]
    crossing: list[Var]
    forward: list[Equation]
    input: list[Equation]
    weight: list[Equation]


def cut_backward(
    forward: Sequence[Equation],
    backward: Sequence[Equation],
    *,
    inputs: Iterable[Var],
    at_hand: Sequence[Var],
    results: Sequence[Var],
    dx: Sequence[Var],
    dp: Sequence[Var],
    policy: residuals.Policy = residuals.DEFAULT,
) -> Cut:
    """Decide what is stored where, and which equations each part runs.

    Of the backward, what `dx` needs belongs to I and what only `dp` needs to W.

    Args:
        forward, backward: equations in order.
        inputs: of the forward.
        at_hand: variables that every part can read without storing them.
        results: what the forward has to return besides.
    """
    equations = [*forward, *backward]
    for_dx = jaxprs.needed_for(backward, dx, side_effects=True)
    for_dp = jaxprs.needed_for(backward, dp)
    in_i = jaxprs.pick(backward, for_dx)
    only_dp = [e for e, i, w in zip(backward, for_dx, for_dp, strict=True) if w and not i]

    # W waits longest, so it keeps the least that serves it alone. Of that, what the forward would keep only for W is
    # had again by I, from what it keeps for I anyway.
    free = residuals.free_values(equations, at_hand, policy)
    stored = residuals.cheapest_to_store([*forward, *in_i], jaxprs.inputs_of(only_dp, dp), free, policy)
    of_forward = {*inputs, *(v for e in forward for v in e.outvars)}
    needed = [*jaxprs.inputs_of(in_i, dx), *stored]
    kept = residuals.cheapest_to_store(forward, [v for v in needed if v in of_forward], free, policy)
    crossing = [v for v in stored if v not in kept]

    def run_again(outputs: Sequence[Var], available: Sequence[Var]) -> list[Equation]:
        return jaxprs.pick(equations, jaxprs.needed_for(equations, outputs, available=available))

    return Cut(
        [v for v in kept if v not in stored],
        [v for v in kept if v in stored],
        crossing,
        forward=jaxprs.pick(forward, jaxprs.needed_for(forward, [*results, *kept], side_effects=True)),
        input=run_again([*dx, *crossing], [*at_hand, *kept]),
        weight=run_again(dp, [*at_hand, *stored]),
    )
