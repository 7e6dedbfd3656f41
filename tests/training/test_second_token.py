"""Training with multi-token prediction: its router is balanced like any other, and it is in every checkpoint."""

import jax
import numpy as np
import pytest
import tiny_run

from dualpipe_jax.train import canonical


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 1), pytest.param("dualpipe", 2, marks=pytest.mark.slow)])
def test_its_router_bias_follows_its_load(schedule, ranks):
    """Each of its experts moves by the rate, as in the trunk: after one step to +-0.01, or 0 at exactly the mean."""
    trainer = tiny_run.trainer_of(tiny_run.config(schedule, ranks, mtp_depth=1))
    state, metrics = trainer.step(trainer.init(), tiny_run.put(trainer, tiny_run.batch()))
    params = canonical(trainer, state).params
    own = np.asarray(params["mtp"]["block"]["moe"]["router"]["bias"])
    trunk = [np.asarray(layer["moe"]["router"]["bias"]) for layer in params["layers"]]
    for bias in (own, *trunk):
        assert np.isin(bias, np.float32([-0.01, 0, 0.01])).all()
    assert own.min() < 0 < own.max()
    assert bool(jax.device_get(metrics.finite))
    assert metrics.loss > metrics.cross_entropy, "the second token's loss is on top"
