"""Which experts a token goes to, and with what weight. Float32 throughout, whatever the model computes in.

Shapes: T tokens, D model width, E experts, k chosen.

References:
    DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 2.1.2 (gating, aux-loss-free balancing, sequence-wise
    loss). Zoph et al., ST-MoE, 2022, section 3 (z-loss).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

from moe.config import MoEConfig

_TINY = 1e-18  # keeps a sum of underflown scores from dividing by zero; its square is still a float32


class Routing(NamedTuple):
    """The router's decision.

    Attributes:
        topk_idx: chosen experts, best first; -1 for a token that goes nowhere. topk_weights: their weights.
        scores: of all experts, unbiased. logits: before scoring.
    """

    topk_idx: Int32[Array, "T k"]
    topk_weights: Float[Array, "T k"]
    scores: Float[Array, "T E"]
    logits: Float[Array, "T E"]


def route(x: Float[Array, "T D"], weight: Float[Array, "D E"], bias: Float[Array, " E"], config: MoEConfig) -> Routing:
    """Choose top_k experts by score + bias, weight them by score alone.

    With groups, experts outside the best `top_groups` groups cannot win, whatever their scores; a group is as good as
    the sum of its two best biased scores. Of equal scores the lower expert index wins. No gradient flows through the
    choice or the bias. Weights are normalised as a softmax of log scores: the same quotient, but right for any scores,
    those too small for float32 included.
    """
    # Not the default precision: on accelerators it would round float32 inputs to fewer bits, and ties would appear.
    logits = jnp.matmul(x.astype(jnp.float32), weight.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    sigmoid = config.scoring == "sigmoid"
    scores = jax.nn.sigmoid(logits) if sigmoid else jax.nn.softmax(logits, axis=-1)
    biased = jax.lax.stop_gradient(scores + bias.astype(jnp.float32)[None, :])
    if config.num_groups > 1:
        biased = _mask_groups(biased, config.num_groups, config.top_groups)
    topk_idx = jax.lax.top_k(biased, config.top_k)[1].astype(jnp.int32)
    if config.normalize_weights:
        chosen = jnp.take_along_axis(logits, topk_idx, axis=-1)
        weights = jax.nn.softmax(jax.nn.log_sigmoid(chosen) if sigmoid else chosen, axis=-1)
    else:
        weights = jnp.take_along_axis(scores, topk_idx, axis=-1)
    return Routing(topk_idx, weights * config.route_scale, scores, logits)


def _mask_groups(biased: Float[Array, "T E"], num_groups: int, top_groups: int) -> Float[Array, "T E"]:
    grouped = biased.reshape(biased.shape[0], num_groups, -1)
    best_two = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
    chosen = jax.lax.top_k(best_two, top_groups)[1]
    keep = jnp.any(chosen[:, :, None] == jnp.arange(num_groups)[None, None, :], axis=1)
    return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(biased.shape)


def mask_routing(routing: Routing, valid: Bool[Array, " T"]) -> Routing:
    """The routing with no expert (-1) and no weight for tokens that are not valid; the losses then leave them out."""
    keep = valid[:, None]
    return routing._replace(
        topk_idx=jnp.where(keep, routing.topk_idx, -1), topk_weights=jnp.where(keep, routing.topk_weights, 0)
    )


def expert_counts(topk_idx: Int[Array, "T k"], num_experts: int) -> Int32[Array, " E"]:
    """How many assignments each expert got."""
    return jnp.sum(topk_idx.reshape(-1)[:, None] == jnp.arange(num_experts)[None, :], axis=0, dtype=jnp.int32)


def sequence_balance_loss(routing: Routing, num_sequences: int) -> Float[Array, ""]:
    """Sum over sequences of sum_i f_i P_i, to be divided by the number of sequences of the whole batch.

    f_i = E / (k S) times the assignments of expert i in the sequence (no gradient), P_i the mean over its S valid
    tokens of score i divided by the token's sum of scores. Even routing gives 1 a sequence, no valid token 0.
    """
    num_experts, k = routing.scores.shape[-1], routing.topk_idx.shape[-1]
    chosen = routing.topk_idx.reshape(num_sequences, -1, k)
    valid = (chosen[:, :, 0] >= 0).astype(jnp.float32)
    length = jnp.maximum(jnp.sum(valid, axis=1), 1.0)
    counts = jax.vmap(lambda idx: expert_counts(idx, num_experts))(chosen).astype(jnp.float32)
    share = routing.scores / (jnp.sum(routing.scores, axis=-1, keepdims=True) + _TINY)
    total_share = jnp.einsum("bs,bse->be", valid, share.reshape(num_sequences, -1, num_experts))
    return jnp.sum(jnp.sum(counts * total_share, axis=1) * (num_experts / k) / length**2)


def z_loss(routing: Routing) -> Float[Array, ""]:
    """Sum over valid tokens of logsumexp(logits)^2, to be divided by the number of tokens of the whole batch."""
    return jnp.sum(jnp.where(routing.topk_idx[:, 0] >= 0, jax.nn.logsumexp(routing.logits, axis=-1) ** 2, 0))


def update_bias(bias: Float[Array, " E"], counts: Int[Array, " E"], rate: float) -> Float[Array, " E"]:
    """bias + rate * sign(mean count - count), once an optimizer step, from the counts of the whole batch.

    Float32: at a rate of 0.001 a bfloat16 bias would stop growing at 0.5.
    """
    counts = counts.astype(jnp.float32)
    return bias.astype(jnp.float32) + rate * jnp.sign(jnp.mean(counts) - counts)
