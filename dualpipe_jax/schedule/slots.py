"""Slots for values, as a compiler assigns registers."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np


class Lifetime(NamedTuple):
    """A value in one buffer of one rank.

    Attributes:
        rank: whose buffer.
        start, end: moments of the write and of the last read. A value computed in a tick counts from the tick's
            first moment, so it never takes a slot that is read in the same tick.
        entries: (tick, column) where the table names the value's slot.
    """

    rank: int
    start: int
    end: int
    entries: tuple[tuple[int, str], ...]


def assign_slots(columns: Mapping[str, np.ndarray], lifetimes: Iterable[Lifetime]) -> int:
    """Write each value's slot into the table and return how many slots one buffer of one rank needs.

    Values take the lowest free slot in order of their start: for intervals this needs no more slots than the largest
    number of values that live at once.
    """
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    size = 0
    for value in sorted(lifetimes):
        while busy and busy[0][0] < value.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            slot = heapq.heappop(free)
        else:
            slot, size = size, size + 1
        heapq.heappush(busy, (value.end, slot))
        for tick, column in value.entries:
            columns[column][tick, value.rank] = slot
    return size
