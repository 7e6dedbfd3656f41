"""Write every full backward as its two halves."""

from __future__ import annotations

import dataclasses

from dualpipe_jax.schedule.actions import Action, Cell, Kind, Schedule


def kinds_in(schedule: Schedule) -> frozenset[Kind]:
    """Which kinds of action a schedule has."""
    return frozenset(action.kind for rank in schedule.ranks for cell in rank for action in cell)


def with_split_backward(schedule: Schedule) -> Schedule:
    """The same schedule with each B as I and W in the same cell; it costs the same, in time and in activations.

    Example:
        >>> from dualpipe_jax.schedule.one_f_one_b import one_f_one_b
        >>> [str(a) for cell in with_split_backward(one_f_one_b(1, 1)).ranks[0] for a in cell]
        ['0F0', '0I0', '0W0']
    """

    def halves(action: Action) -> tuple[Action, ...]:
        if action.kind is not Kind.B:
            return (action,)
        return tuple(dataclasses.replace(action, kind=kind) for kind in (Kind.I, Kind.W))

    def split(cell: Cell) -> Cell:
        return tuple(half for action in cell for half in halves(action))

    return dataclasses.replace(schedule, ranks=tuple(tuple(map(split, rank)) for rank in schedule.ranks))
