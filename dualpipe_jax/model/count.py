"""How many parameters a model has, from its sizes alone. Imports no jax."""

from __future__ import annotations

from typing import NamedTuple

from dualpipe_jax.config import LatentAttentionConfig, ModelConfig
from moe.config import MoEConfig


class ParameterCount(NamedTuple):
    """Numbers of trained parameters: routers' biases, which no gradient moves, are left out.

    Attributes:
        total: all of them. active: those that a token meets: of the routed experts only the `top_k` it goes to;
            embedding and output matrix whole, as Mistral and Qwen count.
        active_without_lookup: the active ones that multiply; from the embedding's table a row is only taken, unless it
            is the output matrix too. DeepSeek counts so.
        embedding: of the embedding and, unless tied, the output matrix; a part of `active`.
        experts: of the routed experts; a part of `total`.
        mtp: of multi-token prediction, without what it shares with the model; in none of the others.
    """

    total: int
    active: int
    active_without_lookup: int
    embedding: int
    experts: int
    mtp: int


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Count without allocating anything.

    Example:
        >>> count_parameters(ModelConfig(num_layers=1, num_dense_layers=1, moe=None)).total
        262528
    """
    d, moe = config.d_model, config.moe
    dense = min(config.num_dense_layers, config.num_layers) if moe else config.num_layers
    sparse = config.num_layers - dense
    table = config.vocab_size * d
    lookup = 0 if config.tied_embeddings else table
    attention = _grouped_attention(config) if config.mla is None else _latent_attention(config, config.mla)
    dense_layer = attention + 2 * d + 3 * d * config.d_ff
    sparse_layer = attention + 2 * d + _around_experts(d, moe) if moe else dense_layer
    in_layer = moe.num_experts * _expert(d, moe) if moe else 0
    others = table + lookup + d + dense * dense_layer + sparse * sparse_layer
    experts = sparse * in_layer
    active = others + (experts // moe.num_experts * moe.top_k if moe else 0)
    mtp = sparse_layer + in_layer + 2 * d * d + 3 * d if config.mtp_depth else 0
    return ParameterCount(others + experts, active, active - lookup, table + lookup, experts, mtp)


def _around_experts(d: int, moe: MoEConfig) -> int:
    """Router and shared experts."""
    return d * moe.num_experts + moe.num_shared_experts * _expert(d, moe)


def _expert(d: int, moe: MoEConfig) -> int:
    return 3 * d * moe.d_ff


def _grouped_attention(config: ModelConfig) -> int:
    width = config.head_width
    heads = config.num_heads + config.num_kv_heads  # each twice: queries and output, keys and values
    return 2 * config.d_model * heads * width + (2 * width if config.qk_norm else 0)


def _latent_attention(config: ModelConfig, mla: LatentAttentionConfig) -> int:
    d, heads, r, c = config.d_model, config.num_heads, mla.q_lora_rank, mla.kv_lora_rank
    query = heads * (mla.qk_nope_dim + mla.qk_rope_dim)
    queries = d * query if r is None else d * r + r + r * query
    keys_values = d * (c + mla.qk_rope_dim) + c + c * heads * (mla.qk_nope_dim + mla.v_dim)
    return queries + keys_values + heads * mla.v_dim * d
