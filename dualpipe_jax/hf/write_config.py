"""From a `ModelConfig` to the `config.json` of the nearest Hugging Face model type."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from dualpipe_jax.config import ModelConfig
from dualpipe_jax.hf.read_config import NO_LOSSES, model_config
from dualpipe_jax.hf.tensors import listed
from moe.config import MoEConfig


def hf_config(config: ModelConfig, *, max_length: int, dtype: str = "float32") -> dict[str, Any]:
    """The `config.json` of a model, in the published style, which old and new transformers read.

    Args:
        max_length: tokens of context that the model is meant for.
        dtype: of the tensors beside it.

    Raises:
        ValueError: no known model type can say all of `config`; names what would be lost.
    """
    kind = model_type(config)
    assert config.moe is not None
    hf = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads if config.mla else config.num_kv_heads,
        "max_position_embeddings": max_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "num_experts_per_tok": config.moe.top_k,
        "hidden_act": "silu",
        "attention_bias": False,
        **_rope_keys(config),
        **_WRITERS[kind](config, config.moe),
    }
    lost = _differences(_inference_only(config), model_config(hf))
    if lost:
        raise ValueError(f"a Hugging Face {kind} model cannot be so:" + listed(lost))
    return hf


def model_type(config: ModelConfig) -> str:
    """The Hugging Face model type nearest to a model.

    Raises:
        ValueError: it has no experts.

    Example:
        >>> model_type(ModelConfig()), model_type(ModelConfig(qk_norm=True))
        ('mixtral', 'qwen3_moe')
    """
    if config.moe is None:
        raise ValueError("model.moe=none: no known Hugging Face model type is without experts")
    if config.mla is not None:
        return "deepseek_v3" if config.moe.scoring == "sigmoid" else "deepseek_v2"
    return "qwen3_moe" if config.qk_norm else "mixtral"


def _write_deepseek(config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    mla = config.mla
    assert mla is not None
    sigmoid = moe.scoring == "sigmoid"
    return {
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_dim,
        "qk_rope_head_dim": mla.qk_rope_dim,
        "v_head_dim": mla.v_dim,
        "intermediate_size": config.d_ff,
        "moe_intermediate_size": moe.d_ff,
        "first_k_dense_replace": config.num_dense_layers,
        "moe_layer_freq": 1,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.num_shared_experts,
        "norm_topk_prob": moe.normalize_weights,
        "routed_scaling_factor": moe.route_scale,
        "scoring_func": moe.scoring,
        "topk_method": "noaux_tc" if sigmoid else "greedy",
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        **({"rope_interleave": mla.rope_interleaved, "num_nextn_predict_layers": config.mtp_depth} if sigmoid else {}),
    }


def _write_mixtral(config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    return {
        "head_dim": config.head_width,
        "intermediate_size": moe.d_ff,
        "num_local_experts": moe.num_experts,
        "sliding_window": None,
    }


def _write_qwen3_moe(config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    return {
        "head_dim": config.head_width,
        "intermediate_size": config.d_ff,
        "moe_intermediate_size": moe.d_ff,
        "num_experts": moe.num_experts,
        "norm_topk_prob": moe.normalize_weights,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(config.num_dense_layers)),
    }


def _rope_keys(config: ModelConfig) -> dict[str, Any]:
    yarn = config.yarn
    if yarn is None:
        return {"rope_theta": config.rope_theta, "rope_scaling": None}
    scaling = {
        "type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        **({"mscale": yarn.mscale} if yarn.mscale else {}),
        **({"mscale_all_dim": yarn.mscale_all_dim} if yarn.mscale_all_dim else {}),
    }
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling}


def _inference_only(config: ModelConfig) -> ModelConfig:
    """Without what only training needs, as `model_config` gives it."""
    moe = config.moe
    assert moe is not None
    width = None if config.head_width * config.num_heads == config.d_model else config.head_dim
    changes: dict[str, Any] = {"head_dim": width, "mtp_loss_weight": ModelConfig().mtp_loss_weight}
    if config.mla is not None:
        changes["num_kv_heads"] = config.num_heads
    if config.num_dense_layers == 0 and model_type(config) == "mixtral":
        changes["d_ff"] = moe.d_ff
    neutral = MoEConfig(num_experts=2)
    losses = {**NO_LOSSES, "capacity_factor": neutral.capacity_factor, "block_size": neutral.block_size}
    return dataclasses.replace(config, moe=dataclasses.replace(moe, **losses), **changes)


def _differences(ours: Any, theirs: Any, where: str = "model") -> list[str]:
    """A line for each entry that is not equal."""
    found = []
    for field in dataclasses.fields(ours):
        a, b, name = getattr(ours, field.name), getattr(theirs, field.name), f"{where}.{field.name}"
        if dataclasses.is_dataclass(a) and dataclasses.is_dataclass(b):
            found += _differences(a, b, name)
        elif a != b:
            found.append(f"{name}={a}; the nearest valid value is {b}")
    return found


_WRITERS: dict[str, Callable[[ModelConfig, MoEConfig], dict[str, Any]]] = {
    "deepseek_v3": _write_deepseek,
    "deepseek_v2": _write_deepseek,
    "mixtral": _write_mixtral,
    "qwen3_moe": _write_qwen3_moe,
}
_ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
