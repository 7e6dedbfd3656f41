"""The configuration as a value: presets, JSON."""

import dataclasses
import json

import pytest

import configs
from dualpipe_jax.config import Config, from_json, to_json
from moe.config import MoEConfig


def all_dataclasses(value):
    yield value
    for field in dataclasses.fields(value):
        child = getattr(value, field.name)
        if dataclasses.is_dataclass(child):
            yield from all_dataclasses(child)


@pytest.mark.parametrize("name", configs.PRESETS)
def test_presets_survive_json(name):
    config = configs.get(name)
    assert from_json(to_json(config)) == config
    assert hash(from_json(to_json(config))) == hash(config), "tuples must come back as tuples"


def test_json_keeps_what_is_not_default():
    config = Config()
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, paths=("a.txt", "b")),
        model=dataclasses.replace(config.model, moe=None),
        train=dataclasses.replace(config.train, run_dir="runs/x", stop_at=3),
    )
    assert from_json(to_json(config)) == config


def test_json_fills_in_defaults_and_reads_whole_floats():
    config = from_json('{"optimizer": {"learning_rate": 1}, "model": {"moe": {"num_experts": 16}}}')
    assert config.optimizer.learning_rate == 1.0
    assert type(config.optimizer.learning_rate) is float
    assert config.model.moe == MoEConfig(num_experts=16)
    assert config.pipeline == Config().pipeline


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": {"step": 3}}, r"unknown entry 'train.step' .* did you mean 'steps'"),
        ({"train": {"steps": "3"}}, r"train.steps must be int, got '3'"),
        ({"train": {"steps": True}}, r"train.steps must be int, got True"),
        ({"train": {"dtype": "float16"}}, r"train.dtype must be one of 'float32', 'bfloat16', got 'float16'"),
        ({"data": {"paths": ["a", 3]}}, r"data.paths\[1\] must be str, got 3"),
        ({"model": []}, r"model must be an object"),
        ([], r"the configuration must be an object"),
    ],
)
def test_json_errors_name_the_entry(change, message):
    with pytest.raises(ValueError, match=message):
        from_json(json.dumps(change))


def test_text_that_is_no_json():
    with pytest.raises(ValueError, match="no JSON"):
        from_json("{")


def test_unknown_preset():
    with pytest.raises(ValueError, match="did you mean 'eight_device'"):
        configs.get("eight_devices")


@pytest.mark.parametrize("name", configs.PRESETS)
def test_parts_are_small_and_frozen(name):
    for part in all_dataclasses(configs.get(name)):
        fields = dataclasses.fields(part)
        assert len(fields) <= 20
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, fields[0].name, None)
