"""Grouped matmul kernels in FP8, interpreted, against products of the same FP8 values in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_interpreter import interpreted, needs_transposed_references

from moe.kernels import fp8_grouped_matmul as module
from moe.quantize import COLUMN_TILES, ROW_TILES, SQUARE_TILES, dequantize, quantize

BLOCK, EXPERTS, K, N = 128, 3, 256, 128
BLOCKS = jnp.array([2, 0, 1], jnp.int32)  # an expert without rows, and a block without an expert
EXPERT_OF_ROW = np.repeat([0, 0, 2], BLOCK)
SMS = 2


def case():
    random = np.random.default_rng(0)
    used = np.arange(4 * BLOCK) < 3 * BLOCK - 5
    # Tiles of very different sizes, so that a scale in the wrong place is seen.
    sizes = np.exp(3 * random.standard_normal((4, 1)).repeat(BLOCK, 0))
    lhs, g = (np.where(used[:, None], random.standard_normal((len(used), w)) * sizes, 0) for w in (K, N))
    rhs = random.standard_normal((EXPERTS, K, N)) * np.exp(3 * random.standard_normal((EXPERTS, 2, 1))).repeat(128, 1)
    return [jnp.asarray(a, jnp.float32) for a in (lhs, rhs, g)]


def float64(q, tile):
    return np.asarray(dequantize(q, tile), np.float64)


def close(got, wanted):
    # Float32 sums of products that are exact; terms are larger than the sums, by far less than 100 times.
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@needs_transposed_references
@pytest.mark.parametrize("transpose", [False, True])
def test_rows_times_matrices(transpose):
    lhs, rhs, g = case()
    rows, matrices = quantize(g if transpose else lhs, ROW_TILES), quantize(rhs, SQUARE_TILES)
    static = {"block_size": BLOCK, "transpose": transpose, "dtype": jnp.float32, "num_sms": SMS}
    got = np.asarray(interpreted(module.rows_times_kernel, rows, matrices, BLOCKS, **static))
    each = float64(matrices, SQUARE_TILES)[EXPERT_OF_ROW]
    equation = "tn,tkn->tk" if transpose else "tk,tkn->tn"
    close(got[: 3 * BLOCK], np.einsum(equation, float64(rows, ROW_TILES)[: 3 * BLOCK], each))
    assert np.all(got[3 * BLOCK - 5 :] == 0), "empty places and rows beyond the last block"


@needs_transposed_references
def test_weight_gradient():
    lhs, _, g = case()
    lhs, g = quantize(lhs, COLUMN_TILES, power_of_two=True), quantize(g, COLUMN_TILES)
    got = np.asarray(interpreted(module.weight_gradient_kernel, lhs, g, BLOCKS, block_size=BLOCK, num_sms=SMS))
    wide = float64(lhs, COLUMN_TILES)[: 3 * BLOCK], float64(g, COLUMN_TILES)[: 3 * BLOCK]
    for e in range(EXPERTS):
        rows = e == EXPERT_OF_ROW
        close(got[e], wide[0][rows].T @ wide[1][rows])
    assert np.all(got[1] == 0), "an expert without rows"


def test_what_does_not_fit_is_said():
    assert module.fits(512, 256, 256, 128, 128)
    assert not module.fits(512, 256, 256, 128, 64)
    lhs, rhs, _ = case()
    rows, matrices = quantize(lhs, ROW_TILES), quantize(rhs, SQUARE_TILES)
    with pytest.raises(ValueError, match="block_size=64 must be a multiple of 128; the nearest valid is 128"):
        module.rows_times_kernel(rows, matrices, BLOCKS, 64, transpose=False)
