"""The kernel that gathers and quantises is, bit for bit, the gather and the quantiser."""

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_interpreter import interpreted

from moe.kernels.quantize_pack import quantize_pack, quantize_pack_kernel, quantize_pack_reference

ROWS = 11


def case(places, width, dtype):
    random = np.random.default_rng(places)
    x = random.standard_normal((ROWS, width)) * np.exp(random.standard_normal((ROWS, 1)) * 4)
    x[0] = 0
    x[1, 130] = np.nan
    source = random.integers(0, ROWS + 1, places)
    source[:3] = 0, 1, ROWS  # zeros, a NaN, and an empty place
    return jnp.asarray(x, dtype), jnp.asarray(source, jnp.int32)


# Widths of 8 tiles (rows are copied in groups of eight) and of 3 (tile by tile); places that do not fill a block.
@pytest.mark.parametrize(
    ("places", "width", "dtype", "power_of_two"),
    [(16, 1024, jnp.bfloat16, False), (9, 1024, jnp.float32, True), (5, 384, jnp.bfloat16, True)],
)
def test_the_kernel_is_the_reference(places, width, dtype, power_of_two):
    x, source = case(places, width, dtype)
    got = interpreted(quantize_pack_kernel, x, source, power_of_two=power_of_two)
    wanted = quantize_pack_reference(x, source, power_of_two=power_of_two)
    assert got.values.dtype == wanted.values.dtype
    np.testing.assert_array_equal(np.asarray(got.values, np.float32), np.asarray(wanted.values, np.float32))
    np.testing.assert_array_equal(got.scales, wanted.scales)


def test_empty_places_are_zero_even_beside_nan():
    x = jnp.full((2, 1024), jnp.nan, jnp.bfloat16)
    got = interpreted(quantize_pack_kernel, x, jnp.array([2, 0, 2, 1], jnp.int32))
    values = np.asarray(got.values, np.float32)
    assert np.all(values[[0, 2]] == 0)
    assert np.all(np.isfinite(got.scales[jnp.array([0, 2])]))
    assert np.all(np.isnan(values[[1, 3]])), "not hidden"


@pytest.mark.parametrize("width", [128, 100])
def test_elsewhere_the_reference_runs(width):
    x = jnp.arange(2 * width, dtype=jnp.float32).reshape(2, width)
    got = quantize_pack(x, jnp.array([1, 2, 0], jnp.int32))
    assert got.values.shape == (3, width)
    assert np.all(np.asarray(got.values[1], np.float32) == 0)


def test_the_width_is_checked():
    with pytest.raises(ValueError, match="width=200 must be a multiple of 128; the nearest valid is 256"):
        quantize_pack_kernel(jnp.zeros((2, 200)), jnp.zeros(4, jnp.int32))
