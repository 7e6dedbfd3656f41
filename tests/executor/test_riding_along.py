"""Several inputs and outputs a stage: pytrees with integer leaves (positions, documents) that ride along."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax import (
    PipelineParams,
    StageFns,
    build,
    make_mesh,
    pipeline_value_and_grad,
    reference_value_and_grad,
    stack_stages,
    unstack_stages,
)

# float32: sums over microbatches and shards in another order.
TOLERANCE = 1e-5
WIDTH, ROWS, SEQ, MICROBATCHES = 8, 4, 6, 4


def first(shared, microbatch):
    """Two streams of floats, integers of every row, a scalar that counts stages, and a leaf that is not there."""
    x = jnp.take(shared["embedding"], microbatch["tokens"], axis=0)
    positions = jnp.broadcast_to(jnp.arange(SEQ, dtype=jnp.int32), microbatch["tokens"].shape)
    return {
        "streams": (x, jnp.tanh(x)),
        "positions": positions,
        "documents": microbatch["documents"],
        "depth": jnp.int32(0),
        "cache": None,
    }


def stage(params, shared, carried, microbatch):
    """Attention inside a document, mixed into the other stream; positions are shifted and the depth counted."""
    x, gate = carried["streams"]
    angle = carried["positions"].astype(jnp.float32)[..., None] * 0.1
    q = (x @ params["q"]) * jnp.cos(angle)
    same = carried["documents"][:, :, None] == carried["documents"][:, None, :]
    scores = jnp.where(same, jnp.einsum("bid,bjd->bij", q, x), -1e9)
    y = x + jnp.einsum("bij,bjd->bid", jax.nn.softmax(scores), gate)
    gate = gate * (1.0 + 0.1 * carried["depth"].astype(jnp.float32)) + jnp.sin(y @ params["w"])
    return {
        **carried,
        "streams": (y, gate),
        "positions": (carried["positions"] + params["shift"]) % SEQ,
        "depth": carried["depth"] + 1,
    }


def last(shared, carried, microbatch):
    y, gate = carried["streams"]
    weights = (carried["positions"] + carried["depth"]).astype(jnp.float32)[..., None]
    return jnp.sum(weights * y * gate * microbatch["scale"])


def problem(num_stages):
    def parameters(i):
        q, w = (jax.random.normal(jax.random.fold_in(jax.random.key(i), j), (WIDTH, WIDTH)) / 3 for j in (0, 1))
        return {"q": q, "w": w, "shift": jnp.int32(i)}

    keys = jax.random.split(jax.random.key(7), 3)
    batch = {
        "tokens": jax.random.randint(keys[0], (MICROBATCHES, ROWS, SEQ), 0, 11),
        "documents": jnp.sort(jax.random.randint(keys[1], (MICROBATCHES, ROWS, SEQ), 0, 3), axis=-1),
        "scale": jnp.linspace(0.5, 1.5, MICROBATCHES),  # one value a microbatch
    }
    shared = {"embedding": jax.random.normal(keys[2], (11, WIDTH))}
    return [parameters(i) for i in range(num_stages)], shared, batch


@pytest.mark.parametrize("form", ["operations", "cells"])
@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "dualpipe_v"])
def test_integers_ride_along(name, form):
    schedule = build(name, num_ranks=2, num_microbatches=MICROBATCHES)
    fns, (stages, shared, batch) = StageFns(first, stage, last), problem(schedule.placement.num_stages)
    params = PipelineParams(stack_stages(stages, schedule.placement), shared)
    grad_fn = pipeline_value_and_grad(fns, schedule, mesh=make_mesh(2, 2), form=form)
    (loss, _), grads = jax.device_get(jax.jit(grad_fn)(params, batch))
    (want_loss, _), want = jax.jit(lambda *a: reference_value_and_grad(fns, *a))(stages, shared, batch)
    got = (unstack_stages(grads.stages, schedule.placement), grads.shared)
    jax.tree.map(assert_close, (loss, *got), (want_loss, *want))
    assert all(tree["shift"].dtype == jnp.float32 and not tree["shift"] for tree in got[0])  # integers have no gradient


def assert_close(got, want):
    scale = max(float(jnp.max(jnp.abs(want))), 1e-6)
    np.testing.assert_allclose(np.asarray(got) / scale, np.asarray(want) / scale, rtol=0, atol=TOLERANCE)
