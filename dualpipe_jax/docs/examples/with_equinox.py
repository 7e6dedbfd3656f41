"""Stages that are equinox modules, trained with 1F1B on two emulated devices: python with_equinox.py

`eqx.partition` takes the parameters out of a module as a pytree, which is what a pipeline passes around; inside the
stage function `eqx.combine` puts them back. (pip install equinox)
"""

from dualpipe_jax.emulate import emulate_devices

if __name__ == "__main__":
    emulate_devices(2)  # before jax is imported; has no effect on accelerators

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import dualpipe_jax as dpj

VOCAB, WIDTH, MICROBATCHES = 32, 32, 8
SCHEDULE = dpj.build("1f1b", num_ranks=2, num_microbatches=MICROBATCHES)


class Stage(eqx.Module):
    """A residual layer, of one token."""

    norm: eqx.nn.RMSNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.norm = eqx.nn.RMSNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 64, depth=1, activation=jax.nn.gelu, key=key)

    def __call__(self, x):
        return x + self.mlp(self.norm(x))


def ends(key):
    """What comes before the first stage and after the last."""
    return {"embedding": eqx.nn.Embedding(VOCAB, WIDTH, key=key), "head": eqx.nn.Linear(WIDTH, VOCAB, key=key)}


# What modules are besides their parameters, the same for all stages.
STAGE, ENDS = (eqx.partition(make(jax.random.key(0)), eqx.is_inexact_array)[1] for make in (Stage, ends))


def on_tokens(function):
    """Equinox's layers take one token; a microbatch is [rows, tokens, ...]."""
    return jax.vmap(jax.vmap(function))


def first(shared, microbatch):
    return on_tokens(eqx.combine(shared, ENDS)["embedding"])(microbatch["tokens"])


def stage(params, shared, x, microbatch):
    return on_tokens(eqx.combine(params, STAGE))(x)


def last(shared, y, microbatch):
    logits = on_tokens(eqx.combine(shared, ENDS)["head"])(y)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["targets"])) / MICROBATCHES


FNS = dpj.StageFns(first, stage, last)


def init(key):
    """Parameters: one pytree for each stage, and those that all ranks hold."""
    keys = jax.random.split(key, SCHEDULE.placement.num_stages + 1)
    modules = [Stage(k) for k in keys[1:]], ends(keys[0])
    return eqx.filter(modules, eqx.is_inexact_array)


def batch_of(step):
    """Leaves [microbatches, rows, ...]: counting modulo VOCAB."""
    start = jax.random.randint(jax.random.key(step), (MICROBATCHES, 4, 1), 0, VOCAB)
    tokens = (start + jnp.arange(16)) % VOCAB
    return {"tokens": tokens, "targets": (tokens + 1) % VOCAB}


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
