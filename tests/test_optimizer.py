"""Clipping, decay, learning rate, and where the optimizer's state is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from dualpipe_jax.config import OptimizerConfig
from dualpipe_jax.executor import make_mesh
from dualpipe_jax.optimizer import apply_gradients, decayed, learning_rate_schedule, make_optimizer, zero1_spec


def test_global_norm_over_stages():
    """Case 23: stage norms 3, 4, 12 and max_norm 1: norm 13, every stage scaled by 1/13."""
    grads = [{"w": jnp.array([n, 0.0])} for n in (3.0, 4.0, 12.0)]
    assert float(optax.tree.norm(grads)) == 13.0
    clip = optax.clip_by_global_norm(1.0)
    clipped, _ = clip.update(grads, clip.init(grads))
    for got, want in zip(clipped, grads, strict=True):
        np.testing.assert_allclose(got["w"], want["w"] / 13.0, rtol=1e-6)  # one division in float32


def test_what_decays():
    params = {
        "embedding": {"table": 0},
        "layers": [{"norm": {"scale": 0}, "attention": {"qkv": 0}, "moe": {"router": {"weight": 0, "bias": 0}}}],
    }
    assert decayed(params) == {
        "embedding": {"table": False},
        "layers": [
            {"norm": {"scale": False}, "attention": {"qkv": True}, "moe": {"router": {"weight": True, "bias": False}}}
        ],
    }


def test_a_zero_gradient_moves_only_decayed_leaves():
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.5)
    params = {"scale": jnp.ones(2), "w": jnp.ones(2)}
    optimizer = make_optimizer(config, steps=10)
    moved, _ = apply_gradients(optimizer, jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    np.testing.assert_array_equal(moved["scale"], 1.0)
    np.testing.assert_allclose(moved["w"], 1.0 - 0.1 * 0.5, rtol=1e-6)  # float32


def test_learning_rate():
    """Case 33's schedule: warm-up of 10 steps to 1e-3."""
    rate = learning_rate_schedule(OptimizerConfig(learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=10), 20)
    assert float(rate(0)) == 0.0
    assert float(rate(5)) == pytest.approx(5e-4)
    assert float(rate(10)) == pytest.approx(1e-3)
    assert float(rate(20)) == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("shape", "spec", "expected"),
    [
        ((2, 8, 6), P("pp"), P("pp", ("dp", "ep"), None)),  # 8 = the most ways, on the longest dim that divides
        ((2, 4, 8, 6), P("pp", "ep"), P("pp", "ep", ("dp",), None)),  # experts: over dp only
        ((16, 6), P(), P(("pp", "dp", "ep"), None)),  # shared: over everything
        ((2, 3), P("pp"), P("pp", None)),  # nothing divides
        ((), P(), P()),
    ],
)
def test_zero1(shape, spec, expected):
    assert zero1_spec(shape, spec, make_mesh(2, 2, 2)) == expected
