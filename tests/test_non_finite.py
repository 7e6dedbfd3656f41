"""Where a value stopped being finite is said by rank, stage, microbatch and leaf."""

import gc

import jax
import jax.numpy as jnp
import pytest

from dualpipe_jax import (
    PipelineParams,
    StageFns,
    StageOutput,
    build,
    find_non_finite,
    make_mesh,
    pipeline_value_and_grad,
    stack_stages,
)

WIDTH, ROWS, VOCAB = 4, 4, 11


def first(shared, microbatch):
    return {"x": jnp.take(shared["embedding"], microbatch["tokens"], axis=0), "depth": jnp.int32(0)}


def stage(params, shared, carried, microbatch):
    del shared
    # Every shard sees the others' mean, as a balance loss would: a collective over data axes.
    mean = jax.lax.pmean(jnp.mean(carried["x"]), ("dp", "ep"))
    x = carried["x"] + jnp.tanh(carried["x"] @ params["w"]) + 0.1 * mean
    return StageOutput({"x": x, "depth": carried["depth"] + params["number"] * 0 + 1}, 1e-3 * jnp.sum(x**2))


def last(shared, carried, microbatch):
    root = jnp.sqrt(jnp.sum(carried["x"] ** 2, axis=-1) * microbatch["scale"])
    return jnp.sum(root) * microbatch["weight"] + jnp.sum(shared["bias"])


def problem(name="1f1b", pp=4, dp=1, ep=1):
    microbatches = 2 * max(pp, 2)
    schedule = build(name, num_ranks=pp, num_microbatches=microbatches)
    keys = jax.random.split(jax.random.key(1), schedule.placement.num_stages + 2)
    stages = [{"w": jax.random.normal(k, (WIDTH, WIDTH)) / 2, "number": jnp.int32(i)} for i, k in enumerate(keys[2:])]
    shared = {"embedding": jax.random.normal(keys[0], (VOCAB, WIDTH)), "bias": jnp.zeros(2)}
    batch = {
        "tokens": jax.random.randint(keys[1], (microbatches, ROWS), 0, VOCAB),
        "scale": jnp.ones((microbatches, ROWS)),
        "weight": jnp.ones(microbatches),
    }
    return schedule, make_mesh(pp, dp, ep), stages, shared, batch


def found(schedule, mesh, stages, shared, batch):
    """The answer; and a check that the step itself came out as not finite."""
    fns, params = StageFns(first, stage, last), PipelineParams(stack_stages(stages, schedule.placement), shared)
    (loss, _), grads = jax.device_get(jax.jit(pipeline_value_and_grad(fns, schedule, mesh=mesh))(params, batch))
    finite = bool(jnp.isfinite(loss)) and all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(grads))
    answer = find_non_finite(fns, schedule, params, batch, mesh=mesh)
    assert (answer is None) == finite
    return answer, loss


def test_all_is_finite():
    assert found(*problem("dualpipe_v", 2, 2))[0] is None


@pytest.mark.parametrize(("name", "pp", "rank"), [("1f1b", 4, 2), ("dualpipe_v", 2, 1), ("dualpipe", 4, 2)])
def test_a_weight(name, pp, rank):
    schedule, mesh, stages, shared, batch = problem(name, pp, 2)
    stages[2] = {**stages[2], "w": stages[2]["w"].at[1, 2].set(jnp.nan)}
    answer, _ = found(schedule, mesh, stages, shared, batch)
    where = (answer.phase, answer.piece, answer.stage, answer.rank, answer.microbatch, answer.shards)
    assert where == ("forward", "stage", 2, rank, 0, (0, 1))
    assert answer.values == ("loss", "output['x']")
    assert (answer.parameters, answer.batch) == (("stages[2]['w']",), ())
    assert str(answer) == (
        f"first in the forward of stage 2 (rank {rank}) for microbatch 0 on data shards 0, 1: loss, output['x']; "
        "not finite to begin with: stages[2]['w']"
    )


def test_a_token_beyond_the_table():
    schedule, mesh, stages, shared, batch = problem("1f1b", 2, 2)
    batch["tokens"] = batch["tokens"].at[3, ROWS - 1].set(VOCAB)
    answer, _ = found(schedule, mesh, stages, shared, batch)
    where = (answer.phase, answer.piece, answer.stage, answer.rank, answer.microbatch, answer.shards)
    assert where == ("forward", "first", 0, 0, 3, (1,))
    assert str(answer).endswith("on data shard 1: output['x']; all parameters and the batch are finite")


def test_the_other_direction_enters_at_the_last_rank():
    schedule, mesh, stages, shared, batch = problem("dualpipe", 4)
    batch["tokens"] = batch["tokens"].at[5, 0].set(VOCAB)
    answer, _ = found(schedule, mesh, stages, shared, batch)
    assert (answer.piece, answer.rank, answer.microbatch) == ("first", 3, 5)


def test_an_overflow_in_the_loss():
    schedule, mesh, stages, shared, batch = problem("1f1b", 2)
    batch["weight"] = batch["weight"].at[1].set(3e38)
    answer, loss = found(schedule, mesh, stages, shared, batch)
    assert jnp.isinf(loss)
    assert (answer.phase, answer.piece, answer.stage, answer.rank) == ("forward", "last", 1, 1)
    assert (answer.microbatch, answer.values, answer.batch) == (1, ("loss",), ())


def test_a_gradient_that_is_not_finite_though_the_loss_is():
    """d sqrt(u) / du at 0."""
    schedule, mesh, stages, shared, batch = problem("1f1b", 2, 1, 2)
    batch["scale"] = batch["scale"].at[2, 0].set(0.0)
    answer, loss = found(schedule, mesh, stages, shared, batch)
    assert jnp.isfinite(loss)
    where = (answer.phase, answer.piece, answer.stage, answer.rank, answer.microbatch, answer.shards)
    assert where == ("backward", "last", 1, 1, 2, (0,))
    assert answer.values == ("gradient of the input['x']",)


def test_a_leaf_of_the_batch_is_named():
    schedule, mesh, stages, shared, batch = problem("1f1b", 2)
    batch["scale"] = batch["scale"].at[2, 1].set(jnp.inf)
    shared["bias"] = shared["bias"].at[0].set(jnp.inf)
    answer, _ = found(schedule, mesh, stages, shared, batch)
    assert (answer.microbatch, answer.piece) == (0, "last")  # the bias is in every microbatch
    assert answer.batch == ("batch['scale'] in microbatch 2",)
    assert answer.parameters == ("shared['bias']",)


def test_a_sum_that_overflows_is_no_microbatch_s_fault():
    """Each microbatch adds 2e38."""
    schedule, mesh, stages, shared, batch = problem("1f1b", 2)
    shared["bias"] = jnp.array([2e38, 0.0])
    fns, params = StageFns(first, stage, last), PipelineParams(stack_stages(stages, schedule.placement), shared)
    (loss, _), _ = jax.jit(pipeline_value_and_grad(fns, schedule, mesh=mesh))(params, batch)
    assert jnp.isinf(loss)
    assert find_non_finite(fns, schedule, params, batch, mesh=mesh) is None


def test_failed_steps_leave_no_arrays_behind():
    """Steps that are not finite, searches, and calls that are refused."""
    schedule, mesh, stages, shared, batch = problem("1f1b", 2)
    shared["bias"] = shared["bias"] * jnp.nan
    fns, params = StageFns(first, stage, last), PipelineParams(stack_stages(stages, schedule.placement), shared)
    step = jax.jit(pipeline_value_and_grad(fns, schedule, mesh=mesh))

    def fail():
        assert not jnp.isfinite(step(params, batch)[0][0])
        assert find_non_finite(fns, schedule, params, batch, mesh=mesh)
        with pytest.raises(ValueError, match="dim 0 must be"):
            step(params, {"tokens": batch["tokens"][:2]})
        gc.collect()
        return len(jax.live_arrays())

    assert fail() == fail()


def test_a_mesh_of_ranks_only():
    schedule, _, stages, shared, batch = problem("1f1b", 2)
    mesh = jax.make_mesh((2,), ("pp",), axis_types=(jax.sharding.AxisType.Auto,))
    fns = StageFns(lambda s, m: m["scale"], lambda p, s, x, m: x @ p["w"], lambda s, y, m: jnp.sum(y))
    stages[1]["w"] = stages[1]["w"] * jnp.nan
    params = PipelineParams(stack_stages(stages, schedule.placement), shared)
    answer = find_non_finite(fns, schedule, params, batch, mesh=mesh)
    assert (answer.stage, answer.rank, answer.microbatch, answer.shards) == (1, 1, 0, (0,))
