"""Run the operations that a cell names, without a copy of the buffers and without a branch that computes in vain.

Nothing here is a conditional: XLA, on CPU and GPU alike, copies what a conditional updates, once for each branch and
once behind it, but updates it in place through a loop. So a choice is a row of loops of 0 or 1 trips. Two things make
that work. A loop's body depends on its index, or its matmuls would be hoisted out of it and run in every tick. And all
loops write `State.order`, so that each depends on the one before: else XLA sees no order between one that reads a
buffer and one that writes another slot of it later, and copies the buffer.

`operations` (CPU): a loop for each operation. The least to compile.

`cells` (GPU): a loop for each distinct cell, straight-line inside, so that the all-to-alls of one operation run behind
the matmuls of another; and for ticks in which all ranks run the same cell no choice at all, so that messages to the
neighbours run behind matmuls as well. Only the model's two ends, which one rank has and the others have not, are loops
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dualpipe_jax.executor.cells import Operation, Row, State


class Tick(NamedTuple):
    """What a rank reads of the table in a tick, int32.

    Attributes:
        row: the named columns. cell: index of the rank's cell. flags: [operations], 1 for those of the cell.
    """

    row: Row
    cell: jax.Array
    flags: jax.Array


def read_tick(columns: Sequence[str], values: jax.Array) -> Tick:
    """Name the entries of a row, int32 [columns, 1, operations]."""
    num = len(columns)
    row = {name: jnp.asarray(values[i]) for i, name in enumerate(columns)}
    return Tick(row, jnp.asarray(values[num]), jnp.asarray(values[num + 1 :]))


def run_if(flag: jax.Array, operation: Callable[[State, Row], State], state: State, row: Row) -> State:
    """operation(state, row) where the flag (int32) is 1, the state as it is where it is 0."""

    def body(trip: jax.Array, state: State) -> State:
        tied, _ = jax.lax.optimization_barrier((row, trip))
        state = operation(state, tied)
        # No sum, for whose result behind the loop XLA would find a formula without the loop.
        return state._replace(order=(state.order >> 1) | 1)

    return jax.lax.fori_loop(0, flag, body, state)


def run_operations(operations: Sequence[Operation], state: State, tick: Tick) -> State:
    """Run each operation whose flag is 1."""
    for flag, operation in zip(tick.flags, operations, strict=True):
        state = run_if(flag, operation, state, tick.row)
    return state


class Choice(NamedTuple):
    """A distinct cell.

    Attributes:
        number: as in `Tick.cell`. active: bool [operations]. chained: see `run_together`.
    """

    number: int
    active: np.ndarray
    chained: bool


def distinct_cells(active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bool [cells, operations], int32 [ticks, ranks] cell of each entry) of bool [ticks, ranks, operations]."""
    cells, index = np.unique(active.reshape(-1, active.shape[-1]), axis=0, return_inverse=True)
    return cells, index.reshape(active.shape[:2]).astype(np.int32)


def run_cell(operations: Sequence[Operation], cells: Sequence[Choice], state: State, tick: Tick) -> State:
    """Run the operations of the rank's cell, one of those that occur in these ticks."""
    for choice in cells:
        chosen = [operation for operation, present in zip(operations, choice.active, strict=True) if present]
        if chosen:
            cell = partial(run_together, chosen, choice.chained)
            state = run_if((tick.cell == choice.number).astype(jnp.int32), cell, state, tick.row)
    return state


def run_together(operations: Sequence[Operation], chained: bool, state: State, row: Row) -> State:
    """Run operations of one cell, in order, but read before anything is written.

    So none waits for another only because both use a buffer: a backward's matmuls may run behind the all-to-all of the
    forward in the same cell. The values read are copied: one microbatch's, more than the planned slots hold.

    Args:
        chained: the backward is of what the forward makes in the same cell, and must read it afterwards.
    """
    if chained or len(operations) == 1:
        for operation in operations:
            state = operation(state, row)
        return state
    read = [operation.read(state, row) for operation in operations]
    read, state = jax.lax.optimization_barrier((read, state))
    for operation, values in zip(operations, read, strict=True):
        state = operation.run(state, row, values)
    return state


class Straight(NamedTuple):
    """What a uniform tick runs, in order.

    Attributes:
        name: of an operation, see `operation_table`; slot None: that of the rank's row.
        flag: index of the operation that some ranks run and others do not; None: all run it.
    """

    name: tuple[Any, ...]
    flag: int | None


def straight(names: Sequence[tuple[Any, ...]], active: np.ndarray) -> list[Straight]:
    """From bool [ticks, ranks, operations]: what all ranks run, if in different slots, and what some do."""
    everywhere, somewhere = np.all(active, axis=(0, 1)), np.any(active, axis=(0, 1))
    plan: list[Straight] = []
    for i, name in enumerate(names):
        if not somewhere[i]:
            continue
        alike = [j for j, other in enumerate(names) if other[:2] == name[:2]]
        if everywhere[i]:
            plan.append(Straight(name, None))
        elif len(name) == 3 and np.any(active[..., alike], axis=-1).all():
            if (merged := Straight((*name[:2], None), None)) not in plan:
                plan.append(merged)
        else:
            plan.append(Straight(name, i))
    return plan


def run_straight(
    plan: Sequence[Straight], operations: Sequence[Operation], chained: bool, state: State, tick: Tick
) -> State:
    """Run what all ranks run as `run_together` does, and what some run where its flag is 1.

    Args:
        operations: of the plan's names.
    """
    parts = [_where_flagged(o, s.flag, tick.flags) for s, o in zip(plan, operations, strict=True)]
    return run_together(parts, chained, state, tick.row)


def _where_flagged(operation: Operation, flag: int | None, flags: jax.Array) -> Operation:
    """The operation; or one that runs it, and all that it reads, only where its flag is 1."""
    if flag is None:
        return operation
    return Operation(lambda state, row: (), lambda state, row, _: run_if(flags[flag], operation, state, row))
