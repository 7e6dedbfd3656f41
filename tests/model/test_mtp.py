"""Multi-token prediction: what it predicts, what it adds to the loss, and the same through a pipeline."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax import build, make_mesh, pipeline_value_and_grad, reference_value_and_grad
from dualpipe_jax.config import ModelConfig
from dualpipe_jax.model.model import Model, expert_specs, with_weights
from dualpipe_jax.model.mtp import second_targets
from dualpipe_jax.model.partition import from_pipeline, from_stages, partition, to_pipeline, to_stages
from moe.config import MoEConfig

SEQ, VOCAB = 8, 13
MOE = MoEConfig(d_ff=8, num_experts=4, top_k=2, block_size=4, balance_loss_weight=0.1, scoring="sigmoid")
CONFIG = ModelConfig(
    vocab_size=VOCAB, d_model=16, num_layers=3, num_heads=2, num_kv_heads=1, d_ff=12, mtp_depth=1, moe=MOE
)
TOLERANCE = 1e-5  # float32, sums in another order


@cache
def params_of(config):
    params = jax.jit(Model(config, 1, SEQ).init)(jax.random.key(0))
    return {**params, "embedding": {"table": 50.0 * params["embedding"]["table"]}}  # of size one, see the equality grid


def batch_of(rows):
    tokens = np.random.default_rng(0).integers(0, VOCAB, (rows, SEQ), dtype=np.int32)
    return {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1)}


def unpipelined(config, batch):
    model = Model(config, batch["tokens"].shape[0], SEQ)
    stages = partition(config.num_layers, model.num_dense, 1)
    run = jax.jit(lambda *args: reference_value_and_grad(model.stage_fns(stages), *args))
    one = with_weights(jax.tree.map(lambda a: jnp.asarray(a)[None], batch))
    (loss, (_, last)), grads = run(*to_stages(params_of(config), stages), one)
    return loss, last, from_stages(*grads, stages)


def forward(config, batch):
    """(loss, statistics of the last function, loss of the layers) without gradients."""
    model = Model(config, batch["tokens"].shape[0], SEQ)
    fns = model.stage_fns(partition(config.num_layers, model.num_dense, 1))

    @jax.jit
    def run(params, batch):
        out = fns.per_stage(1)[0]({"layers": params["layers"]}, params, fns.first(params, batch), batch)
        return *fns.last(params, out.y, batch), out.loss

    return run(params_of(config), with_weights(jax.tree.map(jnp.asarray, batch)))


def test_targets_are_one_further_on():
    batch = with_weights({"targets": jnp.asarray([[1, 2, -1, 4], [5, 6, 7, 8]], jnp.int32)})
    targets, weights = second_targets(batch)
    assert targets.tolist() == [[2, -1, 4, -1], [6, 7, 8, -1]]
    np.testing.assert_allclose(weights[0, :3], [1 / 7, 0, 1 / 7])
    packed = {**batch, "segments": jnp.asarray([[1, 1, 2, 2], [1, 2, 2, 2]], jnp.int32)}
    assert second_targets(packed)[0].tolist() == [[2, -1, 4, -1], [-1, 7, 8, -1]]


def test_the_rest_of_the_model_is_as_without():
    without = dataclasses.replace(CONFIG, mtp_depth=0)
    ours, theirs = params_of(CONFIG), params_of(without)
    jax.tree.map(np.testing.assert_array_equal, {k: v for k, v in ours.items() if k != "mtp"}, theirs)
    loss, last, layers = forward(CONFIG, batch_of(2))
    plain, last_plain, layers_plain = forward(without, batch_of(2))
    assert float(layers) == pytest.approx(float(layers_plain), rel=TOLERANCE)
    assert float(last["cross_entropy"]) == pytest.approx(float(last_plain["cross_entropy"]), rel=TOLERANCE)
    # On top comes the layer's balance loss: 0.1 if its experts are evenly used, and not more than twice that (2 of 4).
    second = 0.3 * float(last["mtp"]["cross_entropy"])
    assert second + 0.05 < float(loss) - float(plain) < second + 0.2 + TOLERANCE
    assert int(last["mtp"]["counts"].sum()) == 2 * SEQ * MOE.top_k


def test_it_sees_the_next_token_and_no_further():
    """With another token at 5, what it says of target 5 changes: that comes from position 4, whose next token it is."""
    config = dataclasses.replace(CONFIG, num_layers=2, moe=None)
    model, params = Model(config, 1, SEQ), params_of(config)
    stages = partition(2, 0, 1)

    @jax.jit
    def losses(tokens):
        """Of a single target at each position in turn, all of them 3: (the head's, the second token's)."""

        def one(position):
            targets = jnp.where(jnp.arange(SEQ)[None, :] == position, 3, -1).astype(jnp.int32)
            batch = {"tokens": tokens, "targets": targets, "weights": jnp.ones((1, SEQ), jnp.float32)}
            fns = model.stage_fns(stages)
            x = fns.per_stage(1)[0]({"layers": params["layers"]}, params, fns.first(params, batch), batch).y
            stats = fns.last(params, x, batch).stats
            return stats["cross_entropy"], stats["mtp"]["cross_entropy"]

        return jax.vmap(one)(jnp.arange(SEQ))

    tokens = jnp.asarray(batch_of(1)["tokens"])
    (head, second), (head_changed, second_changed) = losses(tokens), losses(tokens.at[0, 5].add(1) % VOCAB)
    differs = lambda a, b: np.flatnonzero(np.abs(np.asarray(a - b)) > 1e-4).tolist()  # noqa: E731
    assert differs(head, head_changed) == [5, 6, 7]
    assert differs(second, second_changed) == [5, 6, 7]
    assert second[0] == 0, "the first target is nobody's second"


def check_pipelined(name, pp, microbatches, ep, recompute=False, uneven=1):
    rows = microbatches * ep
    schedule = build(name, num_ranks=pp, num_microbatches=microbatches)
    num_stages = schedule.placement.num_stages
    config = dataclasses.replace(CONFIG, num_layers=num_stages + uneven)
    want_loss, want_last, want = unpipelined(config, batch_of(rows))
    model = Model(config, rows, SEQ, "ep" if ep > 1 else None, recompute)
    stages = partition(config.num_layers, model.num_dense, num_stages)
    params = to_pipeline(params_of(config), stages, schedule.placement)
    grad_fn = pipeline_value_and_grad(
        model.stage_fns(stages),
        schedule,
        mesh=make_mesh(pp, 1, ep),
        stage_specs=expert_specs(params.stages[0]),
        shared_specs=expert_specs(params.shared),
    )
    cut = with_weights({k: jnp.asarray(v.reshape(microbatches, -1, SEQ)) for k, v in batch_of(rows).items()})
    (loss, aux), grads = jax.device_get(jax.jit(grad_fn)(params, cut))
    assert float(loss) == pytest.approx(float(want_loss), rel=TOLERANCE)
    np.testing.assert_array_equal(aux.last["mtp"]["counts"], want_last["mtp"]["counts"])

    def close(path, got, want):
        scale = max(float(np.abs(want).max()), 1e-8)
        assert np.abs(np.asarray(got) - np.asarray(want)).max() <= TOLERANCE * scale, jax.tree_util.keystr(path)

    jax.tree_util.tree_map_with_path(close, from_pipeline(grads, stages, schedule.placement), want)


def test_through_a_pipeline():
    """DualPipe, and more layers, are under `slow`: they compile for longer."""
    check_pipelined("1f1b", 2, 2, 2, uneven=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        ("1f1b", 2, 3, 2, True),
        ("dualpipe", 2, 4, 2, False),
        ("dualpipe_v", 2, 4, 1, True),
        ("dualpipe", 4, 8, 2, False),
    ],
)
def test_pipelines(case):
    check_pipelined(*case)
