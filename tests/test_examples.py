"""The example programs: they train, and compute what the unpipelined reference computes."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from dualpipe_jax import (
    PipelineParams,
    make_mesh,
    pipeline_value_and_grad,
    reference_value_and_grad,
    stack_stages,
    unstack_stages,
)

EXAMPLES = Path(__file__).parent.parent / "dualpipe_jax" / "docs" / "examples"
NAMES = ("with_plain_jax", "with_flax_nnx", "with_equinox")
# float32: sums over microbatches in another order.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _as_a_newcomer():
    """JAX's own defaults: third-party layers are not written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_are_listed():
    assert {p.stem for p in EXAMPLES.glob("*.py")} == set(NAMES)
    assert all(f"`{name}.py`" in (EXAMPLES / "README.md").read_text() for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_the_reference(name):
    example = load(name)
    key = 1 if name == "with_flax_nnx" else jax.random.key(1)
    (stages, shared), batch, placement = example.init(key), example.batch_of(3), example.SCHEDULE.placement
    grad_fn = pipeline_value_and_grad(example.FNS, example.SCHEDULE, mesh=make_mesh(2))
    (loss, _), grads = jax.device_get(jax.jit(grad_fn)(PipelineParams(stack_stages(stages, placement), shared), batch))
    (want_loss, _), want = jax.jit(lambda *a: reference_value_and_grad(example.FNS, *a))(stages, shared, batch)
    np.testing.assert_allclose(loss, want_loss, rtol=TOLERANCE)
    got = (unstack_stages(grads.stages, placement), grads.shared)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(assert_close, got, want)


def assert_close(got, want):
    scale = float(np.max(np.abs(want)))
    assert scale > 0
    np.testing.assert_allclose(np.asarray(got) / scale, np.asarray(want) / scale, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "name", [n if n == "with_plain_jax" else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_losses_fall(name, capsys):
    losses = load(name).train(steps=12)
    assert losses[-1] < 0.6 * losses[0]
    assert capsys.readouterr().out.count("loss") == 12


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_runs_as_a_program(name, tmp_path):
    """With nothing set up: no devices, no settings."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]
    env["PYTHONPATH"] = str(EXAMPLES.parents[2])
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 30
    assert losses[-1] < 0.2 * losses[0]
