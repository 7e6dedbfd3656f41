"""What a model hands to the pipeline: a first, a stage and a last function, and their split backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dualpipe_jax.residuals import Policy
from dualpipe_jax.split_vjp import SplitVJP, split_vjp

PyTree = Any
StageFn = Callable[[PyTree, PyTree, PyTree, PyTree], Any]


class StageOutput(NamedTuple):
    """What a stage function may return instead of the bare activation.

    Attributes:
        y: the activation for the next stage, of the same shapes and dtypes as the stage's input.
        loss: scalar that is added to the loss (an auxiliary loss of the stage's layers).
        stats: pytree of arrays that are summed over microbatches and data shards; no gradient.
    """

    y: PyTree
    loss: jax.Array | float = 0.0
    stats: PyTree = None


class LastOutput(NamedTuple):
    """What a last function may return instead of the bare loss: the scalar loss and summed statistics."""

    loss: jax.Array
    stats: PyTree = None


@dataclass(frozen=True)
class StageFns:
    """The model, cut in pieces. Every function is pure.

    Attributes:
        first: `(shared, microbatch) -> x`, the input of stage 0 (an embedding).
        stages: `(stage_params, shared, x, microbatch) -> y | StageOutput`, one function for all stages, or one for
            each. Functions that compare equal are compiled once.
        last: `(shared, y, microbatch) -> loss | LastOutput`: a scalar, the *sum* that this microbatch adds to the
        loss.
    """

    first: Callable[[PyTree, PyTree], PyTree]
    stages: StageFn | Sequence[StageFn]
    last: Callable[[PyTree, PyTree, PyTree], Any]

    def per_stage(self, num_stages: int) -> tuple[StageFn, ...]:
        """One function a stage.

        Raises:
            ValueError: a sequence of another length was given.
        """
        if callable(self.stages):
            return (self.stages,) * num_stages
        if len(self.stages) != num_stages:
            raise ValueError(f"{len(self.stages)} stage functions given, the schedule has {num_stages} stages")
        return tuple(self.stages)


def kinds_of(functions: Sequence[StageFn]) -> tuple[tuple[int, ...], tuple[StageFn, ...]]:
    """Number the distinct functions: (kind of each stage, function of each kind)."""
    distinct = list(dict.fromkeys(functions))
    return tuple(distinct.index(f) for f in functions), tuple(distinct)


class Splits(NamedTuple):
    """Split backward of each piece. `first` and `last` run whole; their split only tells which gradients are zero.

    Attributes:
        first: params = shared, x = nothing.
        stages: by kind; params = (stage_params, shared); y = (activation, loss); aux = stats.
        last: params = shared, x = the last activation; y = loss; aux = stats.
        activation: shapes and dtypes of what travels between stages.
    """

    first: SplitVJP
    stages: tuple[SplitVJP, ...]
    last: SplitVJP
    activation: PyTree


def split_stages(
    fns: StageFns,
    stage_fns: Sequence[StageFn],
    slot_params: Sequence[PyTree],
    shared: PyTree,
    microbatch: PyTree,
    policy: Policy,
) -> Splits:
    """Trace every piece once.

    Args:
        stage_fns: the distinct stage functions.
        slot_params: for each of them, stage parameters of the right structure.
        shared, microbatch: arrays or shapes.
        policy: what stages keep for their backward, and what they compute again.

    Raises:
        ValueError: a stage changes the activation's shapes or dtypes, the loss is no scalar, statistics differ.
    """

    def first(shared: PyTree, _: None, microbatch: PyTree) -> PyTree:
        return fns.first(shared, microbatch)

    def last(shared: PyTree, y: PyTree, microbatch: PyTree) -> tuple[jax.Array, PyTree]:
        out = fns.last(shared, y, microbatch)
        out = out if isinstance(out, LastOutput) else LastOutput(out)
        if jnp.shape(out.loss) != ():
            raise ValueError(f"the last function must return a scalar loss, got shape {jnp.shape(out.loss)}")
        return jnp.asarray(out.loss, jnp.float32), out.stats

    split_first = split_vjp(first, shared, None, microbatch)
    activation = split_first.output
    stages = tuple(
        split_vjp(_normalised(fn, activation), (params, shared), activation, microbatch, has_aux=True, policy=policy)
        for fn, params in zip(stage_fns, slot_params, strict=True)
    )
    for fn, split in zip(stage_fns, stages, strict=True):
        if _signature(split.aux) != _signature(stages[0].aux):
            raise ValueError(
                f"statistics must have the same shapes in all stages: {fn} returns {split.aux}, not {stages[0].aux}"
            )
    return Splits(split_first, stages, split_vjp(last, shared, activation, microbatch, has_aux=True), activation)


def _normalised(fn: StageFn, activation: PyTree) -> Callable[..., Any]:
    def stage(params: PyTree, x: PyTree, microbatch: PyTree) -> tuple[tuple[PyTree, jax.Array], PyTree]:
        out = fn(params[0], params[1], x, microbatch)
        out = out if isinstance(out, StageOutput) else StageOutput(out)
        if _signature(out.y) != _signature(activation):
            raise ValueError(
                f"stage function {fn} must return what it takes, shapes {_signature(activation)[1]}, "
                f"got {_signature(out.y)[1]}"
            )
        return (out.y, jnp.asarray(out.loss, jnp.float32)), out.stats

    return stage


def _signature(tree: PyTree) -> tuple[Any, list[str]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [f"{a.dtype.name}{list(a.shape)}" for a in leaves]
