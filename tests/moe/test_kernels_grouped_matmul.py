"""Grouped matmul kernels in bf16, interpreted, against the loops over blocks and against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_interpreter import interpreted, needs_transposed_references

from moe import experts
from moe.kernels import grouped_matmul as module

EXPERTS, K, N = 3, 256, 128
BLOCKS = jnp.array([2, 0, 1], jnp.int32)  # an expert without rows, and a block without an expert
PLACES = 4
SMS = 2  # tiles of several SMs, and several tiles an SM


def case(block_size, n=N, seed=0):
    random = np.random.default_rng(seed)
    used = np.arange(PLACES * block_size) < 3 * block_size - 5
    lhs, g = (np.where(used[:, None], random.standard_normal((len(used), w)), 0) for w in (K, n))
    rhs = random.standard_normal((EXPERTS, K, n))
    return [jnp.asarray(a, jnp.bfloat16) for a in (lhs, rhs, g)]


def close(got, wanted):
    got, wanted = np.asarray(got, np.float32), np.asarray(wanted, np.float32)
    # Both are float32 sums in some order, rounded to bfloat16: at most one unit of 8 bits apart.
    np.testing.assert_allclose(got, wanted, rtol=2.0**-7, atol=1e-4)


@pytest.mark.parametrize(("block_size", "n"), [(64, 128), (128, 256)])
def test_forward_is_the_reference(block_size, n):
    lhs, rhs, _ = case(block_size, n)
    kernel = {"block_size": block_size, "transpose": False, "num_sms": SMS}
    got = interpreted(module.rows_times_kernel, lhs, rhs, BLOCKS, **kernel)
    close(got, experts.rows_times(lhs, rhs, BLOCKS, block_size, transpose=False))
    assert np.all(np.asarray(got[3 * block_size :], np.float32) == 0), "rows beyond the last block"


@needs_transposed_references
@pytest.mark.parametrize("block_size", [64, 128])
def test_gradients_are_the_references(block_size):
    lhs, rhs, g = case(block_size)
    got = interpreted(module.rows_times_kernel, g, rhs, BLOCKS, block_size=block_size, transpose=True, num_sms=SMS)
    close(got, experts.rows_times(g, rhs, BLOCKS, block_size, transpose=True))
    got = interpreted(module.weight_gradient_kernel, lhs, g, BLOCKS, block_size=block_size, num_sms=SMS)
    close(got, experts.weight_gradient(lhs, g, BLOCKS, block_size, rhs))
    assert np.all(np.asarray(got[1], np.float32) == 0), "an expert without rows"


def test_elsewhere_the_reference_runs_and_differentiates():
    lhs, rhs, g = case(64)
    y, vjp = jax.vjp(lambda a, b: module.grouped_matmul(a, b, BLOCKS, 64), lhs, rhs)
    wanted, wanted_vjp = jax.vjp(lambda a, b: experts.grouped_matmul(a, b, BLOCKS, 64), lhs, rhs)
    for got, plain in zip((y, *vjp(g)), (wanted, *wanted_vjp(g)), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(plain, np.float32))


def test_what_does_not_fit_is_said():
    lhs, rhs, _ = case(64)
    assert module.fits(lhs, rhs, 64)
    assert not module.fits(lhs, rhs, 96)
    assert not module.fits(lhs.astype(jnp.float32), rhs.astype(jnp.float32), 64)
    assert not module.fits(lhs, rhs[:, :, :100], 64)
    with pytest.raises(ValueError, match="block_size=96 must be a multiple of 64; the nearest valid is 128"):
        module.rows_times_kernel(lhs, rhs, BLOCKS, 96, transpose=False)
    with pytest.raises(ValueError, match="must both be bfloat16"):
        module.rows_times_kernel(lhs.astype(jnp.float32), rhs, BLOCKS, 64, transpose=False)
