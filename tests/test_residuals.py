"""The fewest bytes to keep."""

import jax
import jax.numpy as jnp

from dualpipe_jax import jaxprs
from dualpipe_jax.residuals import cheapest_to_store, free_values, num_bytes


def trace(f, *args):
    flat = jaxprs.flat_jaxpr(f, *args)
    return flat.jaxpr.eqns, flat.jaxpr.invars, flat.jaxpr.outvars


def names(stored, equations):
    made_by = {v: e.primitive.name for e in equations for v in e.outvars}
    return sorted(made_by.get(v, "input") for v in stored)


def test_one_matmul_result_rather_than_two_of_its_functions():
    equations, _, out = trace(lambda x, w: [jnp.sin(x @ w), jnp.cos(x @ w * 2.0)], jnp.ones((4, 4)), jnp.ones((4, 4)))
    # XLA would share the matmul; here there are two of them, each the cheapest source of its function.
    assert names(cheapest_to_store(equations, out, set()), equations) in (
        ["cos", "sin"],
        ["dot_general", "dot_general"],
    )

    def shared(x, w):
        y = x @ w
        return [jnp.sin(y), jnp.cos(y)]

    equations, _, out = trace(shared, jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert names(cheapest_to_store(equations, out, set()), equations) == ["dot_general"]


def test_the_narrow_place():
    """A value cast to half the bytes is stored rather than what it was cast from; a broadcast, before it grows."""
    equations, _, out = trace(lambda x: [jnp.exp((x @ x).astype(jnp.bfloat16))], jnp.ones((4, 4)))
    stored = cheapest_to_store(equations, out, set())
    assert [num_bytes(v) for v in stored] == [32]
    equations, _, out = trace(lambda x: [jnp.broadcast_to(jnp.sum(x), (64,)) * 2.0], jnp.ones((4, 4)))
    assert names(cheapest_to_store(equations, out, set()), equations) == ["reduce_sum"]
    assert sum(map(num_bytes, cheapest_to_store(equations, out, set()))) == 4


def test_latest_of_equal_cuts():
    equations, _, out = trace(lambda x: [jnp.sin(jnp.cos(x @ x))], jnp.ones((4, 4)))
    assert names(cheapest_to_store(equations, out, set()), equations) == ["sin"]


def test_free_values_cost_nothing():
    equations, invars, out = trace(lambda x, w: [x * jnp.sin(w), w + 1.0], jnp.ones(8), jnp.ones(8))
    free = free_values(equations, [invars[1]])
    assert out[1] in free
    assert cheapest_to_store(equations, out[1:], free) == []
    assert sum(map(num_bytes, cheapest_to_store(equations, out, free))) == 32


def test_random_keys_have_a_size():
    equations, invars, _ = trace(lambda key: [jax.random.bits(key)], jax.random.key(0))
    assert num_bytes(invars[0]) == 8
    assert equations
