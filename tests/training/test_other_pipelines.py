"""Case 29: a checkpoint of one mesh and schedule is restored under any other, bit for bit."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
import tiny_run

from dualpipe_jax.checkpoint import Checkpointer
from dualpipe_jax.train import canonical, restore, save, train

SAVED = ("dualpipe", 4, 2)
OTHERS = [("1f1b", 2, 1), ("dualpipe_v", 2, 2), ("1f1b", 1, 1), ("dualpipe", 2, 1)]
HOST = {"data": {"next_batch": 7}}


def config(schedule, pp, ep):
    """5 layers, of which the first is dense: no stage count divides them."""
    base = tiny_run.config(schedule, pp, ep, microbatches=8, num_layers=5, num_dense_layers=1)
    return dataclasses.replace(base, data=dataclasses.replace(base.data, batch_size=16))


def random_state(trainer):
    """A state without the compilation of `init` and of a step: each array full of other numbers."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(trainer.init)

    def fill(shape, sharding):
        return jax.device_put((1000 * rng.standard_normal(shape.shape)).astype(shape.dtype), sharding)

    return jax.tree.map(fill, shapes, trainer.state_shardings)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, the state by layer)"""
    folder, trainer = tmp_path_factory.mktemp("saved"), tiny_run.trainer_of(config(*SAVED))
    state = random_state(trainer)
    with Checkpointer(folder) as checkpoints:
        save(trainer, checkpoints, 7, state, HOST)
    return folder, canonical(trainer, state)


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: "-".join(map(str, other)))
def test_restored_bitwise(saved, other):
    folder, want = saved
    trainer = tiny_run.trainer_of(config(*other))
    with Checkpointer(folder) as checkpoints:
        state, host = restore(trainer, checkpoints, 7)
    assert tiny_run.differing(canonical(trainer, state), want) == []
    assert jax.tree.map(lambda a: a.sharding, state) == trainer.state_shardings
    assert host == HOST


@pytest.mark.slow
def test_training_goes_on(tmp_path, text_file):
    """Under each other pipeline the next step has the same loss: sums in another order, once."""

    def run(folder, pipeline, stop_at):
        return train(tiny_run.run_config(config(*pipeline), folder, text_file, stop_at=stop_at))

    run(tmp_path / "begun", SAVED, 3)
    want = None
    for other in [SAVED, *OTHERS]:
        folder = tmp_path / "-".join(map(str, other))
        shutil.copytree(tmp_path / "begun", folder)
        (line,) = run(folder, other, 4).metrics
        want = want or line
        assert line["step"] == 4
        np.testing.assert_allclose(line["loss"], want["loss"], rtol=1e-5)
        np.testing.assert_allclose(line["grad_norm"], want["grad_norm"], rtol=1e-5)
