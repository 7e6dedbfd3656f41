"""Loops and conditionals are split inside: the input gradient comes without any weight gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_split_vjp import assert_equal_to_vjp, layer, layer_params, stage

from dualpipe_jax import jaxprs
from dualpipe_jax.split_vjp import split_vjp

DEPTH = 3


@pytest.fixture
def layers():
    """(parameters of each layer, the same stacked, x)."""
    params = [layer_params(k) for k in jax.random.split(jax.random.key(0), DEPTH)]
    return params, jax.tree.map(lambda *a: jnp.stack(a), *params), jax.random.normal(jax.random.key(1), (2, 8, 16))


def scanned(params, x):
    return jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)[0]


def num_bytes(arrays):
    return sum(np.prod(a.shape) * a.dtype.itemsize for a in arrays)


def test_scan_costs_what_an_unrolled_stack_does(layers):
    unrolled_params, params, x = layers
    split = assert_equal_to_vjp(scanned, params, x)
    unrolled = split_vjp(stage, unrolled_params, x)
    assert tuple(DEPTH * n for n in split.count(jaxprs.MATMULS)) == unrolled.count(jaxprs.MATMULS)
    # An unrolled stack has a layer's input again by adding up what layers before it added; a loop keeps each.
    kept, want = (num_bytes((*s.residuals.input, *s.residuals.weight)) for s in (split, unrolled))
    assert kept - want <= 2 * DEPTH * x.nbytes
    assert num_bytes(split.cut) - num_bytes(unrolled.cut) <= 2 * DEPTH * x.nbytes


@pytest.mark.parametrize("where", ["body", "whole"])
def test_recomputation(layers, where):
    _, params, x = layers
    wrapped = jax.checkpoint(layer) if where == "body" else layer

    def f(params, x):
        return jax.lax.scan(lambda x, p: (wrapped(p, x), None), x, params)[0]

    split = assert_equal_to_vjp(jax.checkpoint(f) if where == "whole" else f, params, x)
    assert split.count(jaxprs.MATMULS)[2] == 7
    stored = num_bytes((*split.residuals.input, *split.residuals.weight))
    assert stored == x.nbytes * (DEPTH if where == "body" else 1)


def test_a_parameter_that_all_iterations_share():
    """Its gradient is a sum that the second loop alone carries."""

    def f(p, x):
        def step(x, w):
            y = jnp.tanh(x @ w @ p["shared"])
            return x + y, jnp.sum(y * p["scale"])

        y, sums = jax.lax.scan(step, x, p["stack"])
        return y, sums

    keys = jax.random.split(jax.random.key(2), 3)
    params = {
        "stack": jax.random.normal(keys[0], (4, 6, 6)) / 3,
        "shared": jax.random.normal(keys[1], (6, 6)) / 3,
        "scale": jnp.float32(2),
    }
    split = assert_equal_to_vjp(f, params, jax.random.normal(keys[2], (5, 6)))
    assert split.count(jaxprs.MATMULS) == (2, 2, 2)
    assert {(6, 6), (4, 6, 6)}.isdisjoint({r.shape for r in (*split.residuals.input, *split.residuals.weight)})


def test_loops_in_loops_backwards_and_by_index():
    def f(p, x):
        def inner(x, w):
            return jnp.sin(x @ w), None

        def outer(x, ws):
            return jax.lax.scan(inner, x, ws, reverse=True)

        x = jax.lax.scan(outer, x, p["nested"])[0]
        by_index = lambda i, x: x + jnp.tanh(x @ jax.lax.dynamic_index_in_dim(p["stack"], i, keepdims=False))  # noqa: E731
        return jax.lax.fori_loop(0, 3, by_index, x)

    keys = jax.random.split(jax.random.key(3), 3)
    params = {
        "nested": jax.random.normal(keys[0], (2, 3, 4, 4)) / 2,
        "stack": jax.random.normal(keys[1], (3, 4, 4)) / 2,
    }
    split = assert_equal_to_vjp(jax.jit(f), params, jax.random.normal(keys[2], (5, 4)))
    assert split.count(jaxprs.MATMULS) == (2, 2, 2)


def test_scan_over_activations_and_carried_state():
    """A recurrence over tokens: the input is what the loop runs over, the state starts at a parameter."""

    def f(p, x):
        def step(state, token):
            state = jnp.tanh(state @ p["recur"] + token @ p["in"])
            return state, state * token

        last, out = jax.lax.scan(step, jnp.broadcast_to(p["start"][None], x.shape[1:]), x)
        return out, last

    keys = jax.random.split(jax.random.key(4), 4)
    params = {"recur": jax.random.normal(keys[0], (4, 4)), "in": jax.random.normal(keys[1], (4, 4))}
    params["start"] = jax.random.normal(keys[2], (4,))
    split = assert_equal_to_vjp(f, params, jax.random.normal(keys[3], (6, 2, 4)))
    assert split.count(jaxprs.MATMULS) == (2, 2, 2)


def test_cond_and_switch():
    def f(p, x):
        x = jax.lax.cond(jnp.sum(x) > 0, lambda x: jnp.sin(x @ p["a"]), lambda x: x * 2.0, x)
        branches = [lambda x: x, lambda x: jnp.tanh(x @ p["a"]) @ p["b"]]
        return jax.lax.switch(p["which"], branches, x)

    keys = jax.random.split(jax.random.key(5), 3)
    params = {"a": jax.random.normal(keys[0], (4, 4)), "b": jax.random.normal(keys[1], (4, 4))}
    x = jax.random.normal(keys[2], (3, 4))
    for which, sign in ((0, 1.0), (1, 1.0), (1, -1.0)):
        split = assert_equal_to_vjp(
            lambda p, x: f({**p, "which": jnp.int32(which)}, x),  # noqa: B023
            params,
            sign * jnp.abs(x),
        )
    # I: dx of three matmuls; W: dp of three, and once more the dx between two of them.
    assert split.count(jaxprs.MATMULS)[1:] == (3, 4)


def test_a_loop_that_serves_dx_alone_is_left_as_it_is():
    def f(p, x):
        x = jax.lax.fori_loop(0, 4, lambda i, x: jnp.sin(x), x)
        return x @ p

    split = assert_equal_to_vjp(f, jnp.eye(3), jnp.arange(6.0).reshape(2, 3))
    assert split.count(frozenset({"scan"})) == (1, 1, 0)
