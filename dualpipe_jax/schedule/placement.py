"""Which rank holds which stages, and at which of its positions (slots)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

PlacementKind = Literal["loop", "v", "bidirectional"]
SlotRule = Literal["depth", "steady"]


@dataclass(frozen=True)
class Placement:
    """Where stages live on P = num_ranks ranks.

    kind:
        loop: stage s on rank s mod P. Messages that go on from rank P-1 go to rank 0, around a ring.
        v: zigzag. Stages P*g .. P*g+P-1 run rank 0 -> P-1 for even g and P-1 -> 0 for odd g; slots=2 is the V of ZB-V
            and DualPipeV, more slots are the wave of Hanayo.
        bidirectional: P stages; direction 0 has stage s on rank s, direction 1 on rank P-1-s (DualPipe). Each stage
            has two copies.

    slot_rule, the position at which a rank keeps a stage:
        depth: how far down the model the stage is (a slot holds few different kinds of stage on different ranks).
        steady: depth rotated by the rank's distance from its end, so that DualPipe's steady ticks name the same
            slots on all ranks.

    Raises:
        ValueError: the numbers do not make such a placement.

    Example:
        >>> placement = Placement("v", num_ranks=4, slots=2)
        >>> [placement.rank_of(s) for s in range(8)]
        [0, 1, 2, 3, 3, 2, 1, 0]
        >>> Placement("bidirectional", num_ranks=4, slots=2).stage_of(rank=3, slot=0)
        (0, 1)
    """

    kind: PlacementKind
    num_ranks: int
    slots: int
    slot_rule: SlotRule = "depth"

    def __post_init__(self) -> None:
        if self.kind not in get_args(PlacementKind):
            raise ValueError(
                f"unknown placement kind {self.kind!r}; choose one of {', '.join(get_args(PlacementKind))}"
            )
        if self.slot_rule not in get_args(SlotRule):
            raise ValueError(f"unknown slot_rule {self.slot_rule!r}; choose one of {', '.join(get_args(SlotRule))}")
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks={self.num_ranks} must be at least 1; the nearest valid value is 1")
        if self.slots < 1:
            raise ValueError(f"slots={self.slots} must be at least 1; the nearest valid value is 1")
        if self.kind == "bidirectional" and self.slots != 2:
            raise ValueError(f"a bidirectional placement has slots=2, one for each direction, not {self.slots}")
        if self.kind == "bidirectional" and self.num_ranks % 2:
            raise ValueError(
                f"num_ranks={self.num_ranks} must be even for a bidirectional placement; "
                f"the nearest valid values are {_nearest_even(self.num_ranks)}"
            )

    @property
    def num_stages(self) -> int:
        return self.num_ranks * (1 if self.kind == "bidirectional" else self.slots)

    @property
    def num_directions(self) -> int:
        return 2 if self.kind == "bidirectional" else 1

    @property
    def is_ring(self) -> bool:
        """Do messages go between rank P-1 and rank 0?"""
        return self.kind == "loop" and self.slots > 1 and self.num_ranks > 1

    def rank_of(self, stage: int, direction: int = 0) -> int:
        """The rank that runs a stage for microbatches of a direction."""
        group, place = divmod(stage, self.num_ranks)
        mirrored = direction == 1 or (self.kind == "v" and group % 2 == 1)
        return self.num_ranks - 1 - place if mirrored else place

    def slot_of(self, stage: int, direction: int = 0) -> int:
        """The position at which `rank_of(stage, direction)` keeps the stage."""
        rank, last = self.rank_of(stage, direction), self.num_ranks - 1
        if self.kind == "bidirectional":
            depth, shift = int(stage >= self.num_ranks // 2), min(rank, last - rank)
        else:
            depth, shift = stage // self.num_ranks, rank
        return (depth + shift) % self.slots if self.slot_rule == "steady" and self.kind != "loop" else depth

    def stage_of(self, rank: int, slot: int) -> tuple[int, int]:
        """(stage, direction) that a rank keeps in a slot."""
        return _inverse(self)[rank, slot]

    def home(self, stage: int) -> tuple[int, int]:
        """(rank, slot) of direction 0's copy of a stage; the other copy, if any, is on the mirror rank."""
        return self.rank_of(stage), self.slot_of(stage)


@lru_cache
def _inverse(placement: Placement) -> dict[tuple[int, int], tuple[int, int]]:
    pairs = [(s, d) for d in range(placement.num_directions) for s in range(placement.num_stages)]
    return {(placement.rank_of(s, d), placement.slot_of(s, d)): (s, d) for s, d in pairs}


def _nearest_even(number: int) -> str:
    return f"{number - 1} and {number + 1}" if number > 1 else "2"
