"""Dropout with a key per (step, microbatch, layer, data shard): the same masks whatever the pipeline."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax import (
    PipelineParams,
    StageFns,
    build,
    dropout_key,
    dropout_leaves,
    make_mesh,
    pipeline_value_and_grad,
    reference_value_and_grad,
    stack_stages,
    unstack_stages,
)

# float32: sums over microbatches and shards in another order. A single other mask would show as 1e-2 or more.
TOLERANCE = 1e-5
LAYERS, WIDTH, ROWS, MICROBATCHES, KEEP = 4, 8, 4, 4, 0.7
AXES = ("dp", "ep")


def model(num_stages, shard, *, recompute=False):
    """LAYERS layers in any number of stages; shard: () -> the number of the data shard."""

    def layer(params, x, microbatch):
        key = dropout_key(*microbatch["dropout"], layer=params["layer"], shard=shard())
        mask = jax.random.bernoulli(key, KEEP, x.shape)
        return x + jnp.where(mask, jnp.tanh(x @ params["w"]), 0.0) / KEEP

    def stage(params, shared, x, microbatch):
        for layer_params in params:
            x = (jax.checkpoint(layer) if recompute else layer)(layer_params, x, microbatch)
        return x

    layers = [{"w": jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)), "layer": jnp.int32(i)} for i in range(LAYERS)]
    per_stage = LAYERS // num_stages
    fns = StageFns(lambda shared, m: m["x"], stage, lambda shared, y, m: jnp.sum(jnp.sin(y)))
    return fns, [layers[s * per_stage : (s + 1) * per_stage] for s in range(num_stages)]


def batch_of(step=3):
    x = jax.random.normal(jax.random.key(99), (MICROBATCHES, ROWS, WIDTH))
    return {"x": x, "dropout": dropout_leaves(jax.random.key(5), step, MICROBATCHES)}


def reference(shards, step=3):
    """Loss and gradients by layer with no pipeline; each shard's rows on their own."""
    totals = []
    for shard in range(shards):
        fns, stages = model(1, lambda shard=shard: shard)
        batch = batch_of(step)
        rows = slice(shard * ROWS // shards, (shard + 1) * ROWS // shards)
        batch = {**batch, "x": batch["x"][:, rows]}
        (loss, _), (grads, _) = jax.jit(lambda *a, fns=fns: reference_value_and_grad(fns, *a))(stages, {}, batch)
        totals.append((loss, grads[0]))
    return jax.tree.map(lambda *a: sum(a), *totals)


def pipelined(name, pp, dp=1, step=3, **options):
    schedule = build(name, num_ranks=pp, num_microbatches=MICROBATCHES)
    fns, stages = model(schedule.placement.num_stages, lambda: jax.lax.axis_index(AXES), **options)
    params = PipelineParams(stack_stages(stages, schedule.placement), {})
    grad_fn = pipeline_value_and_grad(fns, schedule, mesh=make_mesh(pp, dp))
    (loss, _), grads = jax.device_get(jax.jit(grad_fn)(params, batch_of(step)))
    return loss, list(itertools.chain(*unstack_stages(grads.stages, schedule.placement)))


def assert_close(got, want):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=TOLERANCE * float(jnp.max(abs(want))))


@pytest.mark.parametrize("dp", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "dualpipe_v"])
def test_the_same_masks_whatever_the_pipeline(name, dp):
    loss, layers = pipelined(name, 2, dp)
    want_loss, want = reference(dp)
    assert_close(loss, want_loss)
    for got, expected in zip(layers, want, strict=True):
        assert_close(got["w"], expected["w"])
        assert got["layer"] == 0.0
        assert got["layer"].dtype == jnp.float32  # an integer leaf has no gradient


@pytest.mark.parametrize(("name", "pp"), [("zb_h1", 4), ("dualpipe", 2)])
def test_the_same_masks_when_layers_are_recomputed(name, pp):
    got, want = pipelined(name, pp, recompute=True), reference(1)
    assert_close(got[0], want[0])
    jax.tree.map(assert_close, [g["w"] for g in got[1]], [w["w"] for w in want[1]])


def test_no_pipeline_but_the_same_shards():
    assert_close(pipelined("1f1b", 1, 2)[0], reference(2)[0])


def test_every_index_and_the_run_s_key_make_other_masks():
    def mask(seed=0, step=1, microbatch=1, layer=1, shard=1):
        leaves = dropout_leaves(jax.random.key(seed), step, 4)
        key = dropout_key(*jax.tree.map(lambda a: a[microbatch], leaves), layer=layer, shard=shard)
        return jax.random.bits(key, (8,)).tobytes()

    masks = {mask(), mask(seed=1), mask(step=2), mask(microbatch=2), mask(layer=2), mask(shard=2)}
    # The order of folding matters, or two of these would meet.
    masks |= {mask(step=0, shard=2), mask(step=2, shard=0), mask(microbatch=0, layer=2), mask(microbatch=2, layer=0)}
    assert len(masks) == 10
    assert mask() == mask()


def test_the_order_of_folding_is_as_documented():
    key = jax.random.key(11)
    want = key
    for index in (5, 2, 7, 3):
        want = jax.random.fold_in(want, index)
    leaves = jax.tree.map(lambda a: a[2], dropout_leaves(key, 5, 4))
    for got in (dropout_key(*leaves, layer=7, shard=3), dropout_key(jax.random.key_data(key), 5, 2, layer=7, shard=3)):
        assert jax.random.key_data(got).tolist() == jax.random.key_data(want).tolist()


def test_another_step_is_another_loss():
    assert abs(float(pipelined("1f1b", 2, step=4)[0] - pipelined("1f1b", 2, step=3)[0])) > 1e-2


def test_typed_keys_are_refused_before_tracing():
    schedule = build("1f1b", num_ranks=2, num_microbatches=MICROBATCHES)
    fns, stages = model(2, lambda: 0)
    grad_fn = pipeline_value_and_grad(fns, schedule, mesh=make_mesh(2))
    params = PipelineParams(stack_stages(stages, schedule.placement), {})
    keys = jax.random.split(jax.random.key(0), MICROBATCHES)
    with pytest.raises(ValueError, match=r"batch\['key'\] holds typed random keys .*; pass jax.random.key_data"):
        grad_fn(params, {**batch_of(), "key": keys})
    with pytest.raises(ValueError, match=r"params.shared\['rng'\] holds typed random keys"):
        grad_fn(params._replace(shared={"rng": jax.random.key(0)}), batch_of())


def test_a_key_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="of dtype key<rbg>, typed keys of the default implementation are key<fry>"):
        dropout_leaves(jax.random.key(0, impl="rbg"), 0, 4)
