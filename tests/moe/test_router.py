"""The router against the values of public bug reports and a plain Python selection."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.config import MoEConfig
from moe.router import Routing, expert_counts, route, sequence_balance_loss, update_bias, z_loss

routed = jax.jit(route, static_argnums=3)
balance_loss = jax.jit(sequence_balance_loss, static_argnums=1)
ROUNDING = 1e-6  # relative, of a few float32 operations
SIGMOID = MoEConfig(num_experts=4, scoring="sigmoid")


def route_logits(logits, config, bias=None):
    """Route tokens that have these logits."""
    logits = jnp.asarray(logits, jnp.float32)
    bias = np.zeros(config.num_experts) if bias is None else bias
    return routed(np.eye(logits.shape[0], dtype=np.float32), logits, jnp.asarray(bias, jnp.float32), config)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def logit(score):
    return np.log(score) - np.log1p(-np.asarray(score))


def test_bias_chooses_and_scores_weight():
    """Case 13: sigmoid scores .9 .8 .1 .2 with bias 0 0 1 1."""
    routing = route_logits([logit([0.9, 0.8, 0.1, 0.2])], SIGMOID, [0.0, 0.0, 1.0, 1.0])
    assert routing.topk_idx.tolist() == [[3, 2]]
    np.testing.assert_allclose(routing.topk_weights, [[2 / 3, 1 / 3]], rtol=ROUNDING)
    np.testing.assert_allclose(routing.scores, [[0.9, 0.8, 0.1, 0.2]], rtol=ROUNDING)


def test_tiny_scores_give_finite_weights():
    """Case 13: scores near 1e-8, chosen by a bias of 12."""
    routing = route_logits([logit([0.9, 0.8, 1e-8, 3e-8])], SIGMOID, [0.0, 0.0, 12.0, 12.0])
    weights = dict(zip(routing.topk_idx[0].tolist(), routing.topk_weights[0].tolist(), strict=True))
    # float32 keeps seven digits of the logit 18.4, so five of the score
    assert weights == {2: pytest.approx(0.25, rel=1e-5), 3: pytest.approx(0.75, rel=1e-5)}


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_scores_below_float32_give_the_right_weights_and_gradients(scoring):
    """The kind of case 13: both chosen scores underflow to zero, their quotient is still e to 1."""
    config = dataclasses.replace(SIGMOID, scoring=scoring)
    logits = jnp.array([[0.0, 0.0, -200.0, -201.0]])
    bias = [0.0, 0.0, 12.0, 12.0]

    def value(logits):
        routing = route_logits(logits, config, bias)
        return routing.topk_weights[0, 0], routing

    (_, routing), grad = jax.value_and_grad(value, has_aux=True)(logits)
    assert routing.topk_idx.tolist() == [[2, 3]]
    assert not np.any(routing.scores[0, 2:])
    weight = np.e / (1 + np.e)
    np.testing.assert_allclose(routing.topk_weights, [[weight, 1 - weight]], rtol=ROUNDING)
    slope = weight * (1 - weight)
    np.testing.assert_allclose(grad, [[0.0, 0.0, slope, -slope]], atol=ROUNDING)


def test_a_token_without_any_score_has_a_finite_balance_loss():
    loss, grad = jax.value_and_grad(lambda logits: balance_loss(route_logits(logits, SIGMOID), 1))(
        jnp.full((1, 4), -200.0)
    )
    assert np.isfinite(loss)
    assert np.all(np.isfinite(grad))


def test_a_starved_expert_reaches_a_bias_of_one():
    """Case 15: 1,000 steps of 0.001, where bfloat16 would stop at 0.5; a bfloat16 bias comes back in float32."""
    counts = jnp.array([0, 20, 10, 10])
    bias = jax.jit(lambda b: jax.lax.fori_loop(0, 1000, lambda _, b: update_bias(b, counts, 1e-3), b))(jnp.zeros(4))
    np.testing.assert_allclose(bias, [1.0, -1.0, 0.0, 0.0], atol=1e-4)  # 1,000 roundings of 6e-8
    assert update_bias(bias.astype(jnp.bfloat16), counts, 1e-3).dtype == jnp.float32


def test_even_load_leaves_the_bias_alone():
    bias = jnp.array([0.5, -0.25, 0.0])
    assert update_bias(bias, jnp.array([7, 7, 7]), 1e-3).tolist() == bias.tolist()


def test_low_precision_tokens_are_routed_in_float32():
    """Case 16: logits 1.000 .. 1.003 would be equal in bfloat16."""
    weight = jnp.array([[1.000, 1.001, 1.002, 1.003]])
    assert len(set(weight.astype(jnp.bfloat16).tolist()[0])) == 1
    routing = route(jnp.ones((1, 1), jnp.bfloat16), weight, jnp.zeros(4), SIGMOID)
    assert routing.topk_idx.tolist() == [[3, 2]]
    assert {routing.topk_weights.dtype, routing.scores.dtype, routing.logits.dtype} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_of_equal_scores_the_lower_index_wins(top_k):
    """Case 16."""
    config = dataclasses.replace(SIGMOID, top_k=top_k)
    assert route_logits(np.zeros((3, 4)), config).topk_idx.tolist() == [list(range(top_k))] * 3


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_one_unnormalised_expert_teaches_the_router(scoring):
    """Case 18: the router's gradient is not zero."""
    config = MoEConfig(num_experts=4, top_k=1, normalize_weights=False, scoring=scoring)
    grad = jax.grad(lambda logits: jnp.sum(route_logits(logits, config).topk_weights))(
        jnp.array([[0.3, 0.1, 0.2, 0.0]])
    )
    assert float(grad[0, 0]) > 0.1


def test_no_gradient_through_the_bias():
    grad = jax.grad(lambda bias: jnp.sum(route_logits(jnp.ones((2, 4)), SIGMOID, bias).topk_weights ** 2))
    assert not np.any(grad(jnp.array([0.1, 0.2, 0.3, 0.4])))


def test_excluded_groups_cannot_win():
    """Even where all eligible scores are negative, so that a mask of zeros would beat them."""
    config = dataclasses.replace(SIGMOID, num_groups=2, top_groups=1)
    routing = route_logits([logit([0.6, 0.5, 0.9, 0.1])], config, [-10.0] * 4)
    assert routing.topk_idx.tolist() == [[0, 1]]  # .6 + .5 beats .9 + .1


def test_groups_are_ranked_by_their_two_best():
    config = MoEConfig(num_experts=6, top_k=1, num_groups=2, normalize_weights=False, scoring="sigmoid")
    routing = route_logits([logit([0.5, 0.5, 0.5, 0.9, 0.2, 0.2])], config)
    assert routing.topk_idx.tolist() == [[3]]  # .9 + .2 beats .5 + .5; the sum of all three would not


def select(biased, config):
    """Experts of one token, by Python's stable sort."""
    size = config.num_experts // config.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config.num_groups)]

    def worth(group):
        return np.sum(sorted((biased[e] for e in group), reverse=True)[:2], dtype=np.float32)

    eligible = [e for group in sorted(groups, key=worth, reverse=True)[: config.top_groups] for e in group]
    return sorted(sorted(eligible), key=lambda e: -biased[e])[: config.top_k]


# Few distinct values, so that ties are frequent.
TOKENS = st.lists(st.lists(st.integers(-3, 3), min_size=8, max_size=8), min_size=4, max_size=4)
BIAS = st.lists(st.sampled_from([-20.0, -0.25, 0.0, 0.5]), min_size=8, max_size=8)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@settings(max_examples=40, deadline=None)
@given(logits=TOKENS, bias=BIAS)
def test_selects_as_a_stable_sort_does(scoring, groups, logits, bias):
    config = MoEConfig(top_k=3, scoring=scoring, num_groups=groups[0], top_groups=groups[1], route_scale=2.5)
    routing = route_logits(logits, config, bias)
    scores = np.asarray(routing.scores)
    biased = scores + np.asarray(bias, np.float32)
    assert routing.topk_idx.tolist() == [select(row, config) for row in biased]
    np.testing.assert_allclose(np.sum(routing.topk_weights, axis=-1), 2.5, rtol=ROUNDING)
    chosen = np.take_along_axis(scores, np.asarray(routing.topk_idx), axis=-1)
    np.testing.assert_allclose(routing.topk_weights, 2.5 * chosen / chosen.sum(axis=-1, keepdims=True), rtol=ROUNDING)


def routing_of(logits, top_k=2):
    return route_logits(logits, MoEConfig(num_experts=logits.shape[-1], top_k=top_k))


def test_even_routing_has_a_balance_loss_of_one_a_sequence():
    """Whatever the scores are: even counts make the loss a sum of shares."""
    idx = np.arange(3 * 4 * 2).reshape(12, 2) % 8
    scores = np.abs(normal(0, 12, 8))
    routing = Routing(idx, np.ones((12, 2), np.float32), scores, scores)
    np.testing.assert_allclose(balance_loss(routing, 3), 3.0, rtol=ROUNDING)


def test_one_expert_for_all_has_a_balance_loss_of_their_number():
    routing = routing_of(np.float32([[0, 0, 0, 0, 0, 100, 0, 0]] * 6), top_k=1)
    np.testing.assert_allclose(balance_loss(routing, 2), 2 * 8.0, rtol=ROUNDING)


def test_losses_do_not_depend_on_how_the_batch_is_cut():
    """Sums over sequences and tokens, in value and gradient: one batch of six sequences, or two of three."""

    @jax.jit
    def losses(logits):
        def both(logits):
            routing = routing_of(logits)
            return jnp.stack([sequence_balance_loss(routing, logits.shape[0] // 5), z_loss(routing)])

        return both(logits), jax.jacobian(both)(logits)

    logits = 2 * normal(1, 6 * 5, 8)
    whole, whole_grad = losses(logits)
    parts = [losses(part) for part in (logits[:15], logits[15:])]
    np.testing.assert_allclose(sum(np.asarray(v) for v, _ in parts), whole, rtol=ROUNDING)
    np.testing.assert_allclose(np.concatenate([g for _, g in parts], axis=1), whole_grad, rtol=0, atol=2e-6)  # of 3
    assert np.all(np.max(np.abs(whole_grad), axis=(1, 2)) > 1e-3)


def test_losses_against_their_formulas():
    """In float64 (DeepSeek-V3, section 2.1.2; ST-MoE, section 3)."""
    logits = normal(2, 2 * 5, 8)
    routing = routing_of(logits, top_k=3)
    exact = np.asarray(logits, np.float64).reshape(2, 5, 8)
    share = np.exp(exact) / np.exp(exact).sum(axis=-1, keepdims=True)
    counts = np.stack(
        [np.bincount(idx.reshape(-1), minlength=8) for idx in np.asarray(routing.topk_idx).reshape(2, 5, 3)]
    )
    balance = np.sum(counts * 8 / (3 * 5) * share.mean(axis=1))
    np.testing.assert_allclose(balance_loss(routing, 2), balance, rtol=ROUNDING)
    np.testing.assert_allclose(z_loss(routing), np.sum(np.log(np.exp(exact).sum(axis=-1)) ** 2), rtol=ROUNDING)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 7), min_size=2, max_size=2), min_size=6, max_size=6))
def test_counts_are_a_histogram(idx):
    counts = expert_counts(jnp.array(idx), 8)
    assert counts.tolist() == np.bincount(np.ravel(idx), minlength=8).tolist()
    assert counts.dtype == jnp.int32
