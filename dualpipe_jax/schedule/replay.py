"""Replay a table symbolically: every slot holds the name of the value that was written to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dualpipe_jax.schedule.actions import Action, Kind, Schedule
from dualpipe_jax.schedule.graph import PHASE, ScheduleError
from dualpipe_jax.schedule.lower import travel
from dualpipe_jax.schedule.table import CHANNELS, Operation, TickPattern, TickTable

Name = tuple[str, int, int, int]
"""(what, direction, stage, microbatch) of a value."""

Pool = tuple[str, int, int]
"""(buffer, kind of stage, number of slots)."""


def validate_table(table: TickTable, schedule: Schedule) -> None:
    """Check that a table does what a schedule says: the invariants in `TickTable`'s docstring.

    Raises:
        ScheduleError: names tick, rank and column.
    """
    replay = _Replay(table, schedule)
    for tick in range(table.num_ticks):
        for rank in range(table.num_ranks):
            replay.forward(tick, rank)
            replay.backward(tick, rank)
            replay.weight(tick, rank)
        replay.exchange(tick)
    replay.finish()
    _check_segments(table)


@dataclass
class _Replay:
    table: TickTable
    schedule: Schedule
    buffers: dict[tuple[int, str, int], dict[int, Name]] = field(default_factory=dict)
    read_in_tick: set[tuple[int, str, int, int]] = field(default_factory=set)
    sent: dict[tuple[int, str], Name] = field(default_factory=dict)
    order: dict[int, list[Action]] = field(default_factory=dict)

    def at(self, column: str, tick: int, rank: int) -> int:
        return int(getattr(self.table, column)[tick, rank])

    def action(self, phase: str, kind: Kind, tick: int, rank: int) -> Action | None:
        """The action of a phase in this tick, checked against the placement."""
        stage = self.at(f"{phase}_stage", tick, rank)
        if stage < 0:
            return None
        slot = self.at(f"{phase}_slot", tick, rank)
        placement = self.schedule.placement
        placed, direction = placement.stage_of(rank, slot) if 0 <= slot < placement.slots else (-1, 0)
        if placed != stage:
            raise ScheduleError(f"{tick=} {rank=}: {phase}_slot={slot} does not hold stage {stage}")
        index = self.at(f"{phase}_microbatch", tick, rank) - direction * self.schedule.microbatches_per_direction
        action = Action(kind, stage, direction, index)
        self.order.setdefault(rank, []).append(action)
        return action

    def write(self, column: str, tick: int, rank: int, pool: Pool, name: Name, late: bool = False) -> None:
        buffer, kind, size = pool
        slot, slots = self.at(column, tick, rank), self.buffers.setdefault((rank, buffer, kind), {})
        if not 0 <= slot < size:
            raise ScheduleError(f"{tick=} {rank=}: {column}={slot} for {name} is outside 0..{size - 1}")
        if slot in slots or (not late and (rank, buffer, kind, slot) in self.read_in_tick):
            raise ScheduleError(f"{tick=} {rank=}: {column}={slot} for {name} overwrites {slots.get(slot)}")
        slots[slot] = name

    def read(self, column: str, tick: int, rank: int, buffer: str, kind: int, name: Name, last: bool = True) -> None:
        slot, slots = self.at(column, tick, rank), self.buffers.get((rank, buffer, kind), {})
        if slots.get(slot) != name:
            raise ScheduleError(f"{tick=} {rank=}: {column}={slot} should hold {name}, holds {slots.get(slot)}")
        if last:
            del slots[slot]
            self.read_in_tick.add((rank, buffer, kind, slot))

    def none(self, column: str, tick: int, rank: int) -> None:
        if self.at(column, tick, rank) >= 0:
            raise ScheduleError(f"{tick=} {rank=}: {column}={self.at(column, tick, rank)} names a slot for nothing")

    def send(self, tick: int, rank: int, action: Action, step: int) -> None:
        """Put a result into the own inbox, or on its way."""
        placement, kind = self.schedule.placement, "activation" if step > 0 else "gradient"
        name = (kind, action.direction, action.stage, action.microbatch)
        local = "forward_local" if step > 0 else "backward_local"
        target = action.stage + step
        if not 0 <= target < placement.num_stages:
            return self.none(local, tick, rank)
        to = placement.rank_of(target, action.direction)
        if to == rank:
            size = self.table.num_activation_slots if step > 0 else self.table.num_gradient_slots
            return self.write(local, tick, rank, (kind, 0, size), name)
        self.sent[to, f"{travel(placement, rank, to, step > 0)}_{kind}"] = name
        return self.none(local, tick, rank)

    def forward(self, tick: int, rank: int) -> None:
        action = self.action("forward", Kind.F, tick, rank)
        if action is None:
            return
        stage, kind = action.stage, self.table.stage_kinds[action.stage]
        value = (action.direction, stage, action.microbatch)
        if stage == 0:
            self.none("forward_input", tick, rank)
        else:
            name = ("activation", action.direction, stage - 1, action.microbatch)
            self.read("forward_input", tick, rank, "activation", 0, name)
        for buffer in ("residual", "weight_residual"):
            pool = buffer, kind, getattr(self.table, f"num_{buffer}_slots")[kind]
            self.write(f"forward_{buffer}", tick, rank, pool, (buffer, *value))
        if stage == self.schedule.placement.num_stages - 1:
            pool = ("gradient", 0, self.table.num_gradient_slots)
            self.write("forward_loss", tick, rank, pool, ("gradient", action.direction, stage + 1, action.microbatch))
        else:
            self.none("forward_loss", tick, rank)
        self.send(tick, rank, action, 1)

    def backward(self, tick: int, rank: int) -> None:
        full = self.at("backward_full", tick, rank) == 1
        action = self.action("backward", Kind.B if full else Kind.I, tick, rank)
        if action is None:
            return
        kind, value = self.table.stage_kinds[action.stage], (action.direction, action.stage, action.microbatch)
        name = ("gradient", action.direction, action.stage + 1, action.microbatch)
        self.read("backward_output_gradient", tick, rank, "gradient", 0, name)
        self.read("backward_residual", tick, rank, "residual", kind, ("residual", *value))
        weight = ("weight_residual", *value)
        self.read("backward_weight_residual", tick, rank, "weight_residual", kind, weight, last=full)
        if full:
            self.none("backward_cut", tick, rank)
        else:
            self.write("backward_cut", tick, rank, ("cut", kind, self.table.num_cut_slots[kind]), ("cut", *value))
        self.send(tick, rank, action, -1)

    def weight(self, tick: int, rank: int) -> None:
        action = self.action("weight", Kind.W, tick, rank)
        if action is None:
            return
        kind, value = self.table.stage_kinds[action.stage], (action.direction, action.stage, action.microbatch)
        self.read("weight_residual", tick, rank, "weight_residual", kind, ("weight_residual", *value))
        self.read("weight_cut", tick, rank, "cut", kind, ("cut", *value))

    def exchange(self, tick: int) -> None:
        """Messages arrive; what is expected is what was sent."""
        sizes = {"activation": self.table.num_activation_slots, "gradient": self.table.num_gradient_slots}
        for rank in range(self.table.num_ranks):
            for channel in CHANNELS:
                kind = channel.split("_")[1]
                message = self.sent.pop((rank, channel), None)
                if message is None:
                    self.none(f"receive_{channel}", tick, rank)
                else:
                    self.write(f"receive_{channel}", tick, rank, (kind, 0, sizes[kind]), message, late=True)
        self.read_in_tick.clear()

    def finish(self) -> None:
        left = [(key, name) for key, slots in self.buffers.items() for name in slots.values()]
        if left:
            raise ScheduleError(f"{len(left)} values are never read, the first is {left[0][1]} on rank {left[0][0][0]}")
        for rank, cells in enumerate(self.schedule.ranks):
            order = [a for cell in cells for a in sorted(cell, key=lambda a: PHASE[a.kind])]
            if self.order.get(rank, []) != order:
                raise ScheduleError(f"{rank=}: the table's actions are not the schedule's {order[:4]} ...")


def _check_segments(table: TickTable) -> None:
    stops = [0, *(s.stop for s in table.segments)]
    if [s.start for s in table.segments] != stops[:-1] or stops[-1] != table.num_ticks:
        raise ScheduleError(
            f"segments {[(s.start, s.stop) for s in table.segments]} do not cover {table.num_ticks} ticks"
        )
    for segment in table.segments:
        ticks = slice(segment.start, segment.stop)
        used = {c for c in CHANNELS if (getattr(table, f"receive_{c}")[ticks] >= 0).any()}
        if used != segment.channels:
            raise ScheduleError(f"segment {segment.start}..{segment.stop} uses {sorted(used)}, not {segment.channels}")
        for i, tick in enumerate(range(segment.start, segment.stop)):
            if segment.uniform and not _follows(table, tick, segment.patterns[i % len(segment.patterns)]):
                raise ScheduleError(f"{tick=} does not follow its segment's pattern on all ranks")


def _follows(table: TickTable, tick: int, pattern: TickPattern) -> bool:
    """Do all ranks do in a tick what the pattern says?"""
    for rank in range(table.num_ranks):
        operations = []
        for phase, name in (("forward", "F"), ("backward", "I"), ("weight", "W")):
            stage, slot = (int(getattr(table, f"{phase}_{c}")[tick, rank]) for c in ("stage", "slot"))
            if phase == "backward" and table.backward_full[tick, rank] == 1:
                name = "B"
            if stage >= 0:
                operations.append(Operation(name, slot, table.stage_kinds[stage]))
        if len(operations) != len(pattern):
            return False
        for wanted, found in zip(pattern, operations, strict=True):
            if found != (wanted if wanted.slot is not None else wanted._replace(slot=found.slot)):
                return False
    return True
