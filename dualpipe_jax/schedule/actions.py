"""What a pipeline rank does: actions, cells of actions, and a schedule of cells for each rank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from dualpipe_jax.schedule.placement import Placement


class Kind(StrEnum):
    """F forward, B backward (I then W), I gradient of the input, W gradient of the weights."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's own name
    W = "W"


@dataclass(frozen=True, order=True)
class Action:
    """One piece of work on one stage.

    Attributes:
        kind: F, B, I or W.
        stage: 0..num_stages-1, global, counted along the direction.
        direction: 0, or 1 for the microbatches that enter a bidirectional pipeline at the other end.
        microbatch: counted per direction from 0.

    Example:
        >>> str(Action(Kind.F, 2, 1, 0))
        "2F0'"
    """

    kind: Kind
    stage: int
    direction: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}{chr(39) * self.direction}"


Cell = tuple[Action, ...]
"""Actions computed in one program region, executed in the order F, then B or I, then W; at most one of each."""

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)('?)")
_CELL = re.compile(r"\((?P<actions>[^()]+)\)OVERLAP_(?P<kinds>[FBIW_]+)")


def parse_action(text: str) -> Action:
    """Read the text form of an action.

    Raises:
        ValueError: the text is no action.

    Example:
        >>> parse_action("7B3")
        Action(kind=<Kind.B: 'B'>, stage=7, direction=0, microbatch=3)
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no action: write <stage><F|B|I|W><microbatch>, then ' for direction 1")
    stage, kind, microbatch, direction = match.groups()
    return Action(Kind(kind), int(stage), len(direction), int(microbatch))


def format_cell(cell: Cell) -> str:
    """The text form of a cell, as in torch.distributed.pipelining.

    Example:
        >>> format_cell((parse_action("0F7"), parse_action("7B3")))
        '(0F7;7B3)OVERLAP_F_B'
    """
    if len(cell) == 1:
        return str(cell[0])
    return f"({';'.join(map(str, cell))})OVERLAP_{'_'.join(a.kind for a in cell)}"


def parse_cell(text: str) -> Cell:
    """Read the text form of a cell; undoes `format_cell`.

    Raises:
        ValueError: the text is no cell, or its suffix names other kinds than its actions.
    """
    match = _CELL.fullmatch(text)
    if match is None:
        return (parse_action(text),)
    cell = tuple(map(parse_action, match["actions"].split(";")))
    if format_cell(cell) != text:
        raise ValueError(f"{text!r} does not name its own actions; the nearest valid text is {format_cell(cell)!r}")
    return cell


@dataclass(frozen=True)
class Schedule:
    """Who does what, in which order.

    Attributes:
        name: how the schedule was built.
        placement: which rank holds which stages.
        num_microbatches: M, over all directions.
        ranks: for each rank its cells, in order.
    """

    name: str
    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[Cell, ...], ...]

    @cached_property
    def microbatches_per_direction(self) -> int:
        return self.num_microbatches // self.placement.num_directions

    def global_microbatch(self, action: Action) -> int:
        """The microbatch's index in the batch: those of direction 0 come first."""
        return action.direction * self.microbatches_per_direction + action.microbatch
