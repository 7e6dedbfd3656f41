"""AdamW with warm-up and cosine decay, global-norm clipping, and optimizer state sharded over the data axes
(ZeRO-1)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dualpipe_jax.config import OptimizerConfig

PyTree = Any
NOT_DECAYED = ("scale", "bias", "table")  # norms, biases, embeddings


def names_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The dict keys and attribute names along a pytree path."""
    return tuple(str(getattr(k, "key", getattr(k, "name", ""))) for k in path)


def decayed(params: PyTree) -> PyTree:
    """True for the leaves that weight decay applies to: matrices, but no embedding; no norm scale, no bias."""
    return jax.tree_util.tree_map_with_path(lambda path, _: names_of(path)[-1] not in NOT_DECAYED, params)


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear from 0 over `warmup_steps`, then a cosine to `min_learning_rate` at the last step."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(steps, config.warmup_steps + 1),
        end_value=config.min_learning_rate,
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clip by the global norm, then AdamW.

    The norm runs over every owned parameter once: all ranks, stages and experts, mirrored copies not again.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )


def apply_gradients(
    optimizer: optax.GradientTransformation, grads: PyTree, state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    """(new parameters, new optimizer state). optax relies on JAX's implicit promotion."""
    with jax.numpy_dtype_promotion("standard"):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state


def zero1_spec(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """Shard a leaf further, over as many unused mesh axes as its dims divide by (Rajbhandari et al., ZeRO, 2020,
    stage 1).

    Args:
        shape: of the whole leaf.
        spec: how the computation has it; dims that it names stay as they are.
    """
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    used = {name for entry in entries if entry for name in ((entry,) if isinstance(entry, str) else entry)}
    unused = tuple(name for name in mesh.axis_names if name not in used and mesh.shape[name] > 1)
    subsets = [unused] + [(name,) for name in unused]
    for axes in sorted(subsets, key=lambda a: -np.prod([mesh.shape[n] for n in a], dtype=int)):
        ways = int(np.prod([mesh.shape[n] for n in axes], dtype=int))
        free = [d for d, entry in enumerate(entries) if entry is None and shape[d] % ways == 0 and shape[d] >= ways]
        if axes and free:
            entries[max(free, key=lambda d: shape[d])] = axes
            break
    return PartitionSpec(*entries)


def zero1_shardings(shapes: PyTree, specs: PyTree, mesh: Mesh) -> PyTree:
    """`NamedSharding` of each master parameter (and its moments)."""
    return jax.tree.map(lambda leaf, spec: NamedSharding(mesh, zero1_spec(leaf.shape, spec, mesh)), shapes, specs)
