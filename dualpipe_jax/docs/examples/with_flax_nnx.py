"""Stages that are flax nnx modules, trained with DualPipe on two emulated devices: python with_flax_nnx.py

`nnx.split` makes a module's parameters a pytree, which is what a pipeline passes around; inside the stage function
`nnx.merge` makes the module again.
"""

from dualpipe_jax.emulate import emulate_devices

if __name__ == "__main__":
    emulate_devices(2)  # before jax is imported; has no effect on accelerators

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import dualpipe_jax as dpj

VOCAB, WIDTH, MICROBATCHES = 32, 32, 8
SCHEDULE = dpj.build("dualpipe", num_ranks=2, num_microbatches=MICROBATCHES)


class Stage(nnx.Module):
    """Two residual layers."""

    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 64, rngs=rngs)
        self.down = nnx.Linear(64, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Ends(nnx.Module):
    """What comes before the first stage and after the last."""

    def __init__(self, rngs):
        self.embedding = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)


# What a module is besides its parameters, the same for all stages.
STAGE, ENDS = (nnx.graphdef(nnx.eval_shape(lambda kind=kind: kind(nnx.Rngs(0)))) for kind in (Stage, Ends))


def first(shared, microbatch):
    return nnx.merge(ENDS, shared).embedding(microbatch["tokens"])


def stage(params, shared, x, microbatch):
    return nnx.merge(STAGE, params)(x)


def last(shared, y, microbatch):
    logits = nnx.merge(ENDS, shared).head(y)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["targets"])) / MICROBATCHES


FNS = dpj.StageFns(first, stage, last)


def init(seed):
    """Parameters: one pytree for each stage, and those that all ranks hold."""
    rngs = nnx.Rngs(seed)
    return [nnx.state(Stage(rngs)) for _ in range(SCHEDULE.placement.num_stages)], nnx.state(Ends(rngs))


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

    stages, shared = init(0)
    params = dpj.PipelineParams(dpj.stack_stages(stages, SCHEDULE.placement), shared)
    moments, losses = optimizer.init(params), []
    for step in range(steps):
        params, moments, loss = update(params, moments, batch_of(step))
        losses.append(float(loss))
        print(f"step {step:2d}  loss {losses[-1]:.3f}")
    trained = nnx.merge(STAGE, dpj.unstack_stages(params.stages, SCHEDULE.placement)[0])  # a module again
    assert trained(jnp.zeros((1, WIDTH))).shape == (1, WIDTH)
    return losses


if __name__ == "__main__":
    train()
