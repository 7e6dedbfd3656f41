"""What cannot run is refused before anything is compiled, with the value, the rule and the nearest valid value."""

import dataclasses

import pytest

import configs
from dualpipe_jax.config import Config, LatentAttentionConfig, YarnConfig
from dualpipe_jax.validation import ConfigError, check_config, nearest_divisor
from moe.config import MoEConfig


def changed(section, **values):
    config = Config()
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


@pytest.mark.parametrize("name", configs.PRESETS)
def test_presets_are_valid(name):
    config = configs.get(name)
    check_config(config)
    check_config(config, num_devices=config.pipeline.num_devices)
    check_config(config, num_devices=2 * config.pipeline.num_devices)


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("model", {"d_model": 130}, ["d_model=130", "num_heads=4", "128 and 136"]),
        ("model", {"num_heads": 128}, ["d_model=128", "even", "nearest valid value is 256"]),
        ("model", {"head_dim": 33}, ["head_dim=33", "even", "32 and 34"]),
        ("model", {"head_dim": 0}, ["head_dim=0", "nearest valid value is 2"]),
        ("model", {"mla": LatentAttentionConfig(qk_rope_dim=7)}, ["mla.qk_rope_dim=7", "even", "6 and 8"]),
        ("model", {"mla": LatentAttentionConfig(kv_lora_rank=0)}, ["mla.kv_lora_rank=0", "nearest valid value is 1"]),
        ("model", {"mla": LatentAttentionConfig(q_lora_rank=0)}, ["mla.q_lora_rank=0", "nearest valid value is 1"]),
        ("model", {"mla": LatentAttentionConfig(), "head_dim": 32}, ["head_dim=32", "valid value is none"]),
        ("model", {"mla": LatentAttentionConfig(), "qk_norm": True}, ["qk_norm=True", "valid value is False"]),
        ("model", {"mtp_depth": 2}, ["mtp_depth=2", "nearest valid value is 1"]),
        ("model", {"mtp_loss_weight": -0.1}, ["mtp_loss_weight=-0.1", "nearest valid value is 0"]),
        ("model", {"rope_theta": 1.0}, ["rope_theta=1.0", "10000"]),
        ("model", {"yarn": YarnConfig(0.5, 64)}, ["yarn.factor=0.5", "nearest valid value is 1"]),
        ("model", {"yarn": YarnConfig(4.0, 0)}, ["yarn.original_length=0", "nearest valid value is 1"]),
        ("model", {"yarn": YarnConfig(4.0, 64, beta_fast=1.0)}, ["beta_fast=1.0", "beta_slow=1.0", "32 and 1"]),
        ("model", {"yarn": YarnConfig(4.0, 64, mscale=-1.0)}, ["yarn.mscale=-1.0", "nearest valid value is 0"]),
        ("model", {"num_kv_heads": 3}, ["num_kv_heads=3", "num_heads=4", "nearest valid value is 2"]),
        ("model", {"num_layers": 3}, ["num_layers=3", "4 stages", "nearest valid value is 4"]),
        ("model", {"num_dense_layers": 9}, ["num_dense_layers=9", "num_layers=8", "nearest valid value is 8"]),
        ("model", {"vocab_size": 100}, ["vocab_size=100", "nearest valid value is 256"]),
        ("model", {"moe": MoEConfig(num_experts=9)}, ["ep=2", "num_experts=9", "nearest valid value is 1"]),
        ("pipeline", {"num_microbatches": 6}, ["6", "8"]),
        ("pipeline", {"num_microbatches": 9}, ["9", "8"]),
        ("pipeline", {"pp": 0}, ["pipeline.pp=0", "nearest valid value is 1"]),
        ("pipeline", {"pp": 3}, ["3"]),
        ("pipeline", {"schedule": "dualpip"}, ["dualpip", "dualpipe"]),
        ("data", {"batch_size": 20}, ["batch_size=20", "8 x 1 x 2 = 16", "16 and 32"]),
        ("data", {"batch_size": 8}, ["batch_size=8", "nearest valid value is 16"]),
        ("data", {"seq_len": 0}, ["seq_len=0", "nearest valid value is 1"]),
        ("optimizer", {"learning_rate": float("nan")}, ["learning_rate=nan"]),
        ("optimizer", {"learning_rate": 0.0, "min_learning_rate": 0.0}, ["learning_rate=0.0", "above 0"]),
        ("optimizer", {"min_learning_rate": 1.0}, ["min_learning_rate=1.0", "0.003"]),
        ("optimizer", {"warmup_steps": 1000}, ["warmup_steps=1000", "steps=80"]),
        ("optimizer", {"beta2": 1.0}, ["beta2=1.0", "below 1"]),
        ("optimizer", {"weight_decay": float("inf")}, ["weight_decay=inf"]),
        ("optimizer", {"clip_norm": -1.0}, ["clip_norm=-1.0"]),
        ("train", {"steps": 0}, ["steps=0", "nearest valid value is 1"]),
        ("train", {"stop_at": 81}, ["stop_at=81", "nearest valid value is 80"]),
        ("checkpoint", {"keep": 0}, ["keep=0"]),
    ],
)
def test_each_mistake_is_named_in_one_line(section, values, said):
    with pytest.raises(ConfigError) as caught:
        check_config(changed(section, **values))
    message = str(caught.value)
    assert all(part in message for part in said), message
    assert "\n" not in message


def test_several_mistakes_are_listed_together():
    config = dataclasses.replace(changed("model", d_model=130, num_kv_heads=3), data=changed("data", batch_size=5).data)
    with pytest.raises(ConfigError) as caught:
        check_config(config, num_devices=1)
    lines = str(caught.value).splitlines()
    assert lines[0] == "4 problems in the configuration:"
    assert len(lines) == 5


def test_devices():
    with pytest.raises(ConfigError, match=r"needs 8 devices, found 1: .*device_count=8"):
        check_config(Config(), num_devices=1)
    with pytest.raises(ConfigError, match=r"needs 8 devices, found 2: .*device_count=4"):
        check_config(Config(), num_devices=2, num_processes=2)
    with pytest.raises(
        ConfigError, match=r"3 processes cannot share evenly; the nearest valid number of processes is 2"
    ):
        check_config(Config(), num_processes=3)
    with pytest.raises(ConfigError, match=r"uses 8 of the 16 devices that 2 processes have"):
        check_config(Config(), num_devices=16, num_processes=2)
    check_config(Config(), num_devices=8, num_processes=2)


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe", "dualpipe_v"])
def test_the_schedule_counts_its_stages(schedule):
    stages = 8 if schedule == "dualpipe_v" else 4
    config = changed("pipeline", schedule=schedule)
    check_config(dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=stages)))
    with pytest.raises(ConfigError, match=f"the {stages} stages of"):
        check_config(dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=stages - 1)))


def test_nearest_divisor_of_a_tie_is_the_smaller():
    assert [nearest_divisor(v, 12) for v in (0, 5, 8, 9, 100)] == [1, 4, 6, 6, 12]
