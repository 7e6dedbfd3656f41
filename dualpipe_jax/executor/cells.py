"""The operations that a cell of the table is made of, each a function (state, row) -> state.

A tick runs, in this order, those of the operations that its cell names:

    first           embed a microbatch into the scratch slot of the activation inbox
    forward         one for each (kind of stage, slot)
    last            loss of the microbatch that just left the last stage, and its gradient into the gradient inbox
    backward        B: input and weight gradient   } one each for each (kind of stage, slot)
    backward_input  I: input gradient, keeps the cut }
    first_backward  gradient of what `first` read from the shared parameters
    backward_weight W: weight gradient from the cut, one for each (kind of stage, slot)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dualpipe_jax.executor import buffers
from dualpipe_jax.executor.stages import Splits
from dualpipe_jax.schedule import TickTable
from dualpipe_jax.split_vjp import Residuals

PyTree = Any
COLUMNS = (
    "forward_microbatch", "forward_input", "forward_local", "forward_loss",
    "forward_residual", "forward_weight_residual",
    "backward_microbatch", "backward_output_gradient", "backward_residual", "backward_weight_residual", "backward_cut",
    "backward_local", "weight_microbatch", "weight_residual", "weight_cut",
    "receive_right_activation", "receive_right_gradient", "receive_left_activation", "receive_left_gradient",
    "forward_slot", "backward_slot", "weight_slot",
)  # fmt: skip
Slot = int | None  # None: the row says which


class State(NamedTuple):
    """All that a rank carries from tick to tick. The last slot of each inbox is scratch: written, never meant.

    Attributes:
        activations, gradients: inboxes, leaves [slots + 1, ...].
        residual, weight_residual, cut: by kind of stage, what is kept from F to I, F to W, I to W.
        stage_grads, shared_grads: float32 sums, by slot / whole.
        loss: float32 scalar sum. stage_stats, last_stats: sums, by slot / whole.
        sent_activation, sent_gradient: results of this tick, for the neighbours.
        order: int32, 1 after the first loop: what makes each loop depend on the one before (see `branch`).
    """

    activations: PyTree
    gradients: PyTree
    residual: tuple[PyTree, ...]
    weight_residual: tuple[PyTree, ...]
    cut: tuple[PyTree, ...]
    stage_grads: tuple[PyTree, ...]
    shared_grads: PyTree
    loss: jax.Array
    stage_stats: tuple[PyTree, ...]
    last_stats: PyTree
    sent_activation: PyTree
    sent_gradient: PyTree
    order: jax.Array


Row = dict[str, jax.Array]


@dataclass(frozen=True)
class Operation:
    """One part of a cell: `run(state, row, read(state, row))` is the state after it.

    Attributes:
        read: what it takes out of the buffers that others may write to in the same tick.
        run: the rest.
    """

    read: Callable[[State, Row], Any]
    run: Callable[[State, Row, Any], State]

    def __call__(self, state: State, row: Row) -> State:
        return self.run(state, row, self.read(state, row))


@dataclass(frozen=True)
class Cells:
    """Builds the operations over one shard's parameters and rows of the batch.

    Attributes:
        table: says how many slots each buffer has.
        splits: the traced pieces of the model.
        stage_params: by slot. shared: parameters that all ranks hold. batch: leaves [num_microbatches, rows, ...].
    """

    table: TickTable
    splits: Splits
    stage_params: tuple[PyTree, ...]
    shared: PyTree
    batch: PyTree

    def initial_state(self) -> State:
        t, s = self.table, self.splits
        gradient = jax.tree.map(lambda a: a if jnp.issubdtype(a.dtype, jnp.inexact) else None, s.activation)
        zeros = jax.tree_util.Partial(jax.tree.map, lambda a: jnp.zeros(a.shape, a.dtype))
        sums = jax.tree_util.Partial(jax.tree.map, lambda a: jnp.zeros(a.shape, jnp.float32))
        return State(
            activations=buffers.allocate(t.num_activation_slots + 1, s.activation),
            gradients=buffers.allocate(t.num_gradient_slots + 1, gradient),
            residual=tuple(map(buffers.allocate, t.num_residual_slots, (k.residuals.input for k in s.stages))),
            weight_residual=tuple(
                map(buffers.allocate, t.num_weight_residual_slots, (k.residuals.weight for k in s.stages))
            ),
            cut=tuple(map(buffers.allocate, t.num_cut_slots, (k.cut for k in s.stages))),
            stage_grads=tuple(sums(p) for p in self.stage_params),
            shared_grads=sums(self.shared),
            loss=jnp.zeros((), jnp.float32),
            stage_stats=tuple(zeros(s.stages[0].aux) for _ in self.stage_params),
            last_stats=zeros(s.last.aux),
            sent_activation=zeros(s.activation),
            sent_gradient=zeros(gradient),
            order=jnp.int32(0),
        )

    # ---------------------------------------------------------------- operations

    def first(self, state: State, row: Row) -> State:
        x, _, _ = self.splits.first.forward(self.shared, None, self._microbatch(row["forward_microbatch"]))
        scratch = jnp.int32(self.table.num_activation_slots)
        return state._replace(activations=buffers.write(state.activations, scratch, x))

    def forward(self, kind: int, slot: Slot, state: State, row: Row) -> State:
        split, place = self.splits.stages[kind], row["forward_slot"] if slot is None else slot
        x = buffers.read(state.activations, row["forward_input"])
        params = (_select(self.stage_params, place), self.shared)
        (y, loss), stats, kept = split.forward(params, x, self._microbatch(row["forward_microbatch"]))
        return state._replace(
            activations=buffers.write(state.activations, row["forward_local"], y),
            residual=_write_at(state.residual, kind, row["forward_residual"], kept.input),
            weight_residual=_write_at(state.weight_residual, kind, row["forward_weight_residual"], kept.weight),
            loss=state.loss + loss,
            stage_stats=_add_at(state.stage_stats, place, stats),
            sent_activation=y,
        )

    def last(self, state: State, row: Row) -> State:
        split, microbatch = self.splits.last, self._microbatch(row["forward_microbatch"])
        loss, stats, kept = split.forward(self.shared, state.sent_activation, microbatch)
        dy, cut = split.backward_input(self.shared, kept, jnp.float32(1), microbatch)
        grads = split.backward_weight(self.shared, kept.weight, cut, microbatch)
        return state._replace(
            gradients=buffers.write(state.gradients, row["forward_loss"], dy),
            shared_grads=buffers.accumulate(state.shared_grads, grads),
            loss=state.loss + loss,
            last_stats=buffers.accumulate(state.last_stats, stats),
        )

    def read_backward(self, kind: int, state: State, row: Row) -> tuple[PyTree, Residuals]:
        """The output's gradient, and what the forward kept."""
        dy = buffers.read(state.gradients, row["backward_output_gradient"])
        return dy, Residuals(
            buffers.read(state.residual[kind], row["backward_residual"]),
            buffers.read(state.weight_residual[kind], row["backward_weight_residual"]),
        )

    def backward(
        self, kind: int, slot: Slot, full: bool, state: State, row: Row, values: tuple[PyTree, Residuals]
    ) -> State:
        split, microbatch = self.splits.stages[kind], self._microbatch(row["backward_microbatch"])
        place = row["backward_slot"] if slot is None else slot
        params = (_select(self.stage_params, place), self.shared)
        dy, kept = values
        dx, cut = split.backward_input(params, kept, (dy, jnp.float32(1)), microbatch)
        state = state._replace(gradients=buffers.write(state.gradients, row["backward_local"], dx), sent_gradient=dx)
        if full:
            return self._add_grads(state, place, split.backward_weight(params, kept.weight, cut, microbatch))
        return state._replace(cut=_write_at(state.cut, kind, row["backward_cut"], cut))

    def first_backward(self, state: State, row: Row) -> State:
        split, microbatch = self.splits.first, self._microbatch(row["backward_microbatch"])
        _, _, kept = split.forward(self.shared, None, microbatch)
        _, cut = split.backward_input(self.shared, kept, state.sent_gradient, microbatch)
        grads = split.backward_weight(self.shared, kept.weight, cut, microbatch)
        return state._replace(shared_grads=buffers.accumulate(state.shared_grads, grads))

    def weight(self, kind: int, slot: Slot, state: State, row: Row) -> State:
        split, place = self.splits.stages[kind], row["weight_slot"] if slot is None else slot
        params = (_select(self.stage_params, place), self.shared)
        kept = buffers.read(state.weight_residual[kind], row["weight_residual"])
        cut = buffers.read(state.cut[kind], row["weight_cut"])
        microbatch = self._microbatch(row["weight_microbatch"])
        return self._add_grads(state, place, split.backward_weight(params, kept, cut, microbatch))

    # ---------------------------------------------------------------- helpers

    def _microbatch(self, index: jax.Array) -> PyTree:
        return buffers.read(self.batch, index)

    @staticmethod
    def _add_grads(state: State, slot: int | jax.Array, grads: tuple[PyTree, PyTree]) -> State:
        return state._replace(
            stage_grads=_add_at(state.stage_grads, slot, grads[0]),
            shared_grads=buffers.accumulate(state.shared_grads, grads[1]),
        )


def _replace_at(items: tuple[PyTree, ...], index: int, value: PyTree) -> tuple[PyTree, ...]:
    return (*items[:index], value, *items[index + 1 :])


def _write_at(pools: tuple[PyTree, ...], kind: int, slot: jax.Array, value: PyTree) -> tuple[PyTree, ...]:
    return _replace_at(pools, kind, buffers.write(pools[kind], slot, value))


def _select(trees: tuple[PyTree, ...], slot: int | jax.Array) -> PyTree:
    if isinstance(slot, int):
        return trees[slot]
    return jax.lax.switch(slot, [lambda tree=tree: tree for tree in trees])


def _add_at(sums: tuple[PyTree, ...], slot: int | jax.Array, value: PyTree) -> tuple[PyTree, ...]:
    if isinstance(slot, int):
        return _replace_at(sums, slot, buffers.accumulate(sums[slot], value))
    # Not a conditional, which would copy the sums: see `branch`.
    return tuple(
        jax.lax.fori_loop(0, (slot == i).astype(jnp.int32), lambda _, total: buffers.accumulate(total, value), total)
        for i, total in enumerate(sums)
    )


class OperationTable(NamedTuple):
    """Which operations each cell runs.

    Attributes:
        names: for each operation, the key `("forward", kind, slot)` and the like.
        active: bool [ticks, ranks, operations].
    """

    names: tuple[tuple[Any, ...], ...]
    active: np.ndarray


def operation_table(table: TickTable, stage_kinds: tuple[int, ...]) -> OperationTable:
    """Read off the table which operations exist at all, and where each is active."""
    kinds = np.array([*stage_kinds, -1])
    full = table.backward_full == 1
    phases: tuple[tuple[str, np.ndarray, np.ndarray, np.ndarray | None], ...] = (
        ("first", table.forward_stage, table.forward_slot, table.forward_stage == 0),
        ("forward", table.forward_stage, table.forward_slot, None),
        ("last", table.forward_stage, table.forward_slot, table.forward_loss >= 0),
        ("backward", table.backward_stage, table.backward_slot, full),
        ("backward_input", table.backward_stage, table.backward_slot, ~full & (table.backward_stage >= 0)),
        ("first_backward", table.backward_stage, table.backward_slot, table.backward_stage == 0),
        ("backward_weight", table.weight_stage, table.weight_slot, None),
    )
    names: list[tuple[Any, ...]] = []
    active: list[np.ndarray] = []
    for name, stage, slot, condition in phases:
        present = stage >= 0 if condition is None else condition
        if name in ("first", "last", "first_backward"):
            names.append((name,))
            active.append(present)
            continue
        kind = kinds[stage]
        for key in sorted({(int(k), int(s)) for k, s in zip(kind[present], slot[present], strict=True)}):
            names.append((name, *key))
            active.append(present & (kind == key[0]) & (slot == key[1]))
    return OperationTable(tuple(names), np.stack(active, axis=-1))


def operations(cells: Cells, names: Sequence[tuple[Any, ...]]) -> list[Operation]:
    """The function of each named operation; slot None: that of the row."""
    return [_operation(cells, *name) for name in names]


def _operation(cells: Cells, name: str, *key: Any) -> Operation:
    read, function = _functions(cells, name, *key)

    def run(state: State, row: Row, values: Any) -> State:
        with jax.named_scope("_".join(map(str, (name, *key)))):
            return function(state, row, *values)

    return Operation(read, run)


def _functions(
    cells: Cells, name: str, kind: int = 0, slot: Slot = 0
) -> tuple[Callable[..., Any], Callable[..., State]]:
    if name in ("backward", "backward_input"):
        read = partial(cells.read_backward, kind)
        run = partial(cells.backward, kind, slot, name == "backward")
        return lambda state, row: (read(state, row),), run
    functions: dict[str, Callable[..., State]] = {
        "first": cells.first,
        "forward": partial(cells.forward, kind, slot),
        "last": cells.last,
        "first_backward": cells.first_backward,
        "backward_weight": partial(cells.weight, kind, slot),
    }
    return lambda state, row: (), functions[name]
