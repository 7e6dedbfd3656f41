"""A list scheduler: whenever a rank is free, it takes the most urgent action that is ready and fits in memory."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dualpipe_jax.schedule.actions import Action, Cell, Kind, Schedule
from dualpipe_jax.schedule.costs import Cost, Costs, cost_at, spread
from dualpipe_jax.schedule.placement import Placement

# Times are sums of floats: two that differ by less are the same moment.
SAME = 1e-9


@dataclass(frozen=True)
class Memory:
    """What a rank keeps, in any one unit (bytes, or activations of one microbatch through 1/P of the layers).

    Attributes:
        limit: for each rank.
        activation: kept by one stage for one microbatch from F to I; None: 1/slots, or 1 where each direction has a
            copy.
        weight: kept from I to W; None: as much as the activation.
    """

    limit: float = float("inf")
    activation: Cost | None = None
    weight: Cost | None = None

    def sizes(self, placement: Placement) -> tuple[list[float], list[float]]:
        """(activation, weight) of each stage."""
        share = placement.num_ranks / placement.num_stages
        stages = range(placement.num_stages)
        activation = [share if self.activation is None else cost_at(self.activation, s) for s in stages]
        weight = activation if self.weight is None else [cost_at(self.weight, s) for s in stages]
        return activation, list(weight)

    def for_stages(self, given: int, num_stages: int) -> Memory:
        """The same sizes for a model cut into num_stages stages, not `given` as here.

        Raises:
            ValueError: a tuple does not fit the new number of stages.

        Example:
            >>> Memory(8.0, activation=(1.0, 3.0)).for_stages(2, 4).activation
            (0.5, 0.5, 1.5, 1.5)
        """

        def scaled(name: str, value: Cost | None) -> Cost | None:
            if isinstance(value, tuple):
                return spread(name, value, num_stages)
            return None if value is None else value * given / num_stages

        return Memory(self.limit, scaled("activation", self.activation), scaled("weight", self.weight))


class Policy(NamedTuple):
    """How to choose among what is ready. W comes last, unless memory is full of it.

    Attributes:
        first: prefer "I", "F", or the one that did not come last ("turns").
        forward: among the rank's stages, run the F of the deepest, or of the earliest microbatch.
        in_flight: most microbatches of a direction between their first F and their last I; None: as memory allows.
        pending: most W put off by a rank; None: as memory allows.
        patience: rather than start a W, wait this long for an input that is on its way.
    """

    first: Literal["I", "F", "turns"] = "I"
    forward: Literal["deep", "early"] = "deep"
    in_flight: int | None = None
    pending: int | None = None
    patience: float = 0.0


@dataclass
class Place:
    """One stage of a rank in one direction.

    forward_at, backward_at: when inputs of F and I arrive, by microbatch, as far as they are known.
    later: memory that one microbatch in each deeper stage of the rank takes.
    """

    stage: int
    direction: int
    hold: float
    later: float = 0.0
    forward_at: list[float] = field(default_factory=list)
    backward_at: list[float] = field(default_factory=list)
    forwards: int = 0
    backwards: int = 0


@dataclass
class RankState:
    places: list[Place]
    used: float = 0.0
    busy_until: float = 0.0
    last: Kind = Kind.W  # the last F or I
    weights: deque[Action] = field(default_factory=deque)
    done: list[Cell] = field(default_factory=list)


def list_schedule(
    placement: Placement,
    num_microbatches: int,
    costs: Costs | None = None,
    memory: Memory | None = None,
    policy: Policy | None = None,
    name: str = "greedy",
    split: bool = True,
) -> Schedule:
    """Schedule by a list scheduler; split: backward as I and W, else as B.

    It cannot deadlock: a stage's F leaves room for one microbatch in each deeper stage of its rank, so the
    microbatch that is furthest can always go on.

    Raises:
        ValueError: the memory limit is less than one microbatch in each stage of a rank.

    Example:
        >>> from dualpipe_jax.schedule.simulate import simulate
        >>> simulate(list_schedule(Placement("v", num_ranks=4, slots=2), 8)).makespan
        51.0
    """
    return Greedy(placement, num_microbatches, costs or Costs(), memory or Memory(), policy or Policy(), split).run(
        name
    )


class Greedy:
    """The state of a list scheduler."""

    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        costs: Costs,
        memory: Memory,
        policy: Policy,
        split: bool,
    ) -> None:
        costs.check(placement.num_stages)
        self.placement, self.num_microbatches, self.costs, self.policy = placement, num_microbatches, costs, policy
        self.backward = Kind.I if split else Kind.B
        activation, self.weight = memory.sizes(placement)
        self.hold = [max(pair) for pair in zip(activation, self.weight, strict=True)]
        self.per_direction = num_microbatches // placement.num_directions
        self.events: list[tuple[float, int]] = []
        self.ranks: list[RankState] = []
        self.place: dict[tuple[int, int], Place] = {}
        for rank in range(placement.num_ranks):
            self._add_rank(rank)
        self.limit = memory.limit
        least = max(sum(place.hold for place in rank.places) for rank in self.ranks)
        if self.limit < least - SAME:
            raise ValueError(f"a memory limit of {self.limit} is too small; nearest valid: {least}")

    def _add_rank(self, rank: int) -> None:
        held = sorted(self.placement.stage_of(rank, slot) for slot in range(self.placement.slots))
        places = [Place(stage, direction, self.hold[stage]) for stage, direction in held]
        for i, place in enumerate(places):
            place.later = sum(p.hold for p in places[i + 1 :])
            self.place[place.stage, place.direction] = place
            if place.stage == 0:
                place.forward_at = [0.0] * self.per_direction
        self.ranks.append(RankState(places))
        heapq.heappush(self.events, (0.0, rank))

    def run(self, name: str) -> Schedule:
        while self.events:
            now, index = heapq.heappop(self.events)
            while self.events and self.events[0] == (now, index):
                heapq.heappop(self.events)
            rank = self.ranks[index]
            if rank.busy_until > now + SAME:
                continue
            action = self._choose(rank, now)
            if action is not None:
                self._start(index, rank, action, now)
        return self.schedule(name)

    def schedule(self, name: str) -> Schedule:
        """What the ranks have done."""
        ranks = tuple(tuple(rank.done) for rank in self.ranks)
        return Schedule(name, self.placement, self.num_microbatches, ranks)

    def _choose(self, rank: RankState, now: float) -> Action | None:
        if self.policy.pending is not None and len(rank.weights) >= self.policy.pending:
            return rank.weights[0]
        backward, forward = self.next_backward(rank, now), self.next_forward(rank, now)
        first = self.policy.first
        if first == "turns":
            first = "F" if rank.last is self.backward else "I"
        chosen = (backward or forward) if first == "I" else (forward or backward)
        if chosen is None and rank.weights and not self._arrives_soon(rank, now):
            return rank.weights[0]
        return chosen

    def _arrives_soon(self, rank: RankState, now: float) -> bool:
        """Is an input on its way that would be late behind a W? Inputs that wait for memory are not."""
        for place in rank.places:
            for known, count in ((place.forward_at, place.forwards), (place.backward_at, place.backwards)):
                if count < len(known) and now + SAME < known[count] <= now + self.policy.patience + SAME:
                    return True
        return False

    def next_backward(self, rank: RankState, now: float) -> Action | None:
        """The ready I of the earliest microbatch, and of those the deepest stage's."""
        best: tuple[int, int, Place] | None = None
        for place in rank.places:
            m = place.backwards
            if m < len(place.backward_at) and place.backward_at[m] <= now + SAME:
                key = (m, -place.stage, place)
                if best is None or key[:2] < best[:2]:
                    best = key
        return None if best is None else Action(self.backward, best[2].stage, best[2].direction, best[0])

    def next_forward(self, rank: RankState, now: float) -> Action | None:
        """The most urgent ready F that fits in memory."""
        best: tuple[int, Place] | None = None
        for place in rank.places:
            m = place.forwards
            if m >= len(place.forward_at) or place.forward_at[m] > now + SAME:
                continue
            if rank.used + place.hold + place.later > self.limit + SAME:
                continue
            if place.stage == 0 and m - place.backwards >= (self.policy.in_flight or self.num_microbatches):
                continue
            urgency = -place.stage if self.policy.forward == "deep" else m * len(self.place) - place.stage
            if best is None or urgency < best[0]:
                best = urgency, place
        return None if best is None else Action(Kind.F, best[1].stage, best[1].direction, best[1].forwards)

    def _start(self, index: int, rank: RankState, action: Action, now: float) -> None:
        rank.busy_until = now + self.costs.cell((action,))
        rank.done.append((action,))
        heapq.heappush(self.events, (rank.busy_until, index))
        self.account(index, rank, action, rank.busy_until)

    def account(self, index: int, rank: RankState, action: Action, end: float) -> None:
        """Note what an action frees, takes and makes."""
        place = self.place[action.stage, action.direction]
        rank.last = action.kind if action.kind is not Kind.W else rank.last
        if action.kind is Kind.F:
            place.forwards += 1
            rank.used += place.hold
            if action.stage == self.placement.num_stages - 1:
                place.backward_at.append(end)
            else:
                self._deliver(index, action, action.stage + 1, end)
        elif action.kind is self.backward:
            place.backwards += 1
            rank.used -= place.hold
            if action.kind is Kind.I:
                rank.used += self.weight[action.stage]
                rank.weights.append(Action(Kind.W, action.stage, action.direction, action.microbatch))
            if action.stage > 0:
                self._deliver(index, action, action.stage - 1, end)
        else:
            rank.weights.popleft()
            rank.used -= self.weight[action.stage]

    def _deliver(self, source: int, action: Action, stage: int, end: float) -> None:
        target = self.placement.rank_of(stage, action.direction)
        arrival = end + (self.costs.transfer if target != source else 0.0)
        place = self.place[stage, action.direction]
        (place.forward_at if action.kind is Kind.F else place.backward_at).append(arrival)
        heapq.heappush(self.events, (arrival, target))
