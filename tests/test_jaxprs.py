"""What is relied on from jaxprs, stated as tests: a change in JAX shows here first."""

import jax
import jax.numpy as jnp
import numpy as np

from dualpipe_jax import jaxprs


def test_calls_are_inlined():
    """jit and checkpoint appear under names that are known, and vanish."""

    @jax.jit
    def inner(x):
        return jnp.sin(x) * 2.0

    f = jax.checkpoint(lambda x: jax.jit(inner)(x) + 1.0)
    flat = jaxprs.flat_jaxpr(lambda x: [f(x)], jnp.ones(3))
    assert [e.primitive.name for e in flat.jaxpr.eqns] == ["sin", "mul", "add"]


def test_equations_run_again_from_their_parameters():
    def f(x):
        y, _ = jax.lax.scan(lambda c, _: (c * 2.0, None), x, None, length=3)
        return [jax.lax.cond(jnp.sum(y) > 0, jnp.sin, jnp.cos, y), jnp.argsort(-y)]

    x = jnp.arange(4.0)
    flat = jaxprs.flat_jaxpr(f, x)
    env = dict(zip([*flat.jaxpr.constvars, *flat.jaxpr.invars], [*flat.consts, x], strict=True))
    got = jaxprs.evaluate(flat.jaxpr.eqns, env, flat.jaxpr.outvars)
    jax.tree.map(np.testing.assert_array_equal, got, f(x))


def test_scans_tell_their_operands_apart():
    def f(w, x, xs):
        return jax.lax.scan(lambda c, a: ((c[0] * w + a, c[1] + 1), c[0]), (x, 0), xs, reverse=True)

    flat = jaxprs.flat_jaxpr(lambda *a: jax.tree.leaves(f(*a)), jnp.float32(2.0), jnp.ones(()), jnp.ones(3))
    (equation,) = (e for e in flat.jaxpr.eqns if e.primitive.name == "scan")
    scan = jaxprs.Scan.of(equation)
    assert (scan.length, scan.reverse, scan.num_consts, scan.num_carry) == (3, True, 1, 2)
    assert [len(p) for p in (scan.consts, scan.carry, scan.xs, scan.carry_out, scan.ys)] == [1, 2, 1, 2, 1]


def test_inputs_and_outputs_keep_their_order_and_identity():
    flat = jaxprs.flat_jaxpr(lambda a, b: [b, a, a + b], jnp.ones(2), jnp.ones(2))
    assert flat.jaxpr.outvars[:2] == list(reversed(flat.jaxpr.invars))


def test_dependence():
    flat = jaxprs.flat_jaxpr(lambda a, b: [jnp.sin(a) * b, jnp.cos(b)], jnp.ones(2), jnp.ones(2))
    equations, (a, b) = flat.jaxpr.eqns, flat.jaxpr.invars
    sin, mul, cos = ({e.primitive.name: e for e in equations}[n] for n in ("sin", "mul", "cos"))
    assert jaxprs.dependents(equations, [a]) == {a, *sin.outvars, *mul.outvars}
    kept = jaxprs.needed_for(equations, mul.outvars)
    assert {e.primitive.name for e, k in zip(equations, kept, strict=True) if k} == {"sin", "mul"}
    kept = jaxprs.needed_for(equations, mul.outvars, available=sin.outvars)
    assert {e.primitive.name for e, k in zip(equations, kept, strict=True) if k} == {"mul"}
    assert jaxprs.inputs_of([mul], cos.outvars) == [*sin.outvars, b, *cos.outvars]


def test_side_effects_are_told_from_collectives():
    def f(x):
        jax.debug.print("{}", x)
        return [x * 2.0]

    flat = jaxprs.flat_jaxpr(f, jnp.ones(()))
    assert any(jaxprs.has_side_effects(e) for e in flat.jaxpr.eqns)
    mesh = jax.make_mesh((2,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    seen = []

    def body(x):
        inner = jaxprs.flat_jaxpr(lambda x: [jax.lax.all_to_all(x, "ep", 0, 0, tiled=True)], x)
        seen.extend(inner.jaxpr.eqns)
        return x

    spec = jax.sharding.PartitionSpec("ep")
    jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.ones(4))
    assert [e.primitive.name for e in seen] == ["all_to_all"]
    assert not jaxprs.has_side_effects(seen[0])


def test_count_looks_into_nested_jaxprs():
    def f(x):
        return [jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=3)[0] @ x]

    assert jaxprs.count(jaxprs.flat_jaxpr(f, jnp.ones((2, 2))).jaxpr, jaxprs.MATMULS) == 2
