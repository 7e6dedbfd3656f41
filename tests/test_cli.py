"""The command line: presets, flags over them, and one clear message with status 2 for each mistake."""

import pytest

import configs
from dualpipe_jax.cli import parse_cli
from dualpipe_jax.config import Config


def test_no_flags_are_the_defaults():
    assert parse_cli([]) == Config() == configs.get("tiny_cpu")


def test_flags_change_a_preset_wherever_it_stands():
    flags = [
        "--pipeline.schedule",
        "dualpipe_v",
        "--train.steps=50",
        "--train.run-dir",
        "here",
        "--data.paths",
        "a",
        "b",
    ]
    config = parse_cli([*flags, "--preset", "eight_device"])
    assert config == parse_cli(["--preset=eight_device", *flags])
    assert (config.pipeline.schedule, config.train.steps, config.train.run_dir) == ("dualpipe_v", 50, "here")
    assert config.data.paths == ("a", "b")
    assert config.model == configs.get("eight_device").model


def test_flags_reach_the_experts():
    config = parse_cli(
        ["--model.moe.num-experts", "16", "--model.moe.capacity_factor", "1.25", "--checkpoint.no-resume"]
    )
    assert config.model.moe.num_experts == 16
    assert config.model.moe.capacity_factor == 1.25
    assert not config.checkpoint.resume


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--trian.steps", "3"], "--train.steps"),
        (["--train.steps", "many"], "--train.steps"),
        (["--train.steps"], "--train.steps"),
        (["--train.dtype", "float16"], "bfloat16"),
        (["--preset", "eight_devices"], "did you mean 'eight_device'?"),
        (["--preset"], "--preset"),
        (["--model.moe.top-k", "0"], "top_k"),
    ],
)
def test_mistakes_end_with_status_2_and_a_hint(argv, said, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_cli(argv)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_cli(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "--preset {tiny_cpu,eight_device," in shown
    assert all(preset in shown for preset in configs.PRESETS)
    assert "--pipeline.num-microbatches INT" in shown
    assert "parts that a batch is cut into" in shown
