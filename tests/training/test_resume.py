"""A run that was interrupted and resumed is the run that was not."""

import jax
import numpy as np
import pytest
import tiny_run

from dualpipe_jax.checkpoint import Checkpointer
from dualpipe_jax.metrics import read_metrics
from dualpipe_jax.train import NonFiniteError, canonical, restore, save, train
from dualpipe_jax.validation import ConfigError

pytestmark = pytest.mark.usefixtures("shared_trainers")
MEASURED = ("loss", "cross_entropy", "grad_norm", "learning_rate", "expert_load_max_over_mean")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text_file):
    """20 steps without a break."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dualpipe_jax.train.Trainer", tiny_run.trainer_of)
        return train(tiny_run.run_config(tiny_run.config(), tmp_path_factory.mktemp("whole"), text_file))


def columns(result_or_lines):
    return [[line[name] for name in ("step", *MEASURED)] for line in result_or_lines]


@pytest.mark.parametrize("first", [5, 10])
def test_resume_is_bitwise(tmp_path, text_file, whole, first):
    """Case 33: losses, learning rates, parameters and moments."""
    begun = train(tiny_run.run_config(tiny_run.config(), tmp_path, text_file, stop_at=first))
    resumed = train(tiny_run.run_config(tiny_run.config(), tmp_path, text_file))
    assert len(begun.metrics) == first
    assert columns(begun.metrics + resumed.metrics) == columns(whole.metrics)
    assert tiny_run.differing(resumed.state, whole.state) == []
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, tiny_run.STEPS + 1))
    assert columns(read_metrics(tmp_path)) == columns(read_metrics(whole.run_dir))


def test_learning_rates(whole):
    """Linear from 0 over the warm-up, then falling."""
    rates = np.array([line["learning_rate"] for line in whole.metrics])
    want = tiny_run.PEAK * np.arange(tiny_run.WARMUP + 1) / tiny_run.WARMUP
    np.testing.assert_allclose(rates[: tiny_run.WARMUP + 1], want, rtol=1e-6)  # float32
    assert np.all(np.diff(rates[tiny_run.WARMUP :]) < 0)


def test_lost_steps_are_measured_again(tmp_path, text_file, whole):
    """Stopped 2 steps after the checkpoint: each step is in the metrics once."""
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        trainer = tiny_run.trainer_of(tiny_run.config())
        partial = train(tiny_run.run_config(tiny_run.config(), tmp_path / "other", text_file, stop_at=3))
        state, host = _saved(trainer, partial.run_dir, 3)
        save(trainer, checkpoints, 3, state, host)
    lines = (partial.run_dir / "metrics.jsonl").read_text() + '{"step": 4, "loss": 1.0}\n{"step": 5, "lo'
    (tmp_path / "metrics.jsonl").write_text(lines)
    train(tiny_run.run_config(tiny_run.config(), tmp_path, text_file, stop_at=6))
    assert columns(read_metrics(tmp_path)) == columns(whole.metrics[:6])


def _saved(trainer, run_dir, step):
    with Checkpointer(run_dir / "checkpoints") as checkpoints:
        return restore(trainer, checkpoints, step)


def test_everything_is_as_live(tmp_path, text_file):
    """Case 31: router biases after skewed routing, the random key, the step and the data position."""
    result = train(tiny_run.run_config(tiny_run.config(), tmp_path, text_file, stop_at=3))
    trainer = tiny_run.trainer_of(tiny_run.config())
    state, host = _saved(trainer, tmp_path, 3)
    assert tiny_run.differing(state, result.state) == []
    assert jax.tree.map(lambda a: a.sharding, state) == jax.tree.map(lambda a: a.sharding, result.state)
    assert int(state.step) == host["data"]["next_batch"] == 3
    layers = canonical(trainer, state).params["layers"]
    biases = np.stack([layer["moe"]["router"]["bias"] for layer in layers])
    assert biases.dtype == np.float32
    assert np.all(np.abs(biases).max(axis=-1) > 0), "the case is about biases that have moved"
    assert result.metrics[0]["expert_load_max_over_mean"] > 1.1


def test_a_finished_run_does_nothing(tmp_path, text_file):
    config = tiny_run.run_config(tiny_run.config(), tmp_path, text_file, stop_at=2)
    finished = train(config)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    again = train(config)
    assert again.metrics == []
    assert tiny_run.differing(again.state, finished.state) == []
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_resume_off_is_refused(tmp_path, text_file):
    """And leaves the folder as it was."""
    train(tiny_run.run_config(tiny_run.config(), tmp_path, text_file, stop_at=2))
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ConfigError, match=r"has checkpoints up to step 2 and checkpoint.resume is off"):
        train(tiny_run.run_config(tiny_run.config(), tmp_path, text_file, resume=False))
    assert (tmp_path / "config.json").read_bytes() == before


def test_three_steps_that_are_not_finite_stop_the_run(tmp_path, text_file):
    """Case 26: loudly, with the skipped steps in the metrics and no checkpoint made of them."""
    trainer = tiny_run.trainer_of(tiny_run.config())
    train(tiny_run.run_config(tiny_run.config(), tmp_path, text_file, stop_at=1))
    state, host = _saved(trainer, tmp_path, 1)
    table = state.params.shared["embedding"]["table"]
    state.params.shared["embedding"]["table"] = jax.device_put(table.at[97].set(np.nan), table.sharding)
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        save(trainer, checkpoints, 2, state, host)
    where = r"first in the forward of the first function \(rank \d\) for microbatch \d.*"
    where += r"not finite to begin with: shared\['embedding'\]\['table'\]"
    with pytest.raises(NonFiniteError, match=f"3 steps in a row, the last of them 5: .*{where}"):
        train(tiny_run.run_config(tiny_run.config(), tmp_path, text_file))
    lines = read_metrics(tmp_path)
    assert [(line["step"], line["skipped"]) for line in lines[-3:]] == [(3, 1), (4, 1), (5, 1)]
    assert lines[-1]["loss"] is None
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.latest() == 2
