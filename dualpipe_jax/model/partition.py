"""Which layers make up which stage, and where their parameters are.

Layers are dealt to stages in order, as evenly as they go, the first stages taking one more. The kind of layer that
repeats to the end (experts, or dense in a model without) is the *trunk*: its parameters are stacked over the
pipeline's ranks, and a stage with fewer trunk layers than the others has zeros in the places it never reads. Dense
layers before the trunk belong to the first stage or two only; they go with the shared parameters, so that no other
rank pads for them. So does everything that is no layer of a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dualpipe_jax.executor import PipelineParams, stack_stages, unstack_stages
from dualpipe_jax.schedule import Placement

PyTree = Any


@dataclass(frozen=True)
class StageLayers:
    """The layers of one stage: indices into the dense prefix, and into the trunk."""

    dense: tuple[int, ...]
    trunk: tuple[int, ...]


def partition(num_layers: int, num_dense: int, num_stages: int) -> tuple[StageLayers, ...]:
    """Deal `num_layers` layers, the first `num_dense` of them the dense prefix, to stages.

    Raises:
        ValueError: there are fewer layers than stages.

    Example:
        >>> [len(s.dense) + len(s.trunk) for s in partition(30, 1, 4)]
        [8, 8, 7, 7]
        >>> partition(3, 1, 2)
        (StageLayers(dense=(0,), trunk=(0,)), StageLayers(dense=(), trunk=(1,)))
    """
    if num_layers < num_stages:
        raise ValueError(f"{num_layers=} is less than {num_stages=}; use at least {num_stages} layers or fewer stages")
    small, more = divmod(num_layers, num_stages)
    stages, start = [], 0
    for stage in range(num_stages):
        stop = start + small + (stage < more)
        dense = tuple(range(start, min(stop, num_dense)))
        trunk = tuple(range(max(start, num_dense) - num_dense, max(stop, num_dense) - num_dense))
        stages.append(StageLayers(dense, trunk))
        start = stop
    return tuple(stages)


def to_stages(params: PyTree, stages: Sequence[StageLayers]) -> tuple[list[PyTree], PyTree]:
    """From a model's parameters to (one pytree a stage, shared): see the module's docstring.

    Args:
        params: {"embedding", "dense": [layer...], "layers": [trunk layer...], "head", ...}.
    """
    padded = max(len(s.trunk) for s in stages)
    padding = jax.tree.map(jnp.zeros_like, params["layers"][0]) if params["layers"] else None

    def layers_of(stage: StageLayers) -> list[PyTree]:
        own = [params["layers"][i] for i in stage.trunk]
        return own + [padding] * (padded - len(own))

    shared = {name: tree for name, tree in params.items() if name != "layers"}
    return [{"layers": layers_of(stage)} for stage in stages], shared


def from_stages(per_stage: Sequence[PyTree], shared: PyTree, stages: Sequence[StageLayers]) -> PyTree:
    """Undo `to_stages`, dropping the padding."""
    layers = [tree["layers"][i] for tree, stage in zip(per_stage, stages, strict=True) for i in range(len(stage.trunk))]
    return {**shared, "layers": layers}


def to_pipeline(params: PyTree, stages: Sequence[StageLayers], placement: Placement) -> PipelineParams:
    """From a model's parameters to the arrangement that the pipeline takes."""
    per_stage, shared = to_stages(params, stages)
    return PipelineParams(stack_stages(per_stage, placement), shared)


def from_pipeline(params: PipelineParams, stages: Sequence[StageLayers], placement: Placement) -> PyTree:
    """Undo `to_pipeline`."""
    return from_stages(unstack_stages(params.stages, placement), params.shared, stages)
