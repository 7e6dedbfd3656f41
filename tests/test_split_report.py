"""The report tells the truth, and what it tells is good: no product twice, no weight gradient in I, little kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from test_split_vjp import assert_equal_to_vjp, layer, layer_params

from dualpipe_jax.residuals import Policy
from dualpipe_jax.split_report import Parts, split_report
from dualpipe_jax.split_vjp import split_vjp
from moe.config import MoEConfig
from moe.layer import init_moe, moe


def test_products_by_hand():
    report = split_report(lambda w, x: jnp.sin(x @ w), jnp.ones((8, 4)), jnp.ones((2, 8)))
    assert report.flops == Parts(2 * 2 * 8 * 4, 2 * 2 * 8 * 4, 2 * 2 * 8 * 4)
    assert (report.flops_whole, report.extra_flops) == ((128, 256), 0)
    # F keeps x w (for cos), and x for W, which I does not read; the cut is dy cos(x w).
    assert (report.bytes_input, report.bytes_weight, report.bytes_cut) == (32, 64, 32)
    convolution = split_report(
        lambda w, x: jax.lax.conv_general_dilated(x, w, (1, 1), "VALID"), jnp.ones((5, 3, 2, 2)), jnp.ones((1, 3, 4, 4))
    )
    assert convolution.flops.forward == 2 * 5 * 3 * 3 * (3 * 2 * 2)


@pytest.mark.parametrize("form", ["unrolled", "scanned", "recomputed"])
def test_a_transformer_stage(form):
    params = [layer_params(k) for k in jax.random.split(jax.random.key(0))]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *params)
    x = jax.random.normal(jax.random.key(1), (2, 8, 16))
    one = jax.checkpoint(layer) if form == "recomputed" else layer

    def stage(params, x):
        return jax.lax.scan(lambda x, p: (one(p, x), None), x, params)[0]

    def unrolled(params, x):
        return layer(params[1], layer(params[0], x))

    report = split_report(*((unrolled, params) if form == "unrolled" else (stage, stacked)), x)
    assert report.weight_share == 1
    assert report.not_split == ()
    assert report.collectives == Parts(0, 0, 0)
    # `jax.vjp` of a recomputed layer also repeats the last product of each layer, which nothing reads.
    assert report.extra_flops <= 0
    assert report.flops.backward_weight == 2 * 2 * 16 * (4 * 16 * 16 + 3 * 16 * 32)


def test_residuals_are_those_of_a_hand_written_layer():
    """Attention and SwiGLU keep x, q, k, v, the attention's weights and output, x in the middle, gate and up: no more.

    In units of one activation [tokens, d], with f = 4 d and as many heads' weights as there are. In between, W waits
    for both normed inputs, the attention's output, the hidden row, and the output gradients of all seven products.
    """
    batch, length, d, f, heads = 2, 16, 32, 128, 4
    params = layer_params(jax.random.key(0), d, f)
    report = split_report(layer, params, jnp.ones((batch, length, d)))
    unit = batch * length * d * 4
    weights = batch * heads * length * length * 4
    by_hand = 6 * unit + 2 * (f // d) * unit + weights
    assert report.bytes_input + report.bytes_weight <= 1.1 * by_hand
    assert report.bytes_weight + report.bytes_cut <= 1.1 * (3 + 3 * (f // d) + 5) * unit


def test_a_gradient_that_the_input_needs_is_named():
    """A weight scaled by a function of the input: the scale's gradient needs the product of the weight's."""

    def f(p, x):
        return x @ (p["w"] * jnp.mean(x, axis=0)[:, None]) @ p["out"]

    params = {"w": jnp.ones((8, 4)), "out": jnp.ones((4, 3))}
    x = jnp.arange(16.0).reshape(2, 8) / 16
    assert_equal_to_vjp(f, params, x)
    report = split_report(f, params, x)
    assert report.not_split == ("['w']",)
    assert report.flops_not_split == 2 * 2 * 8 * 4
    assert 0 < report.weight_share < 1
    assert "['w']" in str(report)


def test_policy():
    """A name alone changes nothing; a stored name is not computed again; what is not cheap is stored."""

    def f(p, x):
        return jnp.exp(checkpoint_name(jnp.sin(x @ p), "sin")) @ p

    p, x = jnp.eye(4) * 0.5, jnp.arange(8.0).reshape(2, 4)
    kept = {}
    for name, policy in {
        "default": Policy(),
        "named": Policy(store=frozenset({"sin"})),
        "nothing is cheap": Policy(cheap=frozenset()),
    }.items():
        split = split_vjp(f, p, x, policy=policy)
        y, _, residuals = split.forward(p, x)
        dx, cut = split.backward_input(p, residuals, jnp.ones_like(y))
        dp = split.backward_weight(p, residuals.weight, cut)
        want = jax.vjp(f, p, x)[1](jnp.ones_like(y))
        np.testing.assert_allclose(dp, want[0], rtol=1e-5)
        np.testing.assert_allclose(dx, want[1], rtol=1e-5)
        stored = [*residuals.input, *residuals.weight]
        kept[name] = (any(bool(jnp.array_equal(r, jnp.sin(x @ p))) for r in stored), len(stored))
    assert kept["default"] == (False, 2)
    assert kept["named"][0]
    assert kept["nothing is cheap"][1] > kept["default"][1]


def test_a_stage_of_experts():
    """Under an expert axis: all-to-alls in F and I, none in W; loops of unknown length are said to be uncounted."""
    config = MoEConfig(d_ff=8, num_experts=4, top_k=2, block_size=4)
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    reports = []

    def body(x):
        params = init_moe(jax.random.key(0), 8, config)
        params["experts"] = jax.tree.map(lambda a: a[:1], params["experts"])
        reports.append(split_report(lambda p, x: moe(p, x, config, "ep")[0], params, x))
        return x

    jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)).lower(
        jnp.ones((4, 4, 8))
    )
    (report,) = reports
    assert report.collectives.backward_weight == 0
    assert report.collectives.forward == report.collectives.backward_input == 2
    assert report.not_split == ()
    assert report.extra_flops <= 0
    assert "while" in report.uncounted
