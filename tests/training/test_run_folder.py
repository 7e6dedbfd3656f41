"""What a run leaves behind, and what `python run/train.py` says about a run that cannot be."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run
from tensorboardX.proto.event_pb2 import Event

from dualpipe_jax.checkpoint import Checkpointer
from dualpipe_jax.config import from_json
from dualpipe_jax.metrics import REQUIRED
from dualpipe_jax.schedule import build
from dualpipe_jax.schedule.render import draw_png
from dualpipe_jax.train import train

TRAIN = Path(__file__).parents[2] / "run" / "train.py"


@pytest.fixture(scope="module")
def result(tmp_path_factory, text_file):
    config = tiny_run.run_config(
        tiny_run.config(), tmp_path_factory.mktemp("run") / "new", text_file, stop_at=5, every=2
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dualpipe_jax.train.Trainer", tiny_run.trainer_of)
        return config, train(config)


def test_config_reads_back(result):
    config, done = result
    assert from_json((done.run_dir / "config.json").read_text()) == config


def test_metrics(result):
    _, done = result
    lines = [json.loads(line) for line in (done.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert lines == done.metrics
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for line in lines:
        assert set(REQUIRED) <= line.keys()
        assert line["seconds"] * line["tokens_per_second"] == pytest.approx(tiny_run.BATCH * tiny_run.SEQ)
        assert line["bubble_predicted"] == 0  # DualPipe's (P/2 - 1) (F + B - 3 W) with 2 ranks
        assert line["expert_load_max_over_mean"] >= 1
        assert line["skipped"] == line["dropped_tokens"] == 0
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_tensorboard(result):
    _, done = result
    (file,) = (done.run_dir / "tensorboard").iterdir()
    losses = [(e.step, v.simple_value) for e in _events(file) for v in e.summary.value if v.tag == "loss"]
    assert losses == [(line["step"], pytest.approx(line["loss"])) for line in done.metrics]


def _events(file):
    """TensorBoard's records: 8 bytes of length, 4 of checksum, the event, 4 of checksum."""
    data = file.read_bytes()
    while data:
        size = int.from_bytes(data[:8], "little")
        yield Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]


def test_picture_and_checkpoints(result):
    _, done = result
    assert (done.run_dir / "schedule.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with Checkpointer(done.run_dir / "checkpoints") as checkpoints:
        assert checkpoints.latest() == 5, "the last step is saved, whatever `every` says"
    assert sorted(p.name for p in (done.run_dir / "checkpoints").iterdir() if p.name.isdecimal()) == ["4", "5"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_picture_of_few_ranks(tmp_path, ranks):
    """Warnings are errors here: there is room for the title and the legend."""
    draw_png(build("1f1b", num_ranks=ranks, num_microbatches=2), tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").stat().st_size > 1000


def run_train(*arguments, **environment):
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.run(
        [sys.executable, str(TRAIN), *arguments],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--preset", "tiny_cup"], {}, "did you mean 'tiny_cpu'?"),
        (["--pipeline.num-microbatches", "6"], {}, "nearest valid"),
        (
            [],
            {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
            "needs 8 devices, found 1",
        ),
        (["--data.paths", "no/such/file"], {"JAX_PLATFORMS": "cpu"}, "there is no file or folder 'no/such/file'"),
    ],
    ids=["preset", "microbatches", "devices", "text"],
)
def test_mistakes_are_told_in_one_line(tmp_path, arguments, environment, said):
    done = run_train("--train.run-dir", str(tmp_path / "run"), *arguments, **environment)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not (tmp_path / "run").exists()
