"""How long cells take, in any one unit of time."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from dualpipe_jax.schedule.actions import Action, Cell, Kind  # noqa: F401 - Action for the doctest

Cost = float | tuple[float, ...]
"""One number for all stages, or one for each stage."""

_PARTS = {Kind.F: "F", Kind.I: "I", Kind.W: "W", Kind.B: "IW"}
_TOGETHER = {"FI": "forward_input", "FW": "forward_weight", "IW": "input_weight", "FIW": "pair"}
_ALONE = {"F": "forward", "I": "backward_input", "W": "backward_weight"}


@dataclass(frozen=True)
class Costs:
    """Time of a cell by its pattern: which of F, I and W it has (B counts as I and W).

    Attributes:
        forward, backward_input, backward_weight: F, I, W alone.
        pair: F+I+W, which is also F+B. None (here and below): the sum of the parts.
        forward_input, forward_weight, input_weight: F+I, F+W and I+W; the last is also B.
        transfer: time of a message between two ranks.
    A tuple has one number for each stage. A cell over two stages takes the mean of the two stages' numbers.

    Raises:
        ValueError: a number is negative, not finite, or no number.

    Example:
        >>> Costs(backward_weight=0.5).cell((Action(Kind.B, 0, 0, 0),))
        1.5
    """

    forward: Cost = 1.0
    backward_input: Cost = 1.0
    backward_weight: Cost = 1.0
    pair: Cost | None = None
    forward_input: Cost | None = None
    forward_weight: Cost | None = None
    input_weight: Cost | None = None
    transfer: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and not (math.isfinite(number) and number >= 0):
                    raise ValueError(f"cost {field.name}={value} must be finite and at least 0; nearest valid: 0")

    def cell(self, cell: Cell) -> float:
        """The time of a cell."""
        return self._cache(tuple((a.kind, a.stage) for a in cell))

    def check(self, num_stages: int) -> None:
        """Raise ValueError where a tuple has not one number a stage."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple) and len(value) != num_stages:
                raise ValueError(f"cost {field.name} has {len(value)} numbers; give one for each of {num_stages=}")

    def for_stages(self, num_ranks: int, num_stages: int) -> Costs:
        """The same model cut into another number of stages.

        A number is the time of 1/P of the layers; a tuple of n numbers the times of n equal parts of the layers. The
        result has one number a stage where any cost had several, else one number.

        Raises:
            ValueError: neither of n and num_stages divides the other.

        Example:
            >>> Costs(forward=(1.0, 3.0)).for_stages(num_ranks=2, num_stages=4).forward
            (0.5, 0.5, 1.5, 1.5)
            >>> Costs(pair=2.5).for_stages(num_ranks=2, num_stages=4).pair
            1.25
        """
        changed: dict[str, Any] = {}
        for name in (*_ALONE.values(), *_TOGETHER.values()):
            value = getattr(self, name)
            if isinstance(value, tuple):
                changed[name] = spread(name, value, num_stages)
            elif value is not None:
                changed[name] = value * num_ranks / num_stages
        return replace(self, **changed)

    @property
    def has_patterns(self) -> bool:
        """Is any cell of several actions cheaper or dearer than its parts?"""
        return any(getattr(self, name) is not None for name in _TOGETHER.values())

    def least(self, kind: Kind, stage: int) -> float:
        """The least that an F, I or W adds to any cell: alone, or as its equal share of a pattern."""
        shares = [cost_at(getattr(self, _ALONE[kind.value]), stage)]
        for pattern, name in _TOGETHER.items():
            value = getattr(self, name)
            if kind.value in pattern and value is not None:
                shares.append((min(value) if isinstance(value, tuple) else value) / len(pattern))
        return min(shares)

    @cached_property
    def _known(self) -> dict[tuple[tuple[Kind, int], ...], float]:
        return {}

    def _cache(self, key: tuple[tuple[Kind, int], ...]) -> float:
        if key not in self._known:
            self._known[key] = self._price(key)
        return self._known[key]

    def _price(self, key: tuple[tuple[Kind, int], ...]) -> float:
        pattern = "".join(_PARTS[kind] for kind, _ in key)
        together = getattr(self, _TOGETHER[pattern]) if pattern in _TOGETHER else None
        if together is not None:
            return sum(cost_at(together, stage) for _, stage in key) / len(key)
        return float(sum(cost_at(getattr(self, _ALONE[p]), stage) for kind, stage in key for p in _PARTS[kind]))


def spread(name: str, parts: tuple[float, ...], num_stages: int) -> tuple[float, ...]:
    """The numbers of n equal parts of the layers, for num_stages equal parts.

    Raises:
        ValueError: neither of n and num_stages divides the other.
    """
    n = len(parts)
    if n % num_stages == 0:
        size = n // num_stages
        return tuple(sum(parts[s * size : (s + 1) * size]) for s in range(num_stages))
    if num_stages % n == 0:
        size = num_stages // n
        return tuple(parts[s // size] / size for s in range(num_stages))
    raise ValueError(f"cost {name} has {n} numbers, which do not fit {num_stages=}; nearest valid: {num_stages}")


def cost_at(cost: Cost, stage: int) -> float:
    """The number of one stage."""
    return float(cost[stage] if isinstance(cost, tuple) else cost)


MOE_COSTS = Costs(1.5, 1.5, 1.0, pair=3.0, forward_input=2.3, forward_weight=2.0, input_weight=2.0)
"""A mixture-of-experts microbatch: alone, F and I leave an all-to-all exposed; with other work beside, they hide it."""
