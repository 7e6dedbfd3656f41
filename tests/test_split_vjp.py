"""The split backward equals jax.vjp, and cuts where it should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dualpipe_jax import jaxprs
from dualpipe_jax.hand_written import hand_written
from dualpipe_jax.split_vjp import split_vjp

# float32 sums in another order: a few units in the last place of values of size three.
TOLERANCE = 5e-6


def run_split(f, params, x, dy, *consts, **options):
    """(y, dx, dparams) by the three parts, each compiled by itself as the executor's branches are."""
    split = split_vjp(f, params, x, *consts, **options)
    y, _aux, residuals = jax.jit(split.forward)(params, x, *consts)
    dx, cut = jax.jit(split.backward_input)(params, residuals, dy, *consts)
    dparams = jax.jit(split.backward_weight)(params, residuals.weight, cut, *consts)
    return split, y, dx, dparams


def assert_equal_to_vjp(f, params, x, *consts):
    y, vjp = jax.vjp(lambda p, x: f(p, x, *consts), params, x)
    dy = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), y)
    split, y2, dx, dparams = run_split(f, params, x, dy, *consts)
    want_dp, want_dx = vjp(dy)
    zeros = jax.tree.map(jnp.zeros_like, params)
    dparams = jax.tree.map(lambda d, z: z if d is None else d, dparams, zeros, is_leaf=lambda d: d is None)
    for got, want in ((y2, y), (dx, want_dx), (dparams, want_dp)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE), got, want)
    return split


def layer_params(key, d=16, f=32):
    shapes = {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "gate": (d, f), "up": (d, f), "down": (f, d)}
    keys = jax.random.split(key, len(shapes))
    weights = {n: jax.random.normal(k, s) / s[0] ** 0.5 for k, (n, s) in zip(keys, shapes.items(), strict=True)}
    return weights | {"norm1": jnp.ones(d), "norm2": jnp.ones(d)}


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None, None]


def layer(p, x):
    h = rms_norm(x, p["norm1"])
    q, k, v = ((h @ p[n]).reshape(*h.shape[:2], 4, -1) for n in "qkv")
    a = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    x = x + a @ p["o"]
    h = rms_norm(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def stage(params, x):
    for p in params:
        x = layer(p, x)
    return x


@pytest.fixture
def two_layers():
    params = [layer_params(k) for k in jax.random.split(jax.random.key(0))]
    return params, jax.random.normal(jax.random.key(1), (2, 8, 16))


@pytest.mark.parametrize("recompute", [False, True])
def test_transformer_stage(two_layers, recompute):
    f = jax.checkpoint(stage) if recompute else stage
    split = assert_equal_to_vjp(f, *two_layers)
    forward, backward_input, backward_weight = split.count(jaxprs.MATMULS)
    assert backward_weight == 14  # one a weight matrix
    # I: a matmul for dx of each weight, and four for attention; recomputation adds those of a forward that dx needs.
    assert forward == 18
    assert backward_input == 22 + (18 - 1 if recompute else 0)


def test_parameters_are_not_stored(two_layers):
    """Case of residual economy: no stored value has a weight matrix's shape."""
    split = assert_equal_to_vjp(jax.jit(stage), *two_layers)
    weights = {leaf.shape for leaf in jax.tree.leaves(two_layers[0])}
    assert not weights & {r.shape for r in (*split.residuals.input, *split.residuals.weight, *split.cut)}


def test_recomputation_stores_only_the_input(two_layers):
    split = split_vjp(jax.checkpoint(stage), *two_layers)
    assert [r.shape for r in (*split.residuals.input, *split.residuals.weight)] == [two_layers[1].shape]


def test_parameter_used_twice():
    """Case 6: x = 3, w = 2, f = x w w gives dw = 12, dx = 4; and a scale used twice in a stage."""
    _, y, dx, dw = run_split(lambda w, x: x * w * w, jnp.float32(2), jnp.float32(3), jnp.float32(1))
    assert (float(y), float(dx), float(dw)) == (12.0, 4.0, 12.0)
    x = jax.random.normal(jax.random.key(0), (2, 4, 8))
    assert_equal_to_vjp(lambda p, x: rms_norm(rms_norm(x, p) * 2.0, p), 1.5 * jnp.ones(8), x)


def test_accumulation():
    """Case 8: an accumulator at 7 becomes 19; two microbatches with W left to the end add up to 31; unused is None."""

    def f(p, x):
        return x * p["w"] * p["w"]

    params = {"w": jnp.float32(2), "unused": jnp.ones(3)}
    split = split_vjp(f, params, jnp.float32(3))
    accumulator, pending = jnp.float32(7), []
    for x in (jnp.float32(3), jnp.float32(3)):
        _, _, residuals = split.forward(params, x)
        _, cut = split.backward_input(params, residuals, jnp.float32(1))
        pending.append((residuals.weight, cut))
    for expected, kept in zip((19.0, 31.0), pending, strict=True):
        gradient = split.backward_weight(params, *kept)
        assert gradient["unused"] is None
        accumulator += gradient["w"]
        assert float(accumulator) == expected
    assert split.used == (False, True)


def test_integer_none_and_constant_leaves():
    def f(p, x, mask):
        h = jnp.take(p["table"], x["ids"], axis=0) + x["h"]
        return {"h": h * mask[:, None] @ p["w"], "ids": x["ids"]}

    params = {"table": jnp.ones((5, 4)), "w": jnp.ones((4, 4)) * 0.5, "none": None, "count": jnp.int32(3)}
    x = {"ids": jnp.array([1, 2, 4]), "h": jnp.arange(12.0).reshape(3, 4)}
    mask = jnp.array([1.0, 0.0, 1.0])
    dy = {"h": jnp.ones((3, 4)), "ids": None}
    split, y, dx, dp = run_split(f, params, x, dy, mask)
    np.testing.assert_array_equal(y["ids"], x["ids"])
    assert dx["ids"] is None
    assert dp["count"] is None
    np.testing.assert_allclose(dx["h"], mask[:, None] * 2.0 * jnp.ones((3, 4)))
    np.testing.assert_allclose(dp["w"], ((1 + x["h"]) * mask[:, None]).T @ jnp.ones((3, 4)))
    assert split.used == (False, True, True)


def test_auxiliary_output_and_second_cotangent():
    def f(p, x):
        y = jnp.tanh(x @ p)
        return (y, jnp.sum(y * y)), jnp.int32(7)

    p, x = jnp.eye(3) * 0.5, jnp.arange(6.0).reshape(2, 3)
    split = split_vjp(f, p, x, has_aux=True)
    (_, loss), aux, residuals = split.forward(p, x)
    dx, cut = split.backward_input(p, residuals, (jnp.zeros((2, 3)), jnp.float32(1)))
    want_dp, want_dx = jax.grad(lambda p, x: f(p, x)[0][1], argnums=(0, 1))(p, x)
    assert int(aux) == 7
    assert float(loss) > 0
    np.testing.assert_allclose(dx, want_dx, rtol=TOLERANCE)
    np.testing.assert_allclose(split.backward_weight(p, residuals.weight, cut), want_dp, rtol=TOLERANCE)


def test_custom_vjp_scan_cond_and_casts():
    @jax.custom_vjp
    def scaled(w, x):
        return x @ w

    scaled.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, g: (r[1].T @ g, g @ r[0].T))

    def f(p, x):
        y = scaled(p["w"], x)
        y, _ = jax.lax.scan(lambda c, w: (jnp.sin(c @ w), None), y, p["stack"])
        y = jax.lax.cond(jnp.sum(x) > 0, lambda y: y @ p["w"], lambda y: 2.0 * y, y)
        return jax.vmap(lambda row: row * p["scale"])(y.astype(jnp.bfloat16).astype(jnp.float32))

    keys = jax.random.split(jax.random.key(3), 3)
    params = {
        "w": jax.random.normal(keys[0], (4, 4)),
        "stack": jax.random.normal(keys[1], (3, 4, 4)),
        "scale": jnp.arange(4.0),
    }
    split = assert_equal_to_vjp(f, params, jax.random.normal(keys[2], (5, 4)))
    assert split.count(jaxprs.MATMULS)[2] >= 1


def test_no_collective_in_the_weight_half():
    """Tokens that go through an all-to-all: I holds its transpose, W holds none."""
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))

    def f(p, x):
        h = jax.lax.all_to_all(x @ p["in"], "ep", 0, 0, tiled=True)
        return jax.lax.all_to_all(jnp.tanh(h @ p["expert"]), "ep", 0, 0, tiled=True) @ p["out"]

    params = {n: jax.random.normal(jax.random.key(i), (8, 8)) for i, n in enumerate(("in", "expert", "out"))}
    x = jax.random.normal(jax.random.key(9), (4 * 4, 8))
    counts = []

    def body(params, x):
        split = split_vjp(f, params, x)
        counts.append((split.count(jaxprs.COLLECTIVES), split.count(jaxprs.MATMULS)))
        y, _, residuals = split.forward(params, x)
        dx, cut = split.backward_input(params, residuals, jnp.sin(y))
        dp = split.backward_weight(params, residuals.weight, cut)
        _, vjp = jax.vjp(f, params, x)
        return (dp, dx), vjp(jnp.sin(y))

    run = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("ep")), out_specs=((P("ep"), P("ep")),) * 2, check_vma=False)
    got, want = jax.jit(run)(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE), got, want)
    assert counts[0] == ((2, 2, 0), (3, 3, 3))


def test_fewer_bytes_than_jax_vjp_keeps(two_layers):
    """Cheap values are computed again: residuals are less than two thirds of what `jax.vjp` would hold on to."""
    split = split_vjp(stage, *two_layers)
    kept = sum(np.prod(r.shape) * 4 for r in (*split.residuals.input, *split.residuals.weight))
    _, vjp = jax.vjp(stage, *two_layers)
    weights = {leaf.shape for leaf in jax.tree.leaves(two_layers[0])}
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(vjp) if leaf.shape not in weights)
    assert kept < 0.67 * held


def test_hand_written_halves_run_where_they_belong():
    """Each half is a callback here, so it cannot be looked into: each runs once, in its own part, also in a scan."""
    ran = []

    def foreign(name, function, shape):
        def call(*args):
            ran.append(name)
            return np.asarray(function(*args), np.float32)

        return lambda *args: jax.pure_callback(call, jax.ShapeDtypeStruct(shape, jnp.float32), *args)

    linear = hand_written(
        lambda w, x: (foreign("F", lambda w, x: x @ w, (3, 4))(w, x), x),
        lambda w, x, dy: (foreign("I", lambda w, dy: dy @ w.T, (3, 4))(w, dy), dy),
        lambda w, x, dy: foreign("W", lambda x, dy: x.T @ dy, (4, 4))(x, dy),
    )

    def f(params, x):
        return jax.lax.scan(lambda x, w: (jnp.sin(linear(w, x)), None), jnp.cos(linear(params[0], x)), params[1:])[0]

    params = jax.random.normal(jax.random.key(0), (3, 4, 4))
    x = jax.random.normal(jax.random.key(1), (3, 4))
    split = split_vjp(f, params, x)
    y, _, residuals = split.forward(params, x)
    assert ran == ["F"] * 3
    dx, cut = split.backward_input(params, residuals, jnp.ones_like(y))
    jax.block_until_ready(dx)
    assert ran == ["F"] * 3 + ["I"] * 3
    dp = split.backward_weight(params, residuals.weight, cut)
    jax.block_until_ready(dp)
    assert ran == ["F"] * 3 + ["I"] * 3 + ["W"] * 3

    def plain(params, x):
        return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), jnp.cos(x @ params[0]), params[1:])[0]

    want = jax.vjp(plain, params, x)[1](jnp.ones_like(y))
    np.testing.assert_allclose(dp, want[0], rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(dx, want[1], rtol=TOLERANCE, atol=TOLERANCE)
