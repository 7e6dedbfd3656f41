"""All schedules by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dualpipe_jax.schedule.actions import Schedule
from dualpipe_jax.schedule.building_block import v_half, v_min
from dualpipe_jax.schedule.dualpipe import dualpipe
from dualpipe_jax.schedule.dualpipe_v import dualpipe_v
from dualpipe_jax.schedule.gpipe import gpipe
from dualpipe_jax.schedule.interleaved import interleaved_1f1b
from dualpipe_jax.schedule.one_f_one_b import one_f_one_b
from dualpipe_jax.schedule.placement import SlotRule
from dualpipe_jax.schedule.search import auto
from dualpipe_jax.schedule.wave import wave
from dualpipe_jax.schedule.zb_h import zb_h1, zb_h2
from dualpipe_jax.schedule.zb_v import zb_v


@dataclass(frozen=True)
class Builder:
    """A schedule's function and the numbers it takes.

    Attributes:
        build: (num_ranks, num_microbatches, slot_rule=, **options) -> Schedule.
        min_microbatches: fewest microbatches for P ranks.
        multiple: P, M -> what M must be a multiple of.
        even_ranks: must P be even?
    """

    build: Callable[..., Schedule]
    min_microbatches: Callable[[int], int] = lambda num_ranks: 1
    multiple: Callable[[int], int] = lambda num_ranks: 1
    even_ranks: bool = False


BUILDERS: dict[str, Builder] = {
    "gpipe": Builder(gpipe),
    "1f1b": Builder(one_f_one_b),
    "interleaved_1f1b": Builder(interleaved_1f1b),
    "zb_h1": Builder(zb_h1),
    "zb_h2": Builder(zb_h2),
    "zb_v": Builder(zb_v),
    "v_half": Builder(v_half),
    "v_min": Builder(v_min),
    "wave": Builder(wave),
    "auto": Builder(auto),
    "dualpipe": Builder(dualpipe, lambda p: 2 * p, lambda p: 2, even_ranks=True),
    "dualpipe_v": Builder(dualpipe_v, lambda p: 2 * p),
}


def build(
    name: str, *, num_ranks: int, num_microbatches: int, slot_rule: SlotRule = "depth", **options: Any
) -> Schedule:
    """Build a schedule.

    Args:
        name: a key of `BUILDERS`.
        num_ranks: P, pipeline ranks.
        num_microbatches: M, microbatches a step, over all directions.
        slot_rule: see `Placement`.
        **options: what the builder takes besides.

    Raises:
        ValueError: there is no such schedule, or it does not exist for P and M; names the nearest valid values.

    Example:
        >>> build("dualpipe", num_ranks=4, num_microbatches=6)
        Traceback (most recent call last):
        ...
        ValueError: dualpipe on num_ranks=4 needs num_microbatches >= 8 and a multiple of 2, not 6; nearest valid: 8
    """
    builder = _find(name)
    _check_ranks(name, builder, num_ranks)
    valid = nearest_microbatches(name, num_ranks, num_microbatches)
    if num_microbatches not in valid:
        least, multiple = builder.min_microbatches(num_ranks), builder.multiple(num_ranks)
        rule = f"num_microbatches >= {least}" + (f" and a multiple of {multiple}" if multiple > 1 else "")
        near = " or ".join(map(str, valid))
        raise ValueError(f"{name} on {num_ranks=} needs {rule}, not {num_microbatches}; nearest valid: {near}")
    unknown = sorted(set(options) - set(inspect.signature(builder.build).parameters))
    if unknown:
        raise ValueError(f"{name} does not take {', '.join(unknown)}")
    return builder.build(num_ranks, num_microbatches, slot_rule=slot_rule, **options)


def nearest_microbatches(name: str, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
    """The valid numbers of microbatches nearest to the given one: itself, or one or two others.

    Raises:
        ValueError: there is no such schedule, or none for P.

    Example:
        >>> nearest_microbatches("dualpipe", 4, 9)
        (8, 10)
    """
    builder = _find(name)
    _check_ranks(name, builder, num_ranks)
    multiple = builder.multiple(num_ranks)
    least = -(-builder.min_microbatches(num_ranks) // multiple) * multiple
    if num_microbatches <= least:
        return (least,)
    below = num_microbatches // multiple * multiple
    return (below,) if below == num_microbatches else (below, below + multiple)


def _find(name: str) -> Builder:
    if name not in BUILDERS:
        raise ValueError(f"unknown schedule {name!r}; choose one of {', '.join(BUILDERS)}")
    return BUILDERS[name]


def _check_ranks(name: str, builder: Builder, num_ranks: int) -> None:
    if builder.even_ranks and (num_ranks < 2 or num_ranks % 2):
        near = f"{num_ranks - 1} or {num_ranks + 1}" if num_ranks > 2 else "2"
        raise ValueError(f"{name} needs num_ranks even and at least 2, not {num_ranks}; nearest valid: {near}")
    if num_ranks < 1:
        raise ValueError(f"{name} needs num_ranks >= 1, not {num_ranks}; nearest valid: 1")
