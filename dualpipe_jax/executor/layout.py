"""Where the parameters of a stage live: stacked over pipeline ranks, one tree for each slot that a rank owns.

With a loop or V placement every slot is owned. With the bidirectional placement a rank works on two stages but owns
one: stage s lives at rank s, and rank P-1-s gets a copy for the step (`copies`) and gives the gradient back
(`fold`). So there is one set of values to clip, to update, to save and to count, and the two copies cannot drift
apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dualpipe_jax.executor.mesh import PIPELINE_AXIS
from dualpipe_jax.schedule import Placement

PyTree = Any


def owned_stages(placement: Placement) -> tuple[tuple[int, ...], ...]:
    """For each owned slot, the stage at each rank.

    Example:
        >>> owned_stages(Placement("v", num_ranks=2, slots=2))
        ((0, 1), (3, 2))
        >>> owned_stages(Placement("bidirectional", num_ranks=2, slots=2))
        ((0, 1),)
    """
    ranks = range(placement.num_ranks)
    if placement.num_directions == 2:
        return (tuple(ranks),)
    return tuple(tuple(placement.stage_of(r, slot)[0] for r in ranks) for slot in range(placement.slots))


def stack_stages(stages: Sequence[PyTree], placement: Placement) -> tuple[PyTree, ...]:
    """Arrange one pytree a stage (all of one structure) as `PipelineParams.stages`: leaves [num_ranks, ...].

    Raises:
        ValueError: the number of pytrees is not the placement's number of stages.
    """
    if len(stages) != placement.num_stages:
        raise ValueError(f"{len(stages)} stages given, the placement has {placement.num_stages}")
    rows = owned_stages(placement)
    return tuple(jax.tree.map(lambda *leaves: jnp.stack(leaves), *(stages[s] for s in row)) for row in rows)


def unstack_stages(stacked: Sequence[PyTree], placement: Placement) -> list[PyTree]:
    """Undo `stack_stages`: one pytree a stage, in order."""
    stages: list[PyTree] = [None] * placement.num_stages
    for tree, row in zip(stacked, owned_stages(placement), strict=True):
        for rank, stage in enumerate(row):
            stages[stage] = jax.tree.map(lambda leaf, rank=rank: leaf[rank], tree)
    return stages


def copies(owned: Sequence[PyTree], placement: Placement) -> tuple[PyTree, ...]:
    """Inside `shard_map`: from what a rank owns to what each of its slots works on."""
    if placement.num_directions == 1:
        return tuple(owned)
    mirrored = _mirror(owned[0], placement.num_ranks)
    return _by_slot(owned[0], mirrored, placement)


def fold(slots: Sequence[PyTree], placement: Placement) -> tuple[PyTree, ...]:
    """Inside `shard_map`, the transpose of `copies`: sum over the copies of a stage, at the rank that owns it."""
    if placement.num_directions == 1:
        return tuple(slots)
    own, other = _by_slot(slots[0], slots[1], placement)
    return (jax.tree.map(jnp.add, own, _mirror(other, placement.num_ranks)),)


def _mirror(tree: PyTree, num_ranks: int) -> PyTree:
    pairs = [(r, num_ranks - 1 - r) for r in range(num_ranks)]
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, PIPELINE_AXIS, pairs), tree)


def _by_slot(own: PyTree, other: PyTree, placement: Placement) -> tuple[PyTree, PyTree]:
    """(own, other) where a rank's own stage is in slot 0, (other, own) where it is in slot 1; its own inverse."""
    in_slot_1 = jnp.array([placement.slot_of(r, 0) == 1 for r in range(placement.num_ranks)])
    swap = in_slot_1[jax.lax.axis_index(PIPELINE_AXIS)]

    def select(a: PyTree, b: PyTree) -> PyTree:
        return jax.tree.map(lambda x, y: jnp.where(swap, y, x), a, b)

    return select(own, other), select(other, own)
