"""A list scheduler: whenever a rank is free, it takes the most urgent action that is ready and fits in memory."""

from __future__ import annotations

import heapq
from collections import deque
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from dualpipe_jax.schedule.actions import Action, Cell, Kind, Schedule
from dualpipe_jax.schedule.costs import Costs
from dualpipe_jax.schedule.memory import Memory
from dualpipe_jax.schedule.placement import Placement

# Times are sums of floats: two that differ by less are the same moment.
SAME = 1e-9


class Policy(NamedTuple):
    """How to choose among what is ready. W comes last, unless memory is full of it.

    Attributes:
        first: prefer "I", "F", or the one that did not come last ("turns").
        forward: among the rank's stages, run the F of the deepest, or of the earliest microbatch; or, "groups", take
            the microbatches in groups of P or a few more, and a group through one stage after the other, I as well.
        in_flight: most microbatches of a direction between their first F and their last I; None: as memory allows.
        pending: most W put off by a rank; None: as memory allows.
        patience: rather than start a W, wait this long for an input that is on its way.
        hold: rather than start an F, wait for an input of an earlier microbatch, one of the first `hold`, that arrives
            before that F would end. The first microbatches then pass all stages without delay.
        last: the last microbatches of a direction, which enter as soon as memory allows, and their F before others, so
            that none enters too late to pass all stages while there is other work left.
    """

    first: Literal["I", "F", "turns"] = "I"
    forward: Literal["deep", "early", "groups"] = "deep"
    in_flight: int | None = None
    pending: int | None = None
    patience: float = 0.0
    hold: int = 0
    last: int = 0


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

    def copy(self) -> RankState:
        places = [
            replace(place, forward_at=place.forward_at.copy(), backward_at=place.backward_at.copy())
            for place in self.places
        ]
        return replace(self, places=places, weights=self.weights.copy(), done=self.done.copy())


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
        alone = [Action(kind, stage, 0, 0) for kind in Kind for stage in range(placement.num_stages)]
        self.time = {(action.kind, action.stage): costs.cell((action,)) for action in alone}
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

    def copy(self, policy: Policy) -> Greedy:
        """The same state, to go on with another policy."""
        other = copy(self)
        other.policy, other.events = policy, self.events.copy()
        other.ranks = [rank.copy() for rank in self.ranks]
        other.place = {(p.stage, p.direction): p for rank in other.ranks for p in rank.places}
        return other

    @property
    def clock(self) -> float:
        """When the last action begun so far ends."""
        return max(rank.busy_until for rank in self.ranks)

    def run(self, name: str) -> Schedule:
        self.advance(float("inf"))
        return self.schedule(name)

    def advance(self, until: float) -> None:
        """Begin all actions that begin before `until`."""
        while self.events and self.events[0][0] < until:
            now, index = heapq.heappop(self.events)
            while self.events and self.events[0] == (now, index):
                heapq.heappop(self.events)
            rank = self.ranks[index]
            if rank.busy_until > now + SAME:
                continue
            action = self._choose(rank, now)
            if action is not None:
                self._start(index, rank, action, now)

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
        if chosen is not None and chosen is forward and self._holds(rank, chosen, now):
            return None
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

    def _holds(self, rank: RankState, forward: Action, now: float) -> bool:
        """Would an input of one of the first microbatches, earlier than this F's, come while it runs?"""
        hold = self.policy.hold
        if not hold:
            return False
        end = now + self.time[Kind.F, forward.stage] - SAME
        for place in rank.places:
            m, at = place.forwards, place.forward_at
            if m < min(len(at), forward.microbatch, hold) and now + SAME < at[m] < end and self._fits(rank, place):
                return True
            m, at = place.backwards, place.backward_at
            if m < min(len(at), hold) and now + SAME < at[m] < end:
                return True
        return False

    def next_backward(self, rank: RankState, now: float) -> Action | None:
        """The ready I of the earliest microbatch (or group), and of those the deepest stage's."""
        best: tuple[int, int, Place] | None = None
        for place in rank.places:
            m = place.backwards
            if m < len(place.backward_at) and place.backward_at[m] <= now + SAME:
                key = (self._group(m) if self.policy.forward == "groups" else m, -place.stage, place)
                if best is None or key[:2] < best[:2]:
                    best = key
        return None if best is None else Action(self.backward, best[2].stage, best[2].direction, best[2].backwards)

    def next_forward(self, rank: RankState, now: float) -> Action | None:
        """The most urgent ready F that fits in memory."""
        best: tuple[int, Place] | None = None
        for place in rank.places:
            m = place.forwards
            if m >= len(place.forward_at) or place.forward_at[m] > now + SAME:
                continue
            if not self._fits(rank, place):
                continue
            urgency = self._urgency(place)
            if best is None or urgency < best[0]:
                best = urgency, place
        return None if best is None else Action(Kind.F, best[1].stage, best[1].direction, best[1].forwards)

    def _fits(self, rank: RankState, place: Place) -> bool:
        """Is there room for the place's next F, and for its microbatch in the stages to come?"""
        if rank.used + place.hold + place.later > self.limit + SAME:
            return False
        most = self.policy.in_flight or self.num_microbatches
        return place.stage > 0 or place.forwards - place.backwards < most or self._is_last(place)

    def _is_last(self, place: Place) -> bool:
        return place.forwards >= self.per_direction - self.policy.last

    def _urgency(self, place: Place) -> int:
        """Of the place's next F: the least comes first."""
        if self._is_last(place):
            return place.stage - 2 * self.placement.num_stages
        if self.policy.forward == "deep":
            return -place.stage
        if self.policy.forward == "early":
            return place.forwards * len(self.place) - place.stage
        return self._group(place.forwards) * len(self.place) + place.stage

    def _group(self, microbatch: int) -> int:
        """Equal groups, of at least P: what a group sends into a loop comes back before its last one has entered."""
        groups = max(1, self.per_direction // self.placement.num_ranks)
        return microbatch * groups // self.per_direction

    def _start(self, index: int, rank: RankState, action: Action, now: float) -> None:
        rank.busy_until = now + self.time[action.kind, action.stage]
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
