"""Run the operations that a cell names, in the form that the compiler at hand handles well.

`loops` (CPU): each operation sits in a loop of 0 or 1 trips. XLA:CPU copies the whole state through a conditional,
but updates it in place through a loop. The loop's body must depend on its index, or its matmuls would be hoisted out
of it and run in every tick.

`switch` (GPU): one branch for each distinct cell, straight-line inside, so that the all-to-alls of one operation run
behind the matmuls of another. XLA:GPU updates the state in place through a conditional.

`straight` (GPU): for ticks in which all ranks run the same cell, no branch at all; only the model's two ends, which
one rank has and the others have not, are conditionals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dualpipe_jax.executor.cells import Operation, State

Row = dict[str, jax.Array]


def run_loops(operations: Sequence[Operation], state: State, row: Row, flags: jax.Array) -> State:
    """Run each operation whose flag (int32 [operations]) is 1."""
    for i, operation in enumerate(operations):

        def body(trip: jax.Array, state: State, operation: Operation = operation) -> State:
            tied, _ = jax.lax.optimization_barrier((row, trip))
            return operation(state, tied)

        state = jax.lax.fori_loop(0, flags[i], body, state)
    return state


def distinct_cells(active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bool [cells, operations], int32 [ticks, ranks] cell of each entry) of bool [ticks, ranks, operations]."""
    cells, index = np.unique(active.reshape(-1, active.shape[-1]), axis=0, return_inverse=True)
    return cells, index.reshape(active.shape[:2]).astype(np.int32)


def run_switch(operations: Sequence[Operation], cells: np.ndarray, state: State, row: Row, cell: jax.Array) -> State:
    """Run the operations of the cell with this index."""

    def branch(wanted: np.ndarray) -> Any:
        def run(state: State, row: Row) -> State:
            for operation, present in zip(operations, wanted, strict=True):
                state = operation(state, row) if present else state
            return state

        return run

    return jax.lax.switch(cell, [branch(wanted) for wanted in cells], state, row)


def run_straight(
    operations: Sequence[Operation], active: np.ndarray, state: State, row: Row, flags: jax.Array
) -> State:
    """Run what all ranks run (by `active`, bool [ticks, ranks, operations]); what some run, under a condition."""
    everywhere, somewhere = np.all(active, axis=(0, 1)).tolist(), np.any(active, axis=(0, 1)).tolist()
    for i, operation in enumerate(operations):
        if everywhere[i]:
            state = operation(state, row)
        elif somewhere[i]:
            state = jax.lax.cond(flags[i] > 0, operation, lambda state, row: state, state, row)
    return state


def row_columns(columns: Sequence[str], values: jax.Array) -> Row:
    """Name the entries of one row, int32 [columns]."""
    return {name: jnp.asarray(values[i]) for i, name in enumerate(columns)}
