"""Ticks in which all ranks do the same become segments of straight-line code."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dualpipe_jax.schedule.table import CHANNELS, Operation, Segment, TickPattern


def cut_segments(
    columns: Mapping[str, np.ndarray], stage_kinds: tuple[int, ...], max_period: int
) -> tuple[Segment, ...]:
    """Cover all ticks with segments, uniform ones where the same few patterns repeat at least twice.

    Ranks may do the same for stages in different slots. Which slot is then read from the table, and a rank selects its
    parameters in every tick: that is done for a long steady state only, where no other cut does nearly as well. (Each
    segment is compiled by itself, with all its cells if it is not uniform.)

    Args:
        columns: arrays [ticks, ranks] of a `TickTable`.
        max_period: the longest cycle of patterns to look for. A bidirectional steady state alternates between two.
    """
    fixed, free = (_cut(columns, stage_kinds, max_period, any_slot) for any_slot in (False, True))
    steady = max((s for s in free if s.uniform), key=_length, default=None)
    ticks, covered = len(columns["forward_stage"]), sum(_length(s) for s in fixed if s.uniform)
    if steady is None or _length(steady) < max(1.5 * covered, ticks / 4):
        return fixed
    before, after = _segment(columns, 0, steady.start), _segment(columns, steady.stop, ticks)
    return (*before, steady, *after)


def _length(segment: Segment) -> int:
    return segment.stop - segment.start


def _cut(
    columns: Mapping[str, np.ndarray], stage_kinds: tuple[int, ...], max_period: int, any_slot: bool
) -> tuple[Segment, ...]:
    patterns = [_pattern(columns, stage_kinds, t, any_slot) for t in range(len(columns["forward_stage"]))]
    segments: list[Segment] = []
    start = tick = 0
    while tick < len(patterns):
        period, length = _longest_cycle(patterns, tick, max_period)
        if length:
            segments += _segment(columns, start, tick)
            cycle = tuple(p for p in patterns[tick : tick + period] if p is not None)
            segments += _segment(columns, tick, tick + length, cycle)
            start = tick + length
        tick += max(length, 1)
    return (*segments, *_segment(columns, start, len(patterns)))


def _pattern(
    columns: Mapping[str, np.ndarray], stage_kinds: tuple[int, ...], tick: int, any_slot: bool
) -> TickPattern | None:
    """What all ranks do in a tick; None where they differ or idle."""
    kinds = np.array([*stage_kinds, -1])
    operations = []
    for phase in ("forward", "backward", "weight"):
        stage, slot = columns[f"{phase}_stage"][tick], columns[f"{phase}_slot"][tick]
        full = columns["backward_full"][tick] if phase == "backward" else stage >= 0
        same = {(bool(s >= 0), int(kinds[s]), int(f)) for s, f in zip(stage, full, strict=True)}
        slots = set(slot.tolist())
        if len(same) > 1 or (len(slots) > 1 and not any_slot):
            return None
        if stage[0] >= 0:
            name = {"forward": "F", "weight": "W"}.get(phase, "B" if full[0] else "I")
            operations.append(Operation(name, None if any_slot else int(slot[0]), int(kinds[stage[0]])))
    return tuple(operations) or None


def _longest_cycle(patterns: list[TickPattern | None], start: int, max_period: int) -> tuple[int, int]:
    """(period, length) of the longest repetition from `start`: whole cycles, two at least; (0, 0) if there is none."""
    best = 0, 0
    for period in range(1, max_period + 1):
        stop = start
        while (
            stop < len(patterns)
            and patterns[stop] is not None
            and (stop < start + period or patterns[stop] == patterns[stop - period])
        ):
            stop += 1
        cycles = (stop - start) // period
        if cycles >= 2 and cycles * period > best[1]:
            best = period, cycles * period
    return best


def _segment(
    columns: Mapping[str, np.ndarray], start: int, stop: int, patterns: tuple[TickPattern, ...] = ()
) -> list[Segment]:
    if start == stop:
        return []
    channels = frozenset(c for c in CHANNELS if (columns[f"receive_{c}"][start:stop] >= 0).any())
    return [Segment(start, stop, bool(patterns), channels, patterns)]
