"""The tiny models of tests/data/hf, and our model on their inputs."""

import dataclasses
import json
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from dualpipe_jax import build, make_mesh, pipeline_value_and_grad, reference_value_and_grad
from dualpipe_jax.hf import load_config, load_params, model_config, to_tensors
from dualpipe_jax.model.model import Model, expert_specs
from dualpipe_jax.model.partition import from_pipeline, from_stages, partition, to_pipeline, to_stages

DATA = Path(__file__).parent.parent / "data" / "hf"
CASES = [
    "deepseek_v3_basic",
    "deepseek_v3_bias",
    "deepseek_v3_no_q_lora",
    "deepseek_v3_yarn",
    "mixtral_tiny",
    "qwen3_moe_tiny",
]
VARIANTS = [
    (path.parent.name, path.name.split(".")[1])
    for path in sorted(DATA.glob("*/config.*.json"))
    if not path.name.endswith("hub_legacy.json")  # the same model, not another one
]

# float32 against float32 in other orders of summation; a float64 run of the original is as far off (5e-6 in logits,
# 3e-7 in losses, 5e-6 of the largest gradient), every mistake in the model tried there at least 0.05 in the logits.
LOGITS, LOSS, GRADIENT = 5e-5, 1e-5, 5e-5


@cache
def tensors(case, name):
    return load_file(DATA / case / f"{name}.safetensors")


@cache
def params_of(case):
    return jax.tree.map(jnp.asarray, load_params(DATA / case))


def config_of(case, variant=None):
    if variant is None:
        return load_config(DATA / case)
    return model_config(json.loads((DATA / case / f"config.{variant}.json").read_text()))


@cache
def model_of(config, axis=None):
    return Model(config, num_sequences=3, seq_len=24, axis=axis)


@partial(jax.jit, static_argnums=0)
def logits_of(model, params, tokens, segments=None):
    return model.logits(params, tokens, segments)


def batch_of(case):
    """[3, 24], weighted so that the sum of losses is `loss_hf`."""
    inputs = tensors(case, "inputs")
    mask = inputs["loss_mask"].astype(np.float32)
    return {
        "tokens": inputs["input_ids"],
        "targets": np.where(mask > 0, inputs["targets"], -1).astype(np.int32),
        "weights": mask / mask.sum(),
    }


@cache
def unpipelined(case):
    """(loss, gradients as our tree, counts of each layer's experts) with no pipeline, the batch at once."""
    config = config_of(case)
    model = model_of(config)
    stages = partition(config.num_layers, model.num_dense, 1)
    run = jax.jit(partial(reference_value_and_grad, model.stage_fns(stages)))
    batch = jax.tree.map(lambda a: jnp.asarray(a)[None], batch_of(case))
    (loss, (stats, _)), grads = run(*to_stages(params_of(case), stages), batch)
    return loss, from_stages(*grads, stages), np.asarray(stats[0]["counts"])


def pipelined(case, name, pp, microbatches, ep, **options):
    """The same through a pipeline. Rows without a target fill the batch up: routed like any other, they add no loss."""
    config = config_of(case)
    schedule = build(name, num_ranks=pp, num_microbatches=microbatches, **options)
    num_stages = schedule.placement.num_stages
    model = dataclasses.replace(model_of(config, "ep" if ep > 1 else None), num_sequences=microbatches * ep)
    stages = partition(config.num_layers, model.num_dense, num_stages)
    params = to_pipeline(params_of(case), stages, schedule.placement)
    grad_fn = pipeline_value_and_grad(
        model.stage_fns(stages), schedule, mesh=make_mesh(pp, 1, ep), stage_specs=expert_specs(params.stages[0])
    )
    (loss, _), grads = jax.device_get(jax.jit(grad_fn)(params, _filled_up(batch_of(case), microbatches, ep)))
    return loss, from_pipeline(grads, stages, schedule.placement)


def _filled_up(batch, microbatches, rows):
    empty = {"tokens": 0, "targets": -1, "weights": 0.0}
    missing = microbatches * rows - 3
    return {
        name: jnp.asarray(np.pad(a, [(0, missing), (0, 0)], constant_values=empty[name])).reshape(
            microbatches, rows, 24
        )
        for name, a in batch.items()
    }


def assert_gradients(config, got, case):
    """Each tensor's gradient, relative to its largest entry; exactly zero where nothing reached it."""
    ours, worst = to_tensors(config, got), {}
    for name, want in gradients_of(case).items():
        scale = np.abs(want).max()
        worst[name] = np.abs(ours[name] - want).max() / scale if scale else np.abs(ours[name]).max()
    bad = {name: value for name, value in worst.items() if value > GRADIENT}
    assert not bad, f"relative differences above {GRADIENT}: {bad}"


def gradients_of(case):
    return {k.removeprefix("grad."): v for k, v in tensors(case, "expected").items() if k.startswith("grad.")}
