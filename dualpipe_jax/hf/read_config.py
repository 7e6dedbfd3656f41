"""From a Hugging Face `config.json` to a `ModelConfig`.

Known are the model types deepseek_v3, deepseek_v2 (without group-limited routing), mixtral and qwen3_moe, as published
and as transformers 5 writes them. What such a file says about training (auxiliary losses, dropout) is not taken over.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from dualpipe_jax.config import LatentAttentionConfig, ModelConfig, YarnConfig
from moe.config import MoEConfig

HF = Mapping[str, Any]
NO_LOSSES: dict[str, Any] = {"bias_rate": 0.0, "balance_loss_weight": 0.0, "z_loss_weight": 0.0}

# What our model has no other value for: key -> values that are the same as its absence.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "decoder_sparse_step": (1,),
    "hidden_act": ("silu",),
    "moe_layer_freq": (1,),
    "partial_rotary_factor": (1, None),
    "use_sliding_window": (False,),
}
_YARN_KEYS = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "mscale", "mscale_all_dim",
}  # fmt: skip
_YARN_FIXED: dict[str, tuple[Any, ...]] = {"attention_factor": (None,), "truncate": (True, None)}


def model_config(hf: HF) -> ModelConfig:
    """The model that a `config.json` describes.

    Raises:
        ValueError: an unknown model type, a missing key, or a value that this model does not have; names all.
    """
    kind = hf.get("model_type")
    if kind not in _READERS:
        near = difflib.get_close_matches(str(kind), _READERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_READERS)}"
        raise ValueError(f"model_type={kind!r} is not known; {hint}")
    _check_fixed(hf, _FIXED)
    try:
        return _READERS[kind](hf)
    except KeyError as error:
        raise ValueError(f"config.json of model_type={kind!r} has no {error.args[0]!r}") from None


def _deepseek_v3(hf: HF) -> ModelConfig:
    _check_fixed(
        hf, {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "num_nextn_predict_layers": (1, 0, None)}
    )
    return _deepseek(
        hf,
        mtp_depth=hf.get("num_nextn_predict_layers") or 0,
        interleaved=hf.get("rope_interleave", True),
        scoring="sigmoid",
        normalize_weights=hf.get("norm_topk_prob", True),
        num_groups=hf["n_group"],
        top_groups=hf["topk_group"],
    )


def _deepseek_v2(hf: HF) -> ModelConfig:
    _check_fixed(hf, {"scoring_func": ("softmax",), "topk_method": ("greedy",)})
    if hf.get("norm_topk_prob") and hf.get("routed_scaling_factor", 1.0) != 1.0:
        raise ValueError("norm_topk_prob with routed_scaling_factor: implementations of deepseek_v2 do not agree on it")
    return _deepseek(hf, interleaved=True, scoring="softmax", normalize_weights=hf.get("norm_topk_prob", False))


def _deepseek(hf: HF, *, interleaved: bool, mtp_depth: int = 0, **routing: Any) -> ModelConfig:
    mla = LatentAttentionConfig(
        q_lora_rank=hf["q_lora_rank"],
        kv_lora_rank=hf["kv_lora_rank"],
        qk_nope_dim=hf["qk_nope_head_dim"],
        qk_rope_dim=hf["qk_rope_head_dim"],
        v_dim=hf["v_head_dim"],
        rope_interleaved=interleaved,
    )
    moe = MoEConfig(
        d_ff=hf["moe_intermediate_size"],
        num_experts=hf["n_routed_experts"],
        top_k=hf["num_experts_per_tok"],
        num_shared_experts=hf.get("n_shared_experts") or 0,
        route_scale=float(hf["routed_scaling_factor"]),
        **routing,
        **NO_LOSSES,
    )
    heads = hf["num_attention_heads"]
    return ModelConfig(
        **_common(hf),
        num_kv_heads=heads,
        mla=mla,
        d_ff=hf["intermediate_size"],
        num_dense_layers=hf["first_k_dense_replace"],
        mtp_depth=mtp_depth,
        moe=moe,
    )


def _mixtral(hf: HF) -> ModelConfig:
    _check_fixed(hf, {"sliding_window": (None,)})
    moe = MoEConfig(
        d_ff=hf["intermediate_size"],
        num_experts=hf["num_local_experts"],
        top_k=hf["num_experts_per_tok"],
        num_shared_experts=0,
        **NO_LOSSES,
    )
    return ModelConfig(**_common(hf), **_grouped(hf), d_ff=moe.d_ff, num_dense_layers=0, moe=moe)


def _qwen3_moe(hf: HF) -> ModelConfig:
    dense = sorted(hf.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        raise ValueError(f"mlp_only_layers={dense}: only a model's first layers may be dense, as 0, 1, 2")
    moe = MoEConfig(
        d_ff=hf["moe_intermediate_size"],
        num_experts=hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"],
        top_k=hf["num_experts_per_tok"],
        num_shared_experts=0,
        normalize_weights=hf["norm_topk_prob"],
        **NO_LOSSES,
    )
    return ModelConfig(
        **_common(hf), **_grouped(hf), qk_norm=True, d_ff=hf["intermediate_size"], num_dense_layers=len(dense), moe=moe
    )


def _common(hf: HF) -> dict[str, Any]:
    theta, yarn = _rope(hf)
    return {
        "vocab_size": hf["vocab_size"],
        "d_model": hf["hidden_size"],
        "num_layers": hf["num_hidden_layers"],
        "num_heads": hf["num_attention_heads"],
        "norm_eps": float(hf["rms_norm_eps"]),
        "tied_embeddings": hf.get("tie_word_embeddings", False),
        "rope_theta": theta,
        "yarn": yarn,
    }


def _grouped(hf: HF) -> dict[str, Any]:
    width = hf.get("head_dim")
    if width is not None and width * hf["num_attention_heads"] == hf["hidden_size"]:
        width = None
    return {"num_kv_heads": hf["num_key_value_heads"], "head_dim": width}


def _rope(hf: HF) -> tuple[float, YarnConfig | None]:
    """(theta, YaRN), from `rope_parameters` or from `rope_theta` and `rope_scaling`."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = float(rope["rope_theta"] if "rope_theta" in rope else hf["rope_theta"])
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ValueError(f"rope_type={kind!r} is not known; known: default, yarn")
    _check_fixed(rope, _YARN_FIXED)
    unknown = sorted(set(rope) - _YARN_KEYS - set(_YARN_FIXED))
    if unknown:
        raise ValueError(f"unknown entries of YaRN: {', '.join(unknown)}; known: {', '.join(sorted(_YARN_KEYS))}")
    length = rope.get("original_max_position_embeddings")
    return theta, YarnConfig(
        factor=float(rope["factor"]),
        original_length=hf["max_position_embeddings"] if length is None else length,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        mscale=float(rope.get("mscale") or 0),
        mscale_all_dim=float(rope.get("mscale_all_dim") or 0),
    )


def _check_fixed(hf: HF, fixed: Mapping[str, tuple[Any, ...]]) -> None:
    wrong = [
        f"{key}={hf[key]!r} is not supported; the nearest valid value is {values[0]!r}"
        for key, values in fixed.items()
        if key in hf and hf[key] not in values
    ]
    if wrong:
        raise ValueError("; ".join(wrong))


_READERS: dict[str, Callable[[HF], ModelConfig]] = {
    "deepseek_v3": _deepseek_v3,
    "deepseek_v2": _deepseek_v2,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}
