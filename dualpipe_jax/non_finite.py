"""Where a loss or a gradient stopped being finite: rank, stage, microbatch and leaf, by name.

A step only says that its loss or its gradients are not finite. This module is for the moment after: it runs the same
pieces again, one microbatch after the other and stage by stage, forward and then backward, and looks at every value
that passes from one piece to the next. It runs on the step's own mesh with the step's own shards, so that collectives
over data axes work and sharded parameters stay where they are; only one stage at a time is copied to all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dualpipe_jax.executor import PIPELINE_AXIS, LastOutput, PipelineParams, StageFns, StageOutput, data_axes
from dualpipe_jax.executor.layout import owned_stages
from dualpipe_jax.executor.specs import Specs, batch_specs, check_batch
from dualpipe_jax.executor.stages import kinds_of
from dualpipe_jax.schedule import Schedule

PyTree = Any
Piece = Callable[[PyTree, PyTree, PyTree, PyTree], dict[str, PyTree]]
"""(stage_params, shared, x, microbatch) -> {"output": activation, "loss": float32 scalar}, either or both."""
_REPLICATED = PartitionSpec()


@dataclass(frozen=True)
class NonFinite:
    """The first value that is not finite, in the order: microbatch by microbatch, forward, then backward.

    Attributes:
        phase: "forward" or "backward".
        piece: "first", "stage" or "last": the function that made the value from finite ones.
        stage: its stage (0 for first, the last one for last). rank: the pipeline rank that runs it.
        microbatch: its number in the batch.
        values: what is not finite: "output['x']", "loss", "gradient of stage['w']" and the like.
        shards: on which data shards, numbered as in `mesh`, the last axis fastest.
        parameters: names of all parameters that are not finite themselves: "stages[2]['w']", "shared['embedding']".
        batch: names of the batch's leaves that are not finite themselves: "batch['x'] in microbatch 3".
    """

    phase: Literal["forward", "backward"]
    piece: Literal["first", "stage", "last"]
    stage: int
    rank: int
    microbatch: int
    values: tuple[str, ...]
    shards: tuple[int, ...]
    parameters: tuple[str, ...]
    batch: tuple[str, ...]

    def __str__(self) -> str:
        of = f"stage {self.stage}" if self.piece == "stage" else f"the {self.piece} function"
        shards = f" on data shard{'s' * (len(self.shards) > 1)} {', '.join(map(str, self.shards))}"
        text = f"first in the {self.phase} of {of} (rank {self.rank}) for microbatch {self.microbatch}{shards}: "
        text += _listed(self.values)
        if inputs := self.parameters + self.batch:
            return f"{text}; not finite to begin with: {_listed(inputs)}"
        return f"{text}; all parameters and the batch are finite"


def find_non_finite(
    fns: StageFns,
    schedule: Schedule,
    params: PipelineParams,
    batch: PyTree,
    *,
    mesh: Mesh,
    stage_specs: PyTree = _REPLICATED,
    shared_specs: PyTree = _REPLICATED,
    batch_spec: PyTree = None,
) -> NonFinite | None:
    """Say where in a step the first value appears that is not finite: which rank, stage, microbatch and leaf.

    To be called after a step whose loss or gradients were not finite, with the arguments of that step. It is as
    expensive as the step without a pipeline, and compiles each piece, so not to be called in every step. All processes
    of a multi-process run call it, and get the same answer.

    Args:
        fns, schedule, mesh, stage_specs, shared_specs, batch_spec: as for `pipeline_value_and_grad`.
        params, batch: what the step was given (a step that donates its parameters must return them unchanged).

    Returns:
        None if every microbatch is finite on its own: then a sum over microbatches, or a norm, overflows.

    Raises:
        ValueError: the batch has not the schedule's number of microbatches.

    Example:
        if not jnp.isfinite(loss):
            raise FloatingPointError(str(find_non_finite(fns, schedule, params, batch, mesh=mesh)))
    """
    return Walk(fns, schedule, mesh, Specs(stage_specs), Specs(shared_specs), batch_spec).find(params, batch)


@dataclass(frozen=True, eq=False)
class Walk:
    """`find_non_finite`, to be called more than once: each piece is compiled once."""

    fns: StageFns
    schedule: Schedule
    mesh: Mesh
    stage_specs: Specs
    shared_specs: Specs
    batch_spec: PyTree = None
    compiled: dict[Any, Any] = field(default_factory=dict)

    def find(self, params: PipelineParams, batch: PyTree) -> NonFinite | None:
        """See `find_non_finite`."""
        check_batch(batch, self.schedule.num_microbatches)
        for microbatch in range(self.schedule.num_microbatches):
            for step, finite in self._values(params, batch, microbatch):
                values = tuple(name for name, shards in finite.items() if not shards.all())
                if values:
                    shards = np.flatnonzero(~np.all([finite[name] for name in values], axis=0))
                    return self._report(step, microbatch, values, tuple(shards.tolist()), params, batch)
        return None

    # ---------------------------------------------------------------- one microbatch

    def _values(
        self, params: PipelineParams, batch: PyTree, microbatch: int
    ) -> Iterator[tuple[tuple[str, str, int], dict[str, np.ndarray]]]:
        """((phase, piece, stage), {value: bool [data shards], is it finite}) of each piece, in order."""
        pieces = self._pieces()
        inputs: list[PyTree] = []
        x = None
        for name, stage, slot, function in pieces:
            inputs.append(x)
            run = self._program(name, function, slot, backward=False)
            x, finite = run(self._slot(params, slot), self._rank(stage), params.shared, x, batch, microbatch)
            yield ("forward", name, stage), jax.device_get(finite)
        gradient: Any = []
        for (name, stage, slot, function), x in zip(reversed(pieces), reversed(inputs), strict=True):
            run = self._program(name, function, slot, backward=True)
            given = (self._slot(params, slot), self._rank(stage), params.shared, x, batch, microbatch)
            gradient, finite = run(*given, gradient)
            yield ("backward", name, stage), jax.device_get(finite)

    def _pieces(self) -> list[tuple[str, int, int | None, Any]]:
        """(name, stage, slot of its parameters, function) of all pieces, in order."""
        placement = self.schedule.placement
        last = placement.num_stages - 1
        slot_of = {stage: slot for slot, row in enumerate(owned_stages(placement)) for stage in row}
        _, distinct = kinds_of(functions := self.fns.per_stage(placement.num_stages))
        stages = [("stage", s, slot_of[s], distinct[distinct.index(f)]) for s, f in enumerate(functions)]
        return [("first", 0, None, self.fns.first), *stages, ("last", last, None, self.fns.last)]

    def _rank(self, stage: int) -> int:
        """The rank that owns a stage's parameters."""
        rows = owned_stages(self.schedule.placement)
        return next(row.index(stage) for row in rows if stage in row)

    @staticmethod
    def _slot(params: PipelineParams, slot: int | None) -> PyTree:
        return () if slot is None else params.stages[slot]

    def _program(self, name: str, function: Any, slot: int | None, backward: bool) -> Any:
        """Compiled once for each (function, slot): (slot's params, rank, shared, x, batch, microbatch, ...)."""
        key = (name, function, slot, backward)
        if key not in self.compiled:
            body = _backward if backward else _forward
            run = partial(self._sharded, partial(body, partial(_PIECES[name], function)))
            whole = NamedSharding(self.mesh, _REPLICATED)  # what is finite: known to every process
            self.compiled[key] = jax.jit(run, out_shardings=(None, whole))
        return self.compiled[key]

    def _sharded(
        self, body: Any, owned: PyTree, rank: Any, shared: PyTree, x: PyTree, batch: PyTree, m: Any, *gradient: PyTree
    ) -> tuple[PyTree, dict[str, jax.Array]]:
        """Run a piece on each data shard. Activations between pieces are leaves [data shards, ...]."""
        rows = PartitionSpec(data_axes(self.mesh))

        def on_a_shard(
            owned: PyTree, rank: Any, shared: PyTree, x: PyTree, batch: PyTree, m: Any, gradient: Any
        ) -> Any:
            params = jax.tree.map(partial(_from_rank, rank), owned)
            x, gradient = jax.tree.map(lambda a: a[0], (x, gradient))
            result, values = body(params, shared, x, jax.tree.map(lambda a: a[m], batch), *gradient)
            finite = {name: jnp.all(jnp.isfinite(value)) for name, value in values.items()}
            return jax.tree.map(lambda a: a[None], (result, finite))

        specs = (
            self.stage_specs.prefixed(owned, PIPELINE_AXIS) if owned != () else (),
            _REPLICATED,
            self.shared_specs.full(shared),
            rows,
            batch_specs(batch, self.mesh, self.batch_spec),
            _REPLICATED,
            rows,
        )
        run = jax.shard_map(on_a_shard, mesh=self.mesh, in_specs=specs, out_specs=rows, check_vma=False)
        return run(owned, jnp.asarray(rank), shared, x, batch, jnp.asarray(m), gradient)

    # ---------------------------------------------------------------- names

    def _report(
        self, step: Any, microbatch: int, values: tuple[str, ...], shards: tuple[int, ...], params: Any, batch: PyTree
    ) -> NonFinite:
        phase, piece, stage = step
        direction = microbatch // self.schedule.microbatches_per_direction
        rank = self.schedule.placement.rank_of(stage, direction)
        named = (self._bad_parameters(params), self._bad_batch(batch))
        return NonFinite(phase, piece, stage, rank, microbatch, values, shards, *named)

    def _bad_parameters(self, params: PipelineParams) -> tuple[str, ...]:
        names = []
        for slot, row in zip(params.stages, owned_stages(self.schedule.placement), strict=True):
            for name, finite in self._finite_rows(slot).items():
                names += [f"stages[{stage}]{name}" for stage, ok in zip(row, finite, strict=True) if not ok]
        shared = self._finite_rows(params.shared)
        return (*sorted(names), *(f"shared{name}" for name, finite in shared.items() if not np.all(finite)))

    def _bad_batch(self, batch: PyTree) -> tuple[str, ...]:
        rows = self._finite_rows(batch)
        return tuple(f"batch{n} in microbatch {m}" for n, finite in rows.items() for m in np.flatnonzero(~finite))

    def _finite_rows(self, tree: PyTree) -> dict[str, np.ndarray]:
        """For each float leaf, by path: is it all finite, for each index of its first dim?"""

        def finite(tree: PyTree) -> dict[str, jax.Array]:
            leaves = _floats(tree, "").items()
            return {name: jnp.all(jnp.isfinite(a), axis=tuple(range(1, a.ndim))) for name, a in leaves}

        return jax.device_get(jax.jit(finite, out_shardings=NamedSharding(self.mesh, _REPLICATED))(tree))


# -------------------------------------------------------------------- pieces


def _first(function: Any, params: PyTree, shared: PyTree, x: PyTree, microbatch: PyTree) -> dict[str, PyTree]:
    return {"output": function(shared, microbatch)}


def _stage(function: Any, params: PyTree, shared: PyTree, x: PyTree, microbatch: PyTree) -> dict[str, PyTree]:
    out = function(params, shared, x, microbatch)
    out = out if isinstance(out, StageOutput) else StageOutput(out)
    return {"output": out.y, "loss": jnp.asarray(out.loss, jnp.float32)}


def _last(function: Any, params: PyTree, shared: PyTree, x: PyTree, microbatch: PyTree) -> dict[str, PyTree]:
    out = function(shared, x, microbatch)
    return {"loss": jnp.asarray(out.loss if isinstance(out, LastOutput) else out, jnp.float32)}


_PIECES: dict[str, Any] = {"first": _first, "stage": _stage, "last": _last}


def _forward(piece: Piece, *given: PyTree) -> tuple[PyTree, dict[str, jax.Array]]:
    """(activation, values by name)."""
    out = piece(*given)
    return out.get("output"), {n: a for name, tree in out.items() for n, a in _floats(tree, name).items()}


def _backward(
    piece: Piece, params: PyTree, shared: PyTree, x: PyTree, microbatch: PyTree, dy: list[jax.Array]
) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    """(gradients of the input's float leaves, all gradients by name), from those of the output's float leaves."""
    given = (params, shared, x)
    structure: Any
    leaves, structure = jax.tree.flatten(given)
    where = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]

    def on_floats(floats: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        merged = dict(enumerate(leaves)) | dict(zip(where, floats, strict=True))
        params, shared, x = structure.unflatten(merged.values())
        out = piece(params, shared, x, microbatch)
        return list(_floats(out.get("output"), "").values()), out.get("loss", jnp.float32(0))

    _, pull = jax.vjp(on_floats, [leaves[i] for i in where])
    (flat,) = pull((dy, jnp.float32(1)))
    names = [n for tree, name in zip(given, ("stage", "shared", "the input"), strict=True) for n in _floats(tree, name)]
    return flat[len(flat) - len(_floats(x, "")) :], {f"gradient of {n}": g for n, g in zip(names, flat, strict=True)}


def _from_rank(rank: jax.Array, leaf: jax.Array) -> jax.Array:
    """The rank's own part of a stacked leaf, on every rank. Selected, not multiplied: NaNs of others stay there."""
    own = jax.lax.axis_index(PIPELINE_AXIS) == rank
    return jax.lax.psum(jnp.where(own, leaf[0], jnp.zeros_like(leaf[0])), PIPELINE_AXIS)


def _floats(tree: PyTree, name: str) -> dict[str, jax.Array]:
    """The float leaves of a pytree by path, in its order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{name}{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves if _is_float(leaf)}


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _listed(names: tuple[str, ...], most: int = 6) -> str:
    """Names, the first few of many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
