"""The weighted sum of a row's places, its kernel and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_interpreter import interpreted

from moe.kernels import unpack_reduce as module
from moe.rows import row_map

ROWS, CHOICES, PLACES = 5, 3, 20


def case(width, dtype=jnp.float32):
    random = np.random.default_rng(width)
    place = random.permutation(PLACES + 4)[: ROWS * CHOICES].reshape(ROWS, CHOICES)  # some are no place
    rows = row_map(jnp.asarray(place, jnp.int32), PLACES)
    places = jnp.asarray(random.standard_normal((PLACES, width)), dtype)
    return places, jnp.asarray(random.standard_normal((ROWS, CHOICES)), jnp.float32), rows


def exact(places, weights, place):
    rows = np.concatenate([np.asarray(places, np.float64), np.zeros((1, places.shape[1]))])
    return np.einsum("tk,tkd->td", np.asarray(weights, np.float64), rows[np.asarray(place)])


# Widths of one piece and of several; 384 is no power of two.
@pytest.mark.parametrize(("width", "dtype"), [(1024, jnp.bfloat16), (384, jnp.float32), (2048, jnp.bfloat16)])
def test_the_kernel_is_the_reference(width, dtype):
    places, weights, rows = case(width, dtype)
    got = interpreted(module.unpack_reduce_kernel, places, weights, rows.place)
    wanted = jax.jit(module.unpack_reduce_reference)(places, weights, rows.place)
    # The same products in the same order; a compiler may fuse a product and a sum, which rounds once less.
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == jnp.float32 else {"rtol": 2.0**-8}
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (got, wanted)), **tolerance)
    packed = interpreted(module.scaled_pack_kernel, wanted, jnp.arange(PLACES, dtype=jnp.float32), rows.source)
    np.testing.assert_array_equal(
        packed, module.scaled_pack_reference(wanted, jnp.arange(PLACES, dtype=jnp.float32), rows.source)
    )


def test_sums_are_near_float64():
    places, weights, rows = case(256)
    # Three products in float32.
    np.testing.assert_allclose(
        module.unpack_reduce(places, weights, rows), exact(places, weights, rows.place), rtol=1e-5, atol=1e-6
    )


def test_sums_of_bfloat16_are_rounded_once():
    places, weights, rows = case(256, jnp.bfloat16)
    wanted = exact(places, weights, rows.place)
    got = np.asarray(module.unpack_reduce(places, weights, rows), np.float64)
    # Half a unit of 8 bits, and float32's own error; bfloat16 sums would be off by more wherever terms cancel.
    assert np.all(np.abs(got - wanted) <= 2.0**-8 * np.abs(wanted) + 1e-6)


def test_empty_places_add_nothing_even_beside_nan():
    places, weights, rows = case(256)
    place = rows.place.at[0].set(PLACES)
    kept = set(np.asarray(place).reshape(-1)) - {PLACES}
    unused = next(p for p in range(PLACES) if p not in kept)
    places = places.at[unused].set(jnp.nan)
    got = interpreted(module.unpack_reduce_kernel, places, weights, place)
    assert np.all(np.isfinite(got))
    assert np.all(np.asarray(got[0]) == 0)


@pytest.mark.parametrize("width", [256, 100])
def test_gradients_are_those_of_the_plain_sum(width):
    places, weights, rows = case(width)
    dy = jnp.asarray(np.random.default_rng(1).standard_normal((ROWS, width)), jnp.float32)

    def plain(places, weights):
        return module.unpack_reduce_reference(places, weights, rows.place)

    wanted = jax.vjp(plain, places, weights)[1](dy)
    got = jax.vjp(lambda p, w: module.unpack_reduce(p, w, rows), places, weights)[1](dy)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)  # float32 sums over D in another order


def test_the_transpose_is_the_transpose():
    places, weights, rows = case(128)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((ROWS, 128)), jnp.float32)
    at_places = jnp.zeros(PLACES).at[rows.place].set(weights, mode="drop")
    forward = jnp.vdot(x, module.unpack_reduce(places, weights, rows))
    backward = jnp.vdot(places, module.scaled_pack(x, at_places, rows.source))
    np.testing.assert_allclose(forward, backward, rtol=1e-5)  # float32 sums in two orders


def test_the_width_is_checked():
    places, weights, rows = case(200)
    with pytest.raises(ValueError, match="width=200 must be a multiple of 128; the nearest valid is 256"):
        module.unpack_reduce_kernel(places, weights, rows.place)
