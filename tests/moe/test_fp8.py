"""Products in FP8 against float64, and what their backward keeps and computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.experts import group_rows
from moe.fp8 import fp8_grouped_matmul, fp8_matmul
from moe.quantize import COLUMN_TILES, ROW_TILES, SQUARE_TILES, dequantize, quantize


def rounded(x, tile, **kwargs):
    return dequantize(quantize(x, tile, **kwargs), tile)


def relative_error(got, wanted):
    return np.linalg.norm(np.asarray(got, np.float64) - wanted) / np.linalg.norm(wanted)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# Rounding to 3 mantissa bits is an error uniform in +-1/2 ulp: rms 2^-3 / sqrt(12) = 3.6% of the binade's start, 2.6%
# of a value averaged over the binade. Two rounded factors: 3.7%; terms of a sum err independently, so it keeps that
# relative size. x is re-tiled for dw without further error. Measured 3.7% for all three.
PRODUCT_ERROR = 0.042


@pytest.mark.parametrize(("tokens", "k", "n"), [(256, 256, 128), (70, 200, 150)])
def test_products_are_near_float64(tokens, k, n):
    x, w, dy = normal(0, 2, tokens // 2, k), normal(1, k, n), normal(2, 2, tokens // 2, n)
    y, vjp = jax.vjp(fp8_matmul, jnp.asarray(x), jnp.asarray(w))
    dx, dw = vjp(jnp.asarray(dy))
    x, w, dy = (a.astype(np.float64) for a in (x, w, dy))
    for got, wanted in ((y, x @ w), (dx, dy @ w.T), (dw, np.einsum("btk,btn->kn", x, dy))):
        assert relative_error(got, wanted) < PRODUCT_ERROR


def test_an_outlier_costs_its_own_tile_only():
    x, w = normal(0, 64, 512), normal(1, 512, 64)
    x[0, 3] = 1e6
    wanted = (x.astype(np.float64) @ w)[1:]
    assert relative_error(fp8_matmul(jnp.asarray(x), jnp.asarray(w))[1:], wanted) < PRODUCT_ERROR
    one_tile = rounded(jnp.asarray(x), (64, 512))
    assert relative_error((one_tile @ rounded(jnp.asarray(w), SQUARE_TILES))[1:], wanted) > 0.5, "all else became zero"


def test_backward_halves_are_separate_products_in_fp8():
    x, w, dy = (jnp.asarray(normal(i, 256, 256)) for i in range(3))
    dx, dw = jax.vjp(fp8_matmul, x, w)[1](dy)
    # dy is tiled along what each half contracts; float32 sums in another order differ by 1e-6.
    kept = rounded(x, ROW_TILES, power_of_two=True)
    np.testing.assert_allclose(dx, rounded(dy, ROW_TILES) @ rounded(w, SQUARE_TILES).T, rtol=1e-5, atol=1e-4)
    kept = rounded(kept, COLUMN_TILES, power_of_two=True)
    np.testing.assert_allclose(dw, kept.T @ rounded(dy, COLUMN_TILES), rtol=1e-5, atol=1e-4)


def test_x_is_kept_in_fp8_and_weights_as_they_are():
    x, w = jnp.ones((256, 512), jnp.bfloat16), jnp.ones((512, 128), jnp.bfloat16)
    kept = jax.eval_shape(lambda x, w: fp8_matmul.fwd(x, w)[1], x, w)
    assert [a.dtype for a in jax.tree.leaves(kept)] == [jnp.float8_e4m3fn, jnp.float32, jnp.bfloat16]
    dx, dw = jax.eval_shape(lambda x, w: jax.grad(lambda x, w: fp8_matmul(x, w).sum(), (0, 1))(x, w), x, w)
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16)


def grouped_case(counts, block_size, k=160, n=96):
    idx = jnp.repeat(jnp.arange(len(counts), dtype=jnp.int32), jnp.array(counts))[:, None]
    groups = group_rows(idx, len(counts), block_size)
    used = np.asarray(groups.rows.source) < len(idx)
    lhs = np.where(used[:, None], normal(0, len(used), k), 0)
    dy = np.where(used[:, None], normal(2, len(used), n), 0)
    return lhs, normal(1, len(counts), k, n), dy, groups.blocks, used


@pytest.mark.parametrize(("counts", "block_size"), [((40, 0, 7, 100), 16), ((130, 0, 20), 128), ((0, 300), 256)])
def test_grouped_products_are_near_float64(counts, block_size):
    lhs, rhs, dy, blocks, used = grouped_case(counts, block_size)

    @jax.jit
    def run(lhs, rhs, blocks, dy):
        y, vjp = jax.vjp(lambda lhs, rhs: fp8_grouped_matmul(lhs, rhs, blocks, block_size), lhs, rhs)
        return y, *vjp(dy)

    y, dlhs, drhs = run(lhs, rhs, blocks, dy)
    expert = np.repeat(np.repeat(np.arange(len(counts)), blocks), block_size)
    expert = np.pad(expert, (0, len(lhs) - len(expert)))
    each = rhs.astype(np.float64)[expert]
    wanted = np.einsum("tk,tkn->tn", lhs, each), np.einsum("tn,tkn->tk", dy, each)
    assert relative_error(y, wanted[0]) < PRODUCT_ERROR
    assert relative_error(dlhs, wanted[1]) < PRODUCT_ERROR
    assert np.all(np.asarray(y)[~used] == 0)
    assert np.all(np.asarray(dlhs)[~used] == 0)
    for e, count in enumerate(counts):
        rows = used & (expert == e)
        wanted = lhs[rows].astype(np.float64).T @ dy[rows]
        if count:
            # With a handful of rows a sum of few terms errs more than the average.
            assert relative_error(drhs[e], wanted) < PRODUCT_ERROR * 1.2
        else:
            assert np.all(np.asarray(drhs[e]) == 0)


def test_block_size_is_checked():
    lhs, rhs, _, blocks, _ = grouped_case((4, 4), 8)
    with pytest.raises(ValueError, match=r"block_size=200 must be at most 128 or a multiple.*nearest valid is 256"):
        fp8_grouped_matmul(jnp.asarray(lhs), jnp.asarray(rhs), blocks, 200)
