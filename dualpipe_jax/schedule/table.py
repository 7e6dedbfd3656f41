"""The table that the executor runs: what each rank does in each tick, and where every value is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

Channel = str
CHANNELS: tuple[Channel, ...] = ("right_activation", "right_gradient", "left_activation", "left_gradient")
"""Direction of travel (right: from rank r-1 to r) and what is sent."""


class Operation(NamedTuple):
    """One operation of a uniform tick: kind F, B, I or W, the slot of the stage (None: the rank's row says which), and
    its kind of stage."""

    kind: str
    slot: int | None
    stage_kind: int


TickPattern = tuple[Operation, ...]
"""What every rank does in a uniform tick."""


@dataclass(frozen=True)
class Segment:
    """Ticks start..stop-1.

    Attributes:
        uniform: all ranks do the same in each tick.
        channels: what any tick of the segment sends, a subset of `CHANNELS`.
        patterns: for a uniform segment, the patterns through which its ticks cycle: tick start+i has
            patterns[i % len(patterns)], and stop-start is a multiple of len(patterns). Else empty.
    """

    start: int
    stop: int
    uniform: bool
    channels: frozenset[Channel]
    patterns: tuple[TickPattern, ...] = ()


@dataclass(frozen=True, eq=False)
class TickTable:
    """int32 arrays [num_ticks, num_ranks]; -1 means none. The following hold (`validate_table` replays them):

    - In a tick a rank runs at most one F, then at most one of B and I, then at most one W, those of one cell; then
      messages move to the neighbours and are there for the next tick.
    - Every action of the schedule is in the table once, in its rank's order.
    - Each value is in its slot from the tick that makes it (or at whose end it arrives) up to the tick that reads it,
      and nothing else is written to that slot meanwhile. Each value is read once, and none is left at the end.
    - A slot whose value is read in a tick may take a message at the end of the same tick, or a computed value in a
      later one.

    Buffers of a rank: an inbox of activations (for F), an inbox of output gradients (for B, I), and for each kind of
    stage residuals (F to B or I), weight residuals (F to B or W) and cuts (I to W).

    Attributes:
        forward_stage, forward_slot: F's stage, and where the rank keeps it.
        forward_microbatch: index in the whole batch, over directions.
        forward_input: activation inbox slot; -1 at stage 0.
        forward_local: activation inbox slot of the output where the next stage is on the same rank.
        forward_loss: gradient inbox slot of the loss's gradient, at the last stage.
        forward_residual, forward_weight_residual: slots of what F keeps.
        backward_stage, backward_slot, backward_microbatch: of B or I.
        backward_full: 1 for B, 0 for I.
        backward_output_gradient: gradient inbox slot.
        backward_residual, backward_weight_residual: slots of what F kept. I reads the second one too, and W later.
        backward_cut: slot of what I keeps for W; -1 for B.
        backward_local: gradient inbox slot of the input's gradient where the previous stage is on the same rank.
        weight_stage, weight_slot, weight_microbatch: of W; a B does its own.
        weight_residual, weight_cut: slots.
        receive_*: inbox slot of the message that arrives at the end of the tick, going right or left.
        num_activation_slots, num_gradient_slots: sizes of the inboxes.
        num_residual_slots, num_weight_residual_slots, num_cut_slots: by kind of stage.
        stage_kinds: for each stage.
        segments: cover all ticks, in order.
    """

    forward_stage: np.ndarray
    forward_slot: np.ndarray
    forward_microbatch: np.ndarray
    forward_input: np.ndarray
    forward_local: np.ndarray
    forward_loss: np.ndarray
    forward_residual: np.ndarray
    forward_weight_residual: np.ndarray
    backward_stage: np.ndarray
    backward_slot: np.ndarray
    backward_microbatch: np.ndarray
    backward_full: np.ndarray
    backward_output_gradient: np.ndarray
    backward_residual: np.ndarray
    backward_weight_residual: np.ndarray
    backward_cut: np.ndarray
    backward_local: np.ndarray
    weight_stage: np.ndarray
    weight_slot: np.ndarray
    weight_microbatch: np.ndarray
    weight_residual: np.ndarray
    weight_cut: np.ndarray
    receive_right_activation: np.ndarray
    receive_right_gradient: np.ndarray
    receive_left_activation: np.ndarray
    receive_left_gradient: np.ndarray
    num_activation_slots: int
    num_gradient_slots: int
    num_residual_slots: tuple[int, ...]
    num_weight_residual_slots: tuple[int, ...]
    num_cut_slots: tuple[int, ...]
    stage_kinds: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def num_ticks(self) -> int:
        return self.forward_stage.shape[0]

    @property
    def num_ranks(self) -> int:
        return self.forward_stage.shape[1]


COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(TickTable) if f.type == "np.ndarray")
"""The names of a table's arrays."""


def concatenate_tables(tables: Sequence[TickTable]) -> TickTable:
    """Tables of equal ranks and kinds of stages one after the other, each with idle ticks to the length of the longest.

    Buffers are as large as the largest. More than one table has no segments in common: the result has none that are
    uniform.
    """
    if len(tables) == 1:
        return tables[0]
    ticks = max(t.num_ticks for t in tables)
    columns: dict[str, Any] = {
        name: np.concatenate(
            [np.pad(getattr(t, name), ((0, ticks - t.num_ticks), (0, 0)), constant_values=-1) for t in tables]
        )
        for name in COLUMNS
    }
    sizes: dict[str, Any] = {}
    for name in (f.name for f in fields(TickTable) if f.name.startswith("num_")):
        largest = np.max([getattr(t, name) for t in tables], axis=0)
        sizes[name] = tuple(largest.tolist()) if largest.ndim else int(largest)
    channels = frozenset().union(*(s.channels for t in tables for s in t.segments))
    segments = tuple(Segment(i * ticks, (i + 1) * ticks, False, channels) for i in range(len(tables)))
    return replace(tables[0], **columns, **sizes, segments=segments)
