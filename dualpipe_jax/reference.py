"""The oracle: the same loss and gradients with no pipeline, no mesh and no split backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dualpipe_jax.executor.stages import LastOutput, StageFns, StageOutput

PyTree = Any


def reference_loss(fns: StageFns, stages: Sequence[PyTree], shared: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
    """Loss of the whole batch, one microbatch after the other.

    Args:
        fns: the model's pieces; they may use no collectives here.
        stages: one pytree of parameters a stage, in order.
        shared: the shared parameters.
        batch: leaves [num_microbatches, rows, ...].

    Returns:
        (float32 scalar, (list of each stage's summed statistics, the last function's)).
    """
    functions = fns.per_stage(len(stages))

    def contribution(microbatch: PyTree) -> tuple[jax.Array, PyTree]:
        x = fns.first(shared, microbatch)
        loss, stats = jnp.float32(0), []
        for fn, params in zip(functions, stages, strict=True):
            out = fn(params, shared, x, microbatch)
            out = out if isinstance(out, StageOutput) else StageOutput(out)
            x, loss = out.y, loss + jnp.asarray(out.loss, jnp.float32)
            stats.append(out.stats)
        end = fns.last(shared, x, microbatch)
        end = end if isinstance(end, LastOutput) else LastOutput(end)
        return loss + jnp.asarray(end.loss, jnp.float32), (stats, end.stats)

    shapes = jax.eval_shape(contribution, jax.tree.map(lambda a: a[0], batch))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(lambda total, m: (jax.tree.map(jnp.add, total, contribution(m)), None), zeros, batch)[0]


def reference_value_and_grad(
    fns: StageFns, stages: Sequence[PyTree], shared: PyTree, batch: PyTree
) -> tuple[tuple[jax.Array, PyTree], tuple[list[PyTree], PyTree]]:
    """`((loss, stats), (gradients by stage, shared gradients))` of `reference_loss`, by `jax.value_and_grad`.

    Differentiates microbatch by microbatch and adds up, so that memory is that of one microbatch.
    """

    def loss(params: tuple[list[PyTree], PyTree], microbatch: PyTree) -> tuple[jax.Array, PyTree]:
        single = jax.tree.map(lambda a: a[None], microbatch)
        return reference_loss(fns, params[0], params[1], single)

    gradient = jax.value_and_grad(loss, has_aux=True)
    params = (list(stages), shared)
    shapes = jax.eval_shape(gradient, params, jax.tree.map(lambda a: a[0], batch))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(lambda sum_, m: (jax.tree.map(jnp.add, sum_, gradient(params, m)), None), zeros, batch)[0]
