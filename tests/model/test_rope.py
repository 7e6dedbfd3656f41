"""Rotary positions and latent attention against plain numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax.config import LatentAttentionConfig, ModelConfig, YarnConfig
from dualpipe_jax.model.attention import Attention, attend
from dualpipe_jax.model.block import DenseBlock
from dualpipe_jax.model.definition import Definition
from dualpipe_jax.model.mla import LatentAttention
from dualpipe_jax.model.packing import packing_of
from dualpipe_jax.model.rope import rotary_table, rotate, softmax_factor, unstretched_share

YARN = YarnConfig(4.0, 16, beta_fast=2.0, beta_slow=0.125, mscale=1.0, mscale_all_dim=1.0)
MLA = LatentAttentionConfig(q_lora_rank=6, kv_lora_rank=5, qk_nope_dim=4, qk_rope_dim=4, v_dim=3)
CONFIG = ModelConfig(vocab_size=11, d_model=12, num_heads=2, num_kv_heads=1, d_ff=8, moe=None)
KEY = jax.random.key(0)
ROUNDING = 1e-5  # float32 sums of a dozen products of size one


def positions(length):
    return jnp.arange(length, dtype=jnp.int32)[None]


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_are_turned_by_their_angle(interleaved):
    x = np.random.default_rng(0).standard_normal((1, 5, 1, 6)).astype(np.float32)
    got = np.asarray(rotate(jnp.asarray(x), rotary_table(positions(5), 6, 100.0), interleaved=interleaved))[0, :, 0]
    for t in range(5):
        for i in range(3):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 3)
            turned = complex(x[0, t, 0, a], x[0, t, 0, b]) * np.exp(1j * t * 100.0 ** (-2 * i / 6))
            assert (got[t, i], got[t, i + 3]) == pytest.approx((turned.real, turned.imag), abs=ROUNDING)


def test_products_depend_on_the_distance_only():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def product(i, j):
        tables = [rotary_table(jnp.full((1, 1), t, jnp.int32), 8, 1e4, YARN) for t in (i, j)]
        return float(jnp.sum(rotate(q, tables[0], interleaved=True) * rotate(k, tables[1], interleaved=True)))

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)  # angles of 100 have 1e-5 of rounding
    assert abs(product(9, 4) - product(9, 5)) > 1e-3


def test_yarn_frequencies_and_scales():
    table = rotary_table(jnp.asarray([[1]], jnp.int32), 8, 1e4, YARN)
    np.testing.assert_allclose(np.asarray(table.sin)[0, 0], np.sin([1, 0.0625, 0.0025, 0.00025]), rtol=1e-6)
    assert softmax_factor(YARN) * 24**-0.5 == pytest.approx(0.264642, abs=1e-6)
    assert softmax_factor(dataclasses.replace(YARN, mscale_all_dim=0.5)) * 24**-0.5 == pytest.approx(0.233402, abs=1e-6)
    assert softmax_factor(dataclasses.replace(YARN, mscale_all_dim=0.0)) == softmax_factor(None) == 1.0


def test_yarn_ramp_may_be_a_step():
    """Both bounds at one pair: it and those before keep their frequency."""
    yarn = YarnConfig(2.0, 4096, beta_fast=2000.0, beta_slow=1900.0)
    assert unstretched_share(8, 1e4, yarn).tolist() == [0.0 if i > 0 else 1.0 for i in range(4)]


def softmax(scores):
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("width", [3, 4, 7])
def test_attention_with_values_of_another_width(width):
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, 5, h, w)).astype(np.float32) for h, w in ((4, 4), (2, 4), (2, width)))
    got = attend(*(jnp.asarray(a) for a in (q, k, v)), 0.3, None)
    for head in range(4):
        scores = 0.3 * q[0, :, head] @ k[0, :, head // 2].T
        want = softmax(np.where(np.tri(5) > 0, scores, -np.inf)) @ v[0, :, head // 2]
        np.testing.assert_allclose(np.asarray(got)[0, :, head], want, atol=ROUNDING)


def test_latent_attention_by_hand():
    """Equal positions (a row of one token): what is left is the value's way through the latent vector."""
    config = dataclasses.replace(CONFIG, mla=MLA)
    definition = Definition(LatentAttention, config)
    p = jax.tree.map(np.asarray, jax.jit(definition.init)(KEY))
    x = np.random.default_rng(3).standard_normal((1, 1, 12)).astype(np.float32)
    latent = (x[0] @ p["kv_down"])[:, :5]
    normed = latent / np.sqrt(np.mean(latent**2) + 1e-6)
    v = (normed @ p["kv_up"]).reshape(2, 7)[:, 4:].reshape(1, -1)
    got = jax.jit(definition.apply)(p, x)
    np.testing.assert_allclose(np.asarray(got)[0], v @ p["out"], atol=ROUNDING)


KINDS = {
    "grouped": CONFIG,
    "norms": dataclasses.replace(CONFIG, head_dim=4, qk_norm=True),
    "latent": dataclasses.replace(CONFIG, mla=MLA, yarn=YARN),
    "latent, no q": dataclasses.replace(CONFIG, mla=dataclasses.replace(MLA, q_lora_rank=None)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_sees_only_those_before_it_in_its_document(kind):
    """Row i + 1 is row 0 with another token i: its output changes where that token is seen."""
    block = Definition(DenseBlock, KINDS[kind])
    params = jax.jit(block.init)(KEY)
    segments = jnp.tile(jnp.asarray([[5, 5, 5, 2, 2, 2, 2, 0]], jnp.int32), (9, 1))
    x = np.tile(np.random.default_rng(4).standard_normal((1, 8, 12)).astype(np.float32), (9, 1, 1))
    x[np.arange(1, 9), np.arange(8)] += np.linspace(-1, 1, 12, dtype=np.float32)
    y = np.asarray(jax.jit(lambda p, x, s: block.apply(p, x, packing_of({"segments": s})))(params, x, segments))
    changes = np.abs(y[1:] - y[0]).max(-1)  # [token changed, token that sees it]
    sees = changes.T > 1e-5  # rounding of rows that should be equal is below, a seen token moves the output by more
    document = np.array([0, 0, 0, 1, 1, 1, 1, 2])
    np.testing.assert_array_equal(sees, (np.tri(8) > 0) & (document[:, None] == document[None]))


def test_segments_that_come_again_are_other_documents():
    packing = packing_of({"segments": jnp.asarray([[1, 1, 2, 2, 2, 1], [0, 0, 0, 0, 0, 0]], jnp.int32)})
    assert packing.segment.tolist() == [[1, 1, 2, 2, 2, 3], [1] * 6]
    assert packing.position.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    assert packing_of({"tokens": None}) is None


def test_the_default_attention_has_the_parameters_it_had():
    shapes = jax.tree.map(jnp.shape, Definition(Attention, ModelConfig()).init(KEY))
    assert shapes == {"qkv": (128, 256), "out": (128, 128)}


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_stays_bfloat16(kind):
    block = Definition(DenseBlock, KINDS[kind])
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), jax.eval_shape(block.init, KEY))
    assert jax.eval_shape(block.apply, params, jax.ShapeDtypeStruct((1, 4, 12), jnp.bfloat16)).dtype == jnp.bfloat16
