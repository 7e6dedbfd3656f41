"""Quantising to FP8: what it may do to a value."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe import quantize as fp8

# Half a unit in the last of 3 mantissa bits; and half of the smallest subnormal, 2^-9, for what is tiny in its tile.
HALF_ULP, HALF_SUBNORMAL = 2.0**-4, 2.0**-10

finite = st.floats(-(2.0**99), 2.0**99, width=32)
shapes = st.sampled_from([(3, 9), (2, 4, 5), (1, 1)])  # few, because each is a compilation
matrices = hnp.arrays(np.float32, shapes, elements=finite)
tiles = st.sampled_from([(1, 4), (4, 1), (4, 4), (128, 128)])
few = hypothesis.settings(max_examples=60, deadline=None)  # a compilation is slow
quantize = jax.jit(fp8.quantize, static_argnames=("tile", "power_of_two"))
dequantize = jax.jit(fp8.dequantize, static_argnames="tile")


def spread(scales, shape, tile):
    for axis, size in ((-2, tile[0]), (-1, tile[1])):
        scales = np.repeat(scales, size, axis).take(np.arange(shape[axis]), axis)
    return scales


@few
@hypothesis.given(matrices, tiles, st.booleans())
def test_a_quantised_value_is_within_half_a_unit(x, tile, power_of_two):
    q = quantize(jnp.asarray(x), tile, power_of_two=power_of_two)
    scale = spread(np.asarray(q.scales, np.float64), x.shape, tile)
    error = np.abs(np.asarray(q.values, np.float64) * scale - x)
    # One part in 2^20 on top: the scale, its inverse and their product with x are float32.
    assert np.all(error <= np.maximum(HALF_ULP * np.abs(x), HALF_SUBNORMAL * scale) * (1 + 2.0**-20))
    assert np.all(np.isfinite(np.asarray(q.values, np.float32)))
    assert np.all(np.asarray(q.values, np.float32)[x == 0] == 0), "padding stays exactly zero"


@few
@hypothesis.given(matrices, tiles)
def test_powers_of_two_are_the_next_above(x, tile):
    plain = np.asarray(quantize(jnp.asarray(x), tile, power_of_two=False).scales)
    power = np.asarray(quantize(jnp.asarray(x), tile, power_of_two=True).scales)
    assert np.all(np.frexp(power)[0] == 0.5)
    assert np.all((power >= plain) & (power < 2 * plain))


@few
@hypothesis.given(matrices, tiles)
def test_dequantised_values_quantise_to_themselves(x, tile):
    once = dequantize(quantize(jnp.asarray(x), tile, power_of_two=True), tile)
    # The scale may be half as large where amax was rounded down to a power of two: nothing is lost by that.
    again = dequantize(quantize(once, tile, power_of_two=True), tile)
    assert jnp.all(again == once)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_zero_tiles_are_finite_and_large_values_saturate(power_of_two):
    zero = fp8.quantize(jnp.zeros((3, 256)), fp8.ROW_TILES, power_of_two=power_of_two)
    assert jnp.all(zero.scales > 0)
    assert jnp.all(jnp.isfinite(zero.scales))
    assert jnp.all(fp8.dequantize(zero, fp8.ROW_TILES) == 0)
    # float8_e4m3fn has no infinity: a cast alone would give NaN.
    assert fp8.round_to_e4m3(jnp.array([500.0, -1e9, 448.0])).astype(jnp.float32).tolist() == [448, -448, 448]


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_what_is_not_finite_is_not_hidden_and_stays_in_its_tile(bad, power_of_two):
    x = np.ones((2, 256), np.float32)
    x[0, 5] = bad
    back = dequantize(quantize(jnp.asarray(x), fp8.ROW_TILES, power_of_two=power_of_two), fp8.ROW_TILES)
    assert not np.isfinite(back[0, 5])
    if np.isnan(bad):
        back = back.at[0, 5].set(1)  # its neighbours are as if it were not there
    else:
        assert not np.any(np.isfinite(back[0, :128]))
        back = back.at[0, :128].set(1)
    np.testing.assert_allclose(back, 1, rtol=1e-6)  # scale and its inverse are float32
