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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dualpipe_jax.executor.cells import Operation, State


class Tick(NamedTuple):
    """What a rank reads of the table in a tick, int32.

    Attributes:
        row: the named columns. cell: index of the rank's cell. flags: [operations], 1 for those of the cell.
    """

    row: dict[str, jax.Array]
    cell: jax.Array
    flags: jax.Array


def read_tick(columns: Sequence[str], values: jax.Array) -> Tick:
    """Name the entries of a row, int32 [columns, 1, operations]."""
    num = len(columns)
    row = {name: jnp.asarray(values[i]) for i, name in enumerate(columns)}
    return Tick(row, jnp.asarray(values[num]), jnp.asarray(values[num + 1 :]))


def run_loops(operations: Sequence[Operation], state: State, tick: Tick) -> State:
    """Run each operation whose flag is 1."""
    for i, operation in enumerate(operations):

        def body(trip: jax.Array, state: State, operation: Operation = operation) -> State:
            tied, _ = jax.lax.optimization_barrier((tick.row, trip))
            return operation(state, tied)

        state = jax.lax.fori_loop(0, tick.flags[i], body, state)
    return state


def distinct_cells(active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bool [cells, operations], int32 [ticks, ranks] cell of each entry) of bool [ticks, ranks, operations]."""
    cells, index = np.unique(active.reshape(-1, active.shape[-1]), axis=0, return_inverse=True)
    return cells, index.reshape(active.shape[:2]).astype(np.int32)


def run_switch(operations: Sequence[Operation], cells: np.ndarray, state: State, tick: Tick) -> State:
    """Run the operations of the rank's cell; cells: see `distinct_cells`."""

    def branch(wanted: np.ndarray) -> Any:
        def run(state: State, row: dict[str, jax.Array]) -> State:
            for operation, present in zip(operations, wanted, strict=True):
                state = operation(state, row) if present else state
            return state

        return run

    return jax.lax.switch(tick.cell, [branch(wanted) for wanted in cells], state, tick.row)


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


def run_straight(plan: Sequence[Straight], operations: Sequence[Operation], state: State, tick: Tick) -> State:
    """Run what all ranks run; what some run, under a condition. operations: of the plan's names."""
    for (_, flag), operation in zip(plan, operations, strict=True):
        if flag is None:
            state = operation(state, tick.row)
        else:
            state = jax.lax.cond(tick.flags[flag] > 0, operation, lambda state, row: state, state, tick.row)
    return state
