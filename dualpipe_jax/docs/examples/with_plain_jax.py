"""A model of plain JAX functions, with dropout, trained on two emulated devices: python with_plain_jax.py"""

from dualpipe_jax.emulate import emulate_devices

if __name__ == "__main__":
    emulate_devices(2)  # before jax is imported; has no effect on accelerators

import jax
import jax.numpy as jnp
import optax

import dualpipe_jax as dpj

VOCAB, WIDTH, MICROBATCHES = 32, 32, 8
SCHEDULE = dpj.build("dualpipe_v", num_ranks=2, num_microbatches=MICROBATCHES)


def first(shared, microbatch):
    """What enters stage 0. It may be any pytree: the number of the layer rides along, for its dropout."""
    return {"x": jnp.take(shared["embedding"], microbatch["tokens"], axis=0), "layer": jnp.int32(0)}


def stage(params, shared, carried, microbatch):
    """What one stage does, here one layer: returns what it takes."""
    x, layer = carried["x"], carried["layer"]
    y = jnp.tanh(x @ params["up"]) @ params["down"]
    key = dpj.dropout_key(*microbatch["dropout"], layer=layer)  # and shard=, where dp or ep > 1
    y = jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y / 0.9, 0.0)
    return {"x": x + y, "layer": layer + 1}


def last(shared, carried, microbatch):
    """What this microbatch adds to the loss, which is the sum over all."""
    logp = jax.nn.log_softmax(carried["x"] @ shared["head"])
    return -jnp.mean(jnp.take_along_axis(logp, microbatch["targets"][..., None], axis=-1)) / MICROBATCHES


FNS = dpj.StageFns(first, stage, last)


def init(key):
    """Parameters: one pytree for each stage, and those that all ranks hold."""
    normal = jax.random.normal
    keys = jax.random.split(key, SCHEDULE.placement.num_stages + 1)
    stages = [{"up": normal(k, (WIDTH, 64)) / 6, "down": normal(k, (64, WIDTH)) / 8} for k in keys[1:]]
    return stages, {"embedding": normal(keys[0], (VOCAB, WIDTH)), "head": normal(keys[0], (WIDTH, VOCAB)) / 6}


def batch_of(step):
    """Leaves [microbatches, rows, ...]: counting modulo VOCAB; and what dropout needs, a value for each microbatch."""
    start = jax.random.randint(jax.random.key(step), (MICROBATCHES, 4, 1), 0, VOCAB)
    tokens = (start + jnp.arange(16)) % VOCAB
    dropout = dpj.dropout_leaves(jax.random.key(0), step, MICROBATCHES)
    return {"tokens": tokens, "targets": (tokens + 1) % VOCAB, "dropout": dropout}


def train(steps=30):
    """The loss of each step."""
    grad_fn = dpj.pipeline_value_and_grad(FNS, SCHEDULE, mesh=dpj.make_mesh(pp=2))
    optimizer = optax.adam(3e-3)

    @jax.jit
    def update(params, moments, batch):
        (loss, _), grads = grad_fn(params, batch)
        updates, moments = optimizer.update(grads, moments)
        return optax.apply_updates(params, updates), moments, loss

    stages, shared = init(jax.random.key(0))
    params = dpj.PipelineParams(dpj.stack_stages(stages, SCHEDULE.placement), shared)
    moments, losses = optimizer.init(params), []
    for step in range(steps):
        params, moments, loss = update(params, moments, batch_of(step))
        losses.append(float(loss))
        print(f"step {step:2d}  loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    train()
