"""Parameters counted from sizes alone: as published, and as allocated."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import jax
import pytest

import configs
from dualpipe_jax.config import LatentAttentionConfig, ModelConfig
from dualpipe_jax.model.count import count_parameters
from dualpipe_jax.model.model import Model
from moe.config import MoEConfig

ROOT = Path(__file__).parent.parent.parent
SMALL = ModelConfig(vocab_size=11, d_model=8, num_layers=3, num_heads=2, num_kv_heads=1, d_ff=6, moe=MoEConfig(d_ff=4))


@pytest.mark.parametrize(
    ("preset", "total"),
    [
        # Totals of the published checkpoints; DeepSeek-V3's 671B main model, without multi-token prediction and
        # without its 58 x 256 router biases.
        ("deepseek_v3_671b", 671_026_419_200 - 58 * 256),
        ("deepseek_v2_lite_16b", 15_706_484_224),
        ("mixtral_8x7b", 46_702_792_704),
        ("qwen3_moe_30b_a3b", 30_532_122_624),
    ],
)
def test_published_totals(preset, total):
    assert count_parameters(configs.get(preset).model).total == total


def test_published_active_parameters():
    """To the digits that were published, each as its authors count."""
    count = {preset: count_parameters(configs.get(preset).model) for preset in configs.PRESETS}
    billions = lambda n, digits: round(n / 1e9, digits)  # noqa: E731
    assert billions(count["deepseek_v3_671b"].active_without_lookup, 0) == 37
    assert int(count["deepseek_v2_lite_16b"].active_without_lookup / 1e8) == 24
    assert billions(count["mixtral_8x7b"].active, 1) == 12.9
    assert int(count["qwen3_moe_30b_a3b"].active / 1e8) == 33


def test_published_multi_token_prediction():
    """DeepSeek-V3's files: its 8-bit and 16-bit numbers, with copies of embedding and head for the prediction."""
    model = dataclasses.replace(configs.get("deepseek_v3_671b").model, mtp_depth=1)
    count = count_parameters(model)
    assert count.total + count.mtp + count.embedding == 680_571_043_840 + 3_918_786_560
    assert count.total == count_parameters(dataclasses.replace(model, mtp_depth=0)).total


MLA = LatentAttentionConfig(q_lora_rank=5, kv_lora_rank=3, qk_nope_dim=4, qk_rope_dim=2, v_dim=6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe": None},
        {"tied_embeddings": True},
        {"head_dim": 6, "qk_norm": True},
        {"mla": MLA},
        {"mla": dataclasses.replace(MLA, q_lora_rank=None)},
        {"num_dense_layers": 3},
        {"moe": MoEConfig(d_ff=4, num_shared_experts=0)},
        {"moe": MoEConfig(d_ff=4, num_shared_experts=2)},
        {"mtp_depth": 1},
        {"mtp_depth": 1, "moe": None, "mla": MLA},
    ],
    ids=str,
)
def test_equals_what_is_allocated(changes):
    config = dataclasses.replace(SMALL, **changes)
    shapes = jax.eval_shape(Model(config, num_sequences=1, seq_len=1).init, jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    trained = sum(leaf.size for path, leaf in leaves if "bias" not in jax.tree_util.keystr(path))
    count = count_parameters(config)
    assert count.total + count.mtp == trained
    assert (count.mtp > 0) == bool(config.mtp_depth)


def plan(*argv):
    spec = importlib.util.spec_from_file_location("plan", ROOT / "run" / "plan.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(argv)


def test_plan_prints_the_count(capsys):
    assert plan("--count", "--preset", "deepseek_v3_671b", "--json") == 0
    assert json.loads(capsys.readouterr().out)["total"] == 671_026_404_352
    assert plan("--count", "--preset", "mixtral_8x7b") == 0
    assert "46.703 B" in capsys.readouterr().out
    assert plan("--count", "--model.num-layers", "4", "--json") == 0
    assert json.loads(capsys.readouterr().out)["total"] < count_parameters(ModelConfig()).total


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "say what to plan"),
        (["--count", "--preset", "mixtral"], "mixtral_8x7b"),
        (["--count", "--model.d-model", "130"], "128 and 136"),
    ],
)
def test_plan_refuses(capsys, argv, said):
    with pytest.raises(SystemExit) as exit_:
        plan(*argv)
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err
