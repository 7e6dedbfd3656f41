"""`config.json` to a model and back; what cannot be said is refused by name."""

import dataclasses
import json

import pytest
from hf_cases import CASES, DATA, VARIANTS, config_of

import configs
from dualpipe_jax.config import LatentAttentionConfig, ModelConfig, YarnConfig
from dualpipe_jax.hf import hf_config, model_config
from moe.config import MoEConfig


def json_of(case):
    return json.loads((DATA / case / "config.json").read_text())


@pytest.mark.parametrize(("case", "variant"), [*((case, None) for case in CASES), *VARIANTS])
def test_round_trip(case, variant):
    config = config_of(case, variant)
    written = json.loads(json.dumps(hf_config(config, max_length=64)))
    assert model_config(written) == config
    assert written["max_position_embeddings"] == 64


def test_deepseek_v3_as_published():
    """The keys of its `config.json` on the hub, quantised weights and multi-token prediction included."""
    published = {
        "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 3,
        "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "seq_aux": True, "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280,
    }  # fmt: skip
    config = model_config(published)
    assert config.yarn == YarnConfig(40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    preset = configs.get("deepseek_v3_671b").model
    same_training = dataclasses.replace(config.moe, bias_rate=1e-3, balance_loss_weight=1e-4, block_size=128)
    assert dataclasses.replace(config, yarn=None, mtp_depth=0, moe=same_training) == preset
    assert config.mtp_depth == 1


@pytest.mark.parametrize("preset", ["deepseek_v3_671b", "deepseek_v2_lite_16b", "mixtral_8x7b", "qwen3_moe_30b_a3b"])
def test_presets_can_be_exported(preset):
    hf = hf_config(configs.get(preset).model, max_length=4096)
    assert hf["model_type"] == {"dee": "deepseek_v", "mix": "mixtral", "qwe": "qwen3_moe"}[preset[:3]] + (
        preset[10] if preset[0] == "d" else ""
    )
    assert model_config(hf).d_model == configs.get(preset).model.d_model


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        ("deepseek_v3_basic", {"model_type": "deepseek_v4"}, "did you mean 'deepseek_v[23]'"),
        ("deepseek_v3_basic", {"model_type": "gpt2"}, "known: deepseek_v3, deepseek_v2, mixtral, qwen3_moe"),
        ("deepseek_v3_basic", {"kv_lora_rank": ...}, "has no 'kv_lora_rank'"),
        ("deepseek_v3_basic", {"attention_bias": True}, "attention_bias=True .* nearest valid value is False"),
        ("deepseek_v3_basic", {"hidden_act": "gelu"}, "hidden_act='gelu' .* 'silu'"),
        ("deepseek_v3_basic", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3_basic", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("deepseek_v3_basic", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type='llama3'"),
        (
            "deepseek_v3_basic",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2, "bta_fast": 3}},
            "unknown entries of YaRN: bta_fast",
        ),
        (
            "deepseek_v3_basic",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2, "attention_factor": 1.5}},
            "attention_factor=1.5",
        ),
        ("deepseek_v3_basic", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2 .* valid value is 1"),
        ("deepseek_v3_basic", {"topk_group": 9}, "top_groups=9 .* nearest valid value is 4"),
        ("mixtral_tiny", {"sliding_window": 4096}, "sliding_window=4096"),
        ("qwen3_moe_tiny", {"mlp_only_layers": [1]}, "first layers"),
        ("qwen3_moe_tiny", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    ],
)
def test_what_is_not_supported_is_named(case, change, said):
    hf = json_of(case) | change
    hf = {key: value for key, value in hf.items() if value is not ...}
    with pytest.raises(ValueError, match=said):
        model_config(hf)


def test_qwen3_as_published_says_num_experts():
    hf = json_of("qwen3_moe_tiny")
    experts = hf.pop("num_local_experts", None) or hf.pop("num_experts")
    assert model_config(hf | {"num_experts": experts}) == config_of("qwen3_moe_tiny")


MLA = LatentAttentionConfig(q_lora_rank=8, kv_lora_rank=8, qk_nope_dim=8, qk_rope_dim=4, v_dim=8)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (ModelConfig(), ["mixtral", "num_dense_layers=1", "num_shared_experts=1; the nearest valid value is 0"]),
        (ModelConfig(moe=None), ["moe=none"]),
        (ModelConfig(qk_norm=True, mtp_depth=1), ["qwen3_moe", "mtp_depth=1; the nearest valid value is 0"]),
        (ModelConfig(qk_norm=True, moe=MoEConfig(route_scale=2.0)), ["qwen3_moe", "route_scale=2.0"]),
        (ModelConfig(qk_norm=True, moe=MoEConfig(scoring="sigmoid")), ["qwen3_moe", "scoring=sigmoid"]),
        (ModelConfig(mla=MLA, moe=MoEConfig(num_groups=4, top_groups=2)), ["deepseek_v2", "num_groups=4"]),
        (
            ModelConfig(mla=LatentAttentionConfig(rope_interleaved=False), moe=MoEConfig(normalize_weights=False)),
            ["deepseek_v2", "rope_interleaved=False"],
        ),
    ],
)
def test_models_without_a_type_are_refused(config, said):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        hf_config(config, max_length=64)
    assert all(part in str(caught.value) for part in said), caught.value
