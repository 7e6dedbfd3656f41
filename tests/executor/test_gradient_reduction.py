"""Gradients are reduced over data shards once a step, after the last tick; several calls add up to one."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dualpipe_jax import PipelineParams, StageFns, build, make_mesh, pipeline_value_and_grad, stack_stages

# float32: the same terms, summed in another order.
TOLERANCE = 1e-5
WIDTH, ROWS, EXPERTS = 8, 8, 2


def stage(params, shared, x, microbatch):
    x = x + jnp.tanh(x @ params["w"]) @ shared["mix"]
    return x + jnp.sin(x @ params["experts"][0])  # the shard's own expert


def last(shared, y, microbatch):
    return jnp.sum(jnp.sin(y @ shared["mix"]) * microbatch["weight"])


FNS = StageFns(lambda shared, m: m["x"], stage, last)
STAGE_SPECS = {"w": PartitionSpec(), "experts": PartitionSpec("ep")}


def problem(schedule, microbatches=None):
    m = microbatches or schedule.num_microbatches
    keys = jax.random.split(jax.random.key(0), schedule.placement.num_stages + 1)
    stages = [
        {
            "w": jax.random.normal(k, (WIDTH, WIDTH)) / 3,
            "experts": jax.random.normal(k, (EXPERTS, WIDTH, WIDTH)) / 3,
        }
        for k in keys[1:]
    ]
    shared = {"mix": jax.random.normal(keys[0], (WIDTH, WIDTH)) / 3}
    batch = {"x": jax.random.normal(keys[0], (m, ROWS, WIDTH)), "weight": jnp.linspace(0.5, 1.5, m)}
    return PipelineParams(stack_stages(stages, schedule.placement), shared), batch


def grad_fn_of(schedule, dp=2, ep=2):
    mesh = make_mesh(schedule.placement.num_ranks, dp, ep)
    return pipeline_value_and_grad(FNS, schedule, mesh=mesh, stage_specs=STAGE_SPECS)


def all_reduces(program):
    """(is it in the entry computation, number of devices that sum, shapes) of each all-reduce of a compiled program."""
    entry = False
    for line in program.as_text().splitlines():
        if line and not line[0].isspace():
            entry = line.startswith("ENTRY")
        found = re.search(r"= (\(.*?\)|\S+) all-reduce(-start)?\(.*replica_groups=(.*)", line)
        if found:
            shapes = [tuple(map(int, filter(None, s.split(",")))) for s in re.findall(r"f32\[([\d,]*)\]", found[1])]
            yield entry, group_size(found[3]), shapes


def group_size(text):
    """Of `{{0,1},{2,3}}`, `[2,4]<=[8]` or `mesh['pp'=2,'dp'=2,'ep'=2] {'dp','ep'}`."""
    if text.startswith("mesh["):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", text))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'(?!=)", text.split("{")[1].split("}")[0]))
    if text.startswith("{"):
        return len(re.match(r"\{\{([\d,]+)\}", text)[1].split(","))
    return int(re.match(r"\[\d+,(\d+)\]", text)[1])


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "dualpipe_v"])
def test_each_gradient_is_reduced_once_after_the_loop(name):
    """Over data axes for a stage's, not over "ep" for an expert's, and over ranks too for the shared ones."""
    schedule = build(name, num_ranks=2, num_microbatches=8)
    params, batch = problem(schedule)
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        program = jax.jit(grad_fn_of(schedule)).lower(params, batch).compile()
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
    found = list(all_reduces(program))
    assert all(entry for entry, _, _ in found), "a reduction runs in every tick"
    elements = {}
    for _, size, shapes in found:
        elements[size] = elements.get(size, 0) + sum(math.prod(s) for s in shapes if s != ())
    slots = len(params.stages)  # each one stage of a rank
    # Expert weights over dp = 2; the others of a stage over dp x ep = 4; shared ones over all 8. Each once.
    assert elements == {2: slots * WIDTH * WIDTH, 4: slots * WIDTH * WIDTH, 8: WIDTH * WIDTH}


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "dualpipe_v"])
def test_two_calls_of_half_the_microbatches_are_one_call(name):
    """Gradient accumulation over calls, within one program."""
    whole, half = (build(name, num_ranks=2, num_microbatches=m) for m in (8, 4))
    params, batch = problem(whole)
    grad_fn = grad_fn_of(half)

    @jax.jit
    def accumulated(params, batch):
        halves = [jax.tree.map(lambda a, i=i: a[4 * i : 4 * i + 4], batch) for i in range(2)]
        results = [(loss, grads) for (loss, _), grads in (grad_fn(params, h) for h in halves)]
        return jax.tree.map(jnp.add, *results)

    (want_loss, _), want = jax.jit(grad_fn_of(whole))(params, batch)
    loss, grads = accumulated(params, batch)
    np.testing.assert_allclose(loss, want_loss, rtol=TOLERANCE)
    jax.tree.map(assert_close, grads, want)


def assert_close(got, want):
    scale = float(np.max(np.abs(want)))
    assert scale > 0
    np.testing.assert_allclose(np.asarray(got) / scale, np.asarray(want) / scale, rtol=0, atol=TOLERANCE)
