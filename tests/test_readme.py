"""README's example runs as it stands."""

import re
import shlex
from pathlib import Path

import jax
import pytest

from configs import PRESETS
from dualpipe_jax.cli import parse_cli
from dualpipe_jax.validation import check_config

README = Path(__file__).parent.parent / "README.md"


def block(name):
    found = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```\n<!-- end -->", README.read_text(), re.DOTALL)
    assert found, f"README has no {name}"
    return found.group(1)


def test_the_example_trains():
    namespace = {}
    exec(block("example"), namespace)  # the README's own text, not a user's
    loss, grads, params = namespace["loss"], namespace["grads"], namespace["params"]
    assert float(loss) > 0
    lower = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
    tokens = namespace["tokens"]
    batch = {"tokens": tokens, "targets": jax.numpy.roll(tokens, -1, axis=-1)}
    assert float(namespace["grad_fn"](lower, batch)[0][0]) < float(loss)


def test_commands_are_complete():
    """Each makes its own environment and ends in what it is for."""
    assert block("train command").strip().endswith("run/train.py")
    assert block("test command").strip().endswith("pytest -n 2")
    for name in ("train command", "test command"):
        assert block(name).startswith("python3 -m venv .venv && .venv/bin/pip install")


TRAIN_LINES = re.findall(r"^python run/train\.py (--(?!help).*)$", README.read_text(), re.MULTILINE)


@pytest.mark.parametrize("line", TRAIN_LINES)
def test_train_commands_are_valid(line):
    check_config(parse_cli(shlex.split(line, comments=True)), num_devices=8)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_take_fewer_steps_and_other_schedules(preset):
    for schedule in ("1f1b", "dualpipe_v"):
        check_config(
            parse_cli(
                [
                    "--preset",
                    preset,
                    "--pipeline.schedule",
                    schedule,
                    "--train.steps",
                    "50",
                    "--optimizer.warmup-steps",
                    "5",
                ]
            )
        )
