"""Grouped matmuls and experts against loops over experts, whatever the number of their rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.dispatch import Received
from moe.experts import experts, group_rows, grouped_matmul, swiglu

E, BLOCK, K, N = 4, 4, 6, 5
PLACES = 8 * BLOCK
TOLERANCE = 1e-6  # relative to the largest value; float32 sums of at most 6 or 32 products
SKEWS = {"even": [2, 2, 2, 2], "skewed": [0, 5, 1, 0], "one expert": [0, 0, 6, 0], "nobody": [0, 0, 0, 0]}


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def spans(blocks):
    """Each expert's places."""
    stops = np.cumsum(blocks) * BLOCK
    return [slice(stop - n * BLOCK, stop) for stop, n in zip(stops, blocks, strict=True)]


def assert_close(got, want, tolerance=TOLERANCE):
    scale = max(float(np.max(np.abs(want))), 1e-6)
    np.testing.assert_allclose(np.asarray(got, np.float64) / scale, want / scale, rtol=0, atol=tolerance)


@jax.jit
def product_and_gradients(lhs, rhs, blocks, g):
    out, vjp = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, blocks, BLOCK), lhs, rhs)
    return out, *vjp(g)


@pytest.mark.parametrize("blocks", SKEWS.values(), ids=SKEWS)
def test_grouped_matmul_equals_a_loop_over_experts(blocks):
    """Values and gradients; rows beyond the last block, and experts without rows, are exactly zero."""
    lhs, rhs, g = normal(0, PLACES, K), normal(1, E, K, N), normal(2, PLACES, N)
    out, dlhs, drhs = product_and_gradients(lhs, rhs, jnp.array(blocks, jnp.int32), g)
    want_out, want_dlhs, want_drhs = np.zeros((PLACES, N)), np.zeros((PLACES, K)), np.zeros((E, K, N))
    for e, span in enumerate(spans(blocks)):
        want_out[span] = np.float64(lhs[span]) @ np.float64(rhs[e])
        want_dlhs[span] = np.float64(g[span]) @ np.float64(rhs[e]).T
        want_drhs[e] = np.float64(lhs[span]).T @ np.float64(g[span])
    for got, want in ((out, want_out), (dlhs, want_dlhs), (drhs, want_drhs)):
        assert_close(got, want)
        assert not np.any(np.asarray(got)[want == 0])


def test_places_beyond_the_last_block_are_not_read():
    """Garbage there (here NaN) reaches neither the product nor a gradient."""
    blocks = jnp.array([1, 0, 2, 1], jnp.int32)
    beyond = jnp.arange(PLACES)[:, None] >= 4 * BLOCK
    lhs, g = (jnp.where(beyond, jnp.nan, a) for a in (normal(0, PLACES, K), normal(2, PLACES, N)))
    for result in product_and_gradients(lhs, normal(1, E, K, N), blocks, g):
        assert np.all(np.isfinite(result))


@pytest.mark.parametrize("places", [BLOCK, 2 * BLOCK])
def test_fewer_places_than_are_multiplied_at_once(places):
    lhs, rhs, g = normal(0, places, K), normal(1, 1, K, N), normal(2, places, N)
    out, dlhs, drhs = product_and_gradients(lhs, rhs, jnp.array([places // BLOCK], jnp.int32), g)
    assert_close(out, np.float64(lhs) @ np.float64(rhs[0]))
    assert_close(dlhs, np.float64(g) @ np.float64(rhs[0]).T)
    assert_close(drhs[0], np.float64(lhs).T @ np.float64(g))


def test_bfloat16_is_summed_in_float32():
    """256 + 1 + 1 ... sticks at 256 in bfloat16; here 256 + 256 ones arrive, over columns and over blocks of rows."""
    many, block = 257, 32
    ones = np.ones((many, many))
    lhs = jnp.asarray(np.pad(ones, ((0, 288 - many), (0, 0))) * np.where(np.arange(many) == 0, 256, 1), jnp.bfloat16)
    rhs = jnp.asarray(ones[None], jnp.bfloat16)

    @jax.jit
    def run(lhs, rhs, rows):
        out = grouped_matmul(lhs, rhs, jnp.array([9], jnp.int32), block)
        _, vjp = jax.vjp(lambda rhs: grouped_matmul(rows, rhs, jnp.array([9], jnp.int32), block), rhs)
        return out[:many], vjp(jnp.ones_like(out))[0]

    rows = jnp.asarray(np.where(np.arange(288) == 0, 256, np.arange(288) < many)[:, None] * ones[:1], jnp.bfloat16)
    out, drhs = run(lhs, rhs, rows)
    assert out.dtype == jnp.bfloat16
    assert np.unique(out).tolist() == [512.0]
    assert drhs.dtype == jnp.bfloat16
    assert np.unique(drhs).tolist() == [512.0]


ROWS, CHOICES = 7, 2
IDX = st.lists(st.permutations([-1, -1, *range(E)]).map(lambda p: p[:CHOICES]), min_size=ROWS, max_size=ROWS)
group = jax.jit(group_rows, static_argnums=(1, 2))


@settings(max_examples=50, deadline=None)
@given(IDX)
def test_groups_hold_each_choice_once_in_order(idx):
    """Sorted by expert, then row; whole blocks; every place's source has it as its place."""
    groups = group(jnp.array(idx, jnp.int32), E, BLOCK)
    flat = np.ravel(idx)
    counts = np.array([np.sum(flat == e) for e in range(E)])
    assert groups.blocks.tolist() == (-(-counts // BLOCK)).tolist()
    source, num_places = np.asarray(groups.choices.source), groups.choices.source.shape[0]
    for e, span in enumerate(spans(groups.blocks.tolist())):
        members = np.flatnonzero(flat == e).tolist()
        assert source[span].tolist() == members + [flat.size] * (span.stop - span.start - len(members))
        assert np.asarray(groups.choices.place)[members, 0].tolist() == [span.start + i for i in range(len(members))]
    assert np.all(np.asarray(groups.choices.place)[flat < 0] == num_places)
    assert groups.rows.place.reshape(-1).tolist() == groups.choices.place.reshape(-1).tolist()
    assert groups.rows.source.tolist() == (source // CHOICES).tolist()


def by_loops(x, weights, idx, gate_up, down):
    """Sum over a row's choices, dense, for JAX to differentiate."""
    out = jnp.zeros_like(x)
    for e in range(E):
        gate, up = jnp.split(gate_up[e], 2, axis=-1)
        share = jnp.sum(jnp.where(idx == e, weights, 0), axis=-1, keepdims=True)
        out = out + share * swiglu(x, gate, up, down[e])
    return out


@functools.cache
def compiled(dense):
    def run(x, weights, idx, gate_up, down, g):
        def f(x, weights, gate_up, down):
            if dense:
                return by_loops(x, weights, idx, gate_up, down)
            return experts(Received(x, idx, weights), gate_up, down, BLOCK)

        y, vjp = jax.vjp(f, x, weights, gate_up, down)
        return y, *vjp(g)

    return jax.jit(run)


@settings(max_examples=25, deadline=None)
@given(IDX)
def test_experts_equal_dense_ones(idx):
    """Values, and gradients of rows, weights and matrices; what has no expert or no rows is exactly zero."""
    idx = jnp.array(idx, jnp.int32)
    args = (normal(0, ROWS, K), normal(1, ROWS, CHOICES), idx, normal(2, E, K, 2 * N), normal(3, E, N, K))
    g = normal(4, ROWS, K)
    got, want = compiled(False)(*args, g), compiled(True)(*args, g)
    for mine, other in zip(got, want, strict=True):
        assert_close(mine, np.asarray(other), 1e-5)  # three matmuls and a silu, in float32
    nowhere = np.all(np.asarray(idx) < 0, axis=1)
    assert not np.any(np.asarray(got[0])[nowhere])
    assert not np.any(np.asarray(got[1])[nowhere])
    assert not np.any(np.asarray(got[2])[np.asarray(idx) < 0])
    unused = [e for e in range(E) if e not in np.asarray(idx)]
    assert not np.any(np.asarray(got[3])[unused])
    assert not np.any(np.asarray(got[4])[unused])


def test_swiglu():
    """(silu(x G) * (x U)) D in float64."""
    x, gate, up, down = normal(0, 3, K), normal(1, K, N), normal(2, K, N), normal(3, N, K)
    a, b = np.float64(x) @ np.float64(gate), np.float64(x) @ np.float64(up)
    assert_close(swiglu(x, gate, up, down), (a / (1 + np.exp(-a)) * b) @ np.float64(down))
