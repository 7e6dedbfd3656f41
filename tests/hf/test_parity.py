"""The same numbers as Hugging Face transformers: logits, losses, chosen experts, gradients; see tests/data/hf."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_cases import (
    CASES,
    DATA,
    GRADIENT,
    LOGITS,
    LOSS,
    VARIANTS,
    assert_gradients,
    batch_of,
    config_of,
    logits_of,
    model_of,
    params_of,
    pipelined,
    tensors,
    unpipelined,
)

from dualpipe_jax.hf import model_config
from dualpipe_jax.model.attention import Attention
from dualpipe_jax.model.block import DenseBlock
from dualpipe_jax.model.definition import Definition
from dualpipe_jax.model.layers import Embedding, RMSNorm
from dualpipe_jax.model.mla import LatentAttention
from moe.router import route


def losses(logits, inputs):
    """(loss_hf, loss_plain) in numpy, float64: independent of the model's own loss."""
    wide = logits.astype(np.float64)
    nll = np.log(np.exp(wide).sum(-1)) - np.take_along_axis(wide, inputs["targets"][..., None], -1)[..., 0]
    mask = inputs["loss_mask"]
    return (nll * mask).sum() / mask.sum(), nll.mean()


# The others have nothing that these and `test_dualpipe` lack, or it shows in the logits; each compiles for seconds.
QUICK = ["deepseek_v3_bias", "deepseek_v3_no_q_lora", "qwen3_moe_tiny"]


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_loss_and_gradients(case):
    want = tensors(case, "expected")
    loss, grads, counts = unpipelined(case)
    assert abs(float(loss) - want["loss_hf"]) <= LOSS
    assert_gradients(config_of(case), grads, case)
    norm = np.sqrt(sum(float(np.sum(np.square(np.asarray(g, np.float64)))) for g in jax.tree.leaves(grads)))
    assert norm == pytest.approx(float(want["grad_norm"]), rel=1e-5)  # what the tensors may differ by, averaged
    layers = sorted(int(k.split(".")[1]) for k in want if k.endswith("topk_ids"))
    for ours, layer in zip(counts, layers, strict=True):
        theirs = np.bincount(want[f"moe.{layer}.topk_ids"].ravel(), minlength=len(ours))
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("case", CASES)
def test_logits(case):
    inputs, want = tensors(case, "inputs"), tensors(case, "expected")
    got = np.asarray(logits_of(model_of(config_of(case)), params_of(case), inputs["input_ids"]))
    np.testing.assert_allclose(got, want["logits"], rtol=0, atol=LOGITS)
    assert losses(got, inputs) == pytest.approx((float(want["loss_hf"]), float(want["loss_plain"])), abs=LOSS)


@pytest.mark.parametrize(("case", "variant"), VARIANTS)
def test_variants(case, variant):
    inputs, want = tensors(case, "inputs"), tensors(case, "variants")
    got = np.asarray(logits_of(model_of(config_of(case, variant)), params_of(case), inputs["input_ids"]))
    np.testing.assert_allclose(got, want[f"{variant}.logits"], rtol=0, atol=LOGITS)
    theirs = float(want[f"{variant}.loss_hf"]), float(want[f"{variant}.loss_plain"])
    assert losses(got, inputs) == pytest.approx(theirs, abs=LOSS)
    base = np.asarray(logits_of(model_of(config_of(case)), params_of(case), inputs["input_ids"]))
    assert np.abs(base - got).max() > 1e-2, "the variant changes nothing, and tests nothing"


@pytest.mark.parametrize("case", CASES)
def test_chosen_experts(case):
    """Expert ids are exact, their weights within 1e-5 (float32 sigmoid and quotient, and the layers before)."""
    config, params, want = config_of(case), params_of(case), tensors(case, "expected")
    routings = jax.jit(lambda p, t: routings_of(config, p, t))(params, tensors(case, "inputs")["input_ids"])
    assert len(routings) == config.num_layers - config.num_dense_layers
    for layer, routing in enumerate(routings, config.num_dense_layers):
        ids = np.asarray(routing.topk_idx)
        order = np.argsort(ids, axis=-1)
        np.testing.assert_array_equal(np.take_along_axis(ids, order, -1), want[f"moe.{layer}.topk_ids"])
        weights = np.take_along_axis(np.asarray(routing.topk_weights), order, -1)
        np.testing.assert_allclose(weights, want[f"moe.{layer}.topk_weights"], rtol=0, atol=1e-5)


def routings_of(config, params, tokens):
    """What each layer's router decides, with the parts of a layer called one by one."""
    x, found = Definition(Embedding, config).apply(params["embedding"], tokens), []
    for layer in params["dense"]:
        x = Definition(DenseBlock, config).apply(layer, x)
    trunk = model_of(config).trunk
    for layer in params["layers"]:
        normed = norm(config, layer["attention_norm"], x)
        attention = Definition(LatentAttention if config.mla else Attention, config)
        h = norm(config, layer["ffn_norm"], x + attention.apply(layer["attention"], normed))
        router = layer["moe"]["router"]
        found.append(route(h.reshape(-1, config.d_model), router["weight"], router["bias"], config.moe))
        x, _ = trunk.apply(layer, x)
    return found


def norm(config, params, x):
    definition = Definition(lambda c, rngs: RMSNorm(c.d_model, c.norm_eps, rngs=rngs), config)
    return definition.apply(params, x)


def test_published_style_of_config():
    """Older keys (`rope_theta` + `rope_scaling`, `scoring_func`, ...) mean the same model."""
    legacy = json.loads((DATA / "deepseek_v3_yarn" / "config.hub_legacy.json").read_text())
    assert model_config(legacy) == config_of("deepseek_v3_yarn")


def test_experts_without_a_token_have_no_gradient():
    _, grads, counts = unpipelined("deepseek_v3_bias")
    empty = [(layer, int(e)) for layer in range(2) for e in np.flatnonzero(counts[layer] == 0)]
    assert empty == [(0, 4), (0, 9), (1, 5)]
    for layer, expert in empty:
        assert not np.any(grads["layers"][layer]["moe"]["experts"]["gate_up"][expert])
        assert not np.any(grads["layers"][layer]["moe"]["experts"]["down"][expert])


def test_a_document_in_a_packed_row_is_as_if_alone():
    """Two documents in one row give the logits of each in a row of its own."""
    case = "deepseek_v3_yarn"
    model, params = model_of(config_of(case)), params_of(case)
    tokens = jnp.asarray(tensors(case, "inputs")["input_ids"])
    packed = jnp.concatenate([tokens[0, :10], tokens[1, :14]])[None]
    segments = jnp.asarray([[7] * 10 + [3] * 14], jnp.int32)
    together = np.asarray(logits_of(model, params, packed, segments))[0]
    alone = np.asarray(logits_of(model, params, tokens))
    np.testing.assert_allclose(together[:10], alone[0, :10], rtol=0, atol=LOGITS)
    np.testing.assert_allclose(together[10:], alone[1, :14], rtol=0, atol=LOGITS)
    mixed = np.asarray(logits_of(model, params, packed))[0]
    assert np.abs(mixed[10:] - alone[1, :14]).max() > 0.1, "without segments the documents see each other"


def check_pipelined(case, *args, **options):
    loss, grads = pipelined(case, *args, **options)
    assert abs(float(loss) - tensors(case, "expected")["loss_hf"]) <= LOSS
    assert_gradients(config_of(case), grads, case)


def test_dualpipe():
    check_pipelined("deepseek_v3_basic", "dualpipe", 2, 4, 2)


# Four layers: as many stages as that, at most.
PIPELINES = [
    ("1f1b", 2, 3),
    ("1f1b", 4, 4),
    ("dualpipe", 2, 4),
    ("dualpipe", 4, 8),
    ("dualpipe_v", 2, 4),
    ("zb_h1", 2, 4),
    ("zb_h1", 4, 8),
    ("zb_v", 2, 4),
]


def grid():
    """One case under every pipeline, and the others under two each, in turn: all 48 take a quarter of an hour."""
    turn = itertools.cycle(PIPELINES)
    for case in CASES:
        count = len(PIPELINES) if case == "deepseek_v3_bias" else 2
        yield from ((case, *next(turn)) for _ in range(count))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name", "pp", "microbatches"), list(grid()))
def test_pipelines(case, name, pp, microbatches):
    check_pipelined(case, name, pp, microbatches, 2)


def test_tolerances_are_those_of_the_data():
    assert (LOGITS, LOSS, GRADIENT) == (5e-5, 1e-5, 5e-5)
    assert batch_of("deepseek_v3_bias")["weights"].sum() == pytest.approx(1)
