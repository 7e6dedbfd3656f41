"""The oracle: the same loss and gradients with no pipeline, no mesh and no split backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dualpipe_jax.executor.stages import LastOutput, StageFns, StageOutput

PyTree = Any


def reference_value_and_grad(
    fns: StageFns, stages: Sequence[PyTree], shared: PyTree, batch: PyTree
) -> tuple[tuple[jax.Array, PyTree], tuple[list[PyTree], PyTree]]:
    """Loss and gradients of the whole batch by `jax.value_and_grad`, one microbatch after the other.

    Args:
        fns: the model's pieces; they may use no collectives here.
        stages: one pytree of parameters a stage, in order.
        shared: the shared parameters.
        batch: leaves [num_microbatches, rows, ...].

    Returns:
        `((loss, (statistics of each stage, of the last function)), (gradients by stage, shared gradients))`; loss and
        statistics are sums over microbatches. Integer leaves have gradient 0, float32.
    """
    params = (list(stages), shared)
    is_weight = jax.tree.map(lambda p: jnp.issubdtype(jnp.result_type(p), jnp.inexact), params)

    def loss(weights: PyTree, microbatch: PyTree) -> tuple[jax.Array, PyTree]:
        stages, shared = jax.tree.map(lambda p, w, trained: w if trained else p, params, weights, is_weight)
        return _microbatch_loss(fns, stages, shared, microbatch)

    def gradient(params: PyTree, microbatch: PyTree) -> Any:
        weights = jax.tree.map(lambda p, trained: p if trained else jnp.zeros(jnp.shape(p)), params, is_weight)
        return jax.value_and_grad(loss, has_aux=True)(weights, microbatch)

    shapes = jax.eval_shape(gradient, params, jax.tree.map(lambda a: a[0], batch))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return jax.lax.scan(lambda sum_, m: (jax.tree.map(jnp.add, sum_, gradient(params, m)), None), zeros, batch)[0]


def _microbatch_loss(
    fns: StageFns, stages: Sequence[PyTree], shared: PyTree, microbatch: PyTree
) -> tuple[jax.Array, PyTree]:
    x = fns.first(shared, microbatch)
    loss, stats = jnp.float32(0), []
    for fn, params in zip(fns.per_stage(len(stages)), stages, strict=True):
        out = fn(params, shared, x, microbatch)
        out = out if isinstance(out, StageOutput) else StageOutput(out)
        x, loss = out.y, loss + jnp.asarray(out.loss, jnp.float32)
        stats.append(out.stats)
    end = fns.last(shared, x, microbatch)
    end = end if isinstance(end, LastOutput) else LastOutput(end)
    return loss + jnp.asarray(end.loss, jnp.float32), (stats, end.stats)
