"""`auto`: try list schedules and published ones, keep the shortest, and say how short any could be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dualpipe_jax.schedule.actions import Kind, Schedule
from dualpipe_jax.schedule.building_block import v_half, v_min
from dualpipe_jax.schedule.costs import Costs, cost_at
from dualpipe_jax.schedule.dualpipe import dualpipe
from dualpipe_jax.schedule.dualpipe_v import dualpipe_v
from dualpipe_jax.schedule.greedy import Memory, Policy, list_schedule
from dualpipe_jax.schedule.group import group
from dualpipe_jax.schedule.interleaved import interleaved_1f1b
from dualpipe_jax.schedule.one_f_one_b import one_f_one_b
from dualpipe_jax.schedule.placement import Placement, SlotRule
from dualpipe_jax.schedule.simulate import Mode, Simulation, simulate
from dualpipe_jax.schedule.ticks import tick_schedule
from dualpipe_jax.schedule.zb_h import zb_h1, zb_h2
from dualpipe_jax.schedule.zb_v import zb_v

SAME = 1e-9


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        schedule: the shortest found.
        simulation: of it, with the costs of its stages.
        bound: no schedule on the placements searched takes less time.
        tried: how many schedules were simulated.
    """

    schedule: Schedule
    simulation: Simulation
    bound: float
    tried: int


def auto(
    num_ranks: int,
    num_microbatches: int,
    slot_rule: SlotRule = "depth",
    stages_per_rank: int = 4,
    costs: Costs | None = None,
    memory: Memory | None = None,
    mode: Mode = "neighbour",
) -> Schedule:
    """The shortest schedule that `search` finds on a loop or zigzag of stages_per_rank stages a rank.

    Example:
        >>> schedule = auto(4, 8, stages_per_rank=2)
        >>> simulate(schedule).makespan
        51.0
    """
    kinds = ("v", "loop") if stages_per_rank > 1 else ("loop",)
    placements = [Placement(kind, num_ranks, stages_per_rank, slot_rule) for kind in kinds]  # type: ignore[arg-type]
    return search(placements, num_microbatches, costs, memory, mode).schedule


def search(
    placements: Sequence[Placement],
    num_microbatches: int,
    costs: Costs | None = None,
    memory: Memory | None = None,
    mode: Mode = "neighbour",
) -> Found:
    """Try a fixed list of schedules, so that every process finds the same one; stop when one meets the bound.

    Args:
        placements: where stages may live. Published schedules are tried too if they use one of these kinds, at most
            as many slots, and no more memory.
        costs: times of 1/P of the layers, or of n equal parts of them (`Costs.for_stages`). Default F = I = W = 1.
        memory: limit for each rank, and sizes of the stages of placements[0]; default the limit of 1F1B, P activations
            of one microbatch through 1/P of the layers.
        mode: the makespan to minimise, see `simulate`.

    Raises:
        ValueError: the limit is too small for any schedule; M is odd for a bidirectional placement.
    """
    costs, memory = costs or Costs(), memory or Memory(limit=float(placements[0].num_ranks))
    for placement in placements:
        if num_microbatches % placement.num_directions:
            near = f"{num_microbatches - 1} or {num_microbatches + 1}"
            raise ValueError(f"{num_microbatches=} must be even for two directions; nearest valid: {near}")
    bound = min(lower_bound(p, num_microbatches, _for(costs, p)) for p in placements)
    best: Simulation | None = None
    tried = 0
    for schedule in _candidates(placements, num_microbatches, costs, memory, mode):
        simulation = simulate(schedule, _for(costs, schedule.placement), mode)
        tried += 1
        if best is None or simulation.makespan < best.makespan - SAME:
            best = simulation
        if best.makespan <= bound * (1 + SAME):
            break
    assert best is not None
    best = replace(best, schedule=replace(best.schedule, name="auto"))
    return Found(best.schedule, best, bound, tried)


def lower_bound(placement: Placement, num_microbatches: int, costs: Costs) -> float:
    """No schedule on this placement is shorter: a rank cannot start before an input reaches it, and then has all its
    work.

    max over ranks of min over its stages of (sum of F of the stages before, and transfers) + work, where an action
    that may share a cell counts as its least share; and not less than one microbatch takes alone.

    Example:
        >>> lower_bound(Placement("v", num_ranks=16, slots=4), 32, Costs())
        399.0
    """
    kinds = (Kind.F, Kind.I, Kind.W)
    arrival, alone = _arrivals(placement, costs)
    each = num_microbatches // placement.num_directions
    bounds = [alone]
    for rank in range(placement.num_ranks):
        held = [placement.stage_of(rank, slot)[0] for slot in range(placement.slots)]
        work = each * sum(costs.least(kind, stage) for stage in held for kind in kinds)
        bounds.append(min(arrival[s] for s in held) + work)
    return max(bounds)


def _arrivals(placement: Placement, costs: Costs) -> tuple[list[float], float]:
    """(earliest start of each stage's F, shortest time of one microbatch)."""
    time, arrival = 0.0, []
    crossed = 0.0
    for stage in range(placement.num_stages):
        if stage and placement.rank_of(stage) != placement.rank_of(stage - 1):
            crossed += costs.transfer
        arrival.append(time + crossed)
        time += cost_at(costs.forward, stage)
    back = sum(cost_at(costs.backward_input, stage) for stage in range(placement.num_stages))
    return arrival, time + 2 * crossed + back


def _for(costs: Costs, placement: Placement) -> Costs:
    return costs.for_stages(placement.num_ranks, placement.num_stages)


def _candidates(
    placements: Sequence[Placement], num_microbatches: int, costs: Costs, memory: Memory, mode: Mode
) -> Iterator[Schedule]:
    given = placements[0].num_stages
    for placement in placements:
        sizes = memory.for_stages(given, placement.num_stages)
        yield from _listed(placement, num_microbatches, _for(costs, placement), sizes)
        if mode != "async":
            for policy in (Policy("I", "deep"), Policy("I", "deep", in_flight=2 * placement.num_ranks)):
                yield tick_schedule(placement, num_microbatches, sizes, policy)
    for schedule in _published(placements, num_microbatches):
        num_stages = schedule.placement.num_stages
        try:
            _for(costs, schedule.placement)
            sizes = memory.for_stages(given, num_stages)
        except ValueError:  # its stages do not coincide with the parts whose costs are known
            continue
        if fits(schedule, sizes):
            yield schedule
            if costs.has_patterns:
                yield group(schedule)
                yield group(schedule, {"IW", "FIW"})


def _listed(placement: Placement, num_microbatches: int, local: Costs, memory: Memory) -> Iterator[Schedule]:
    """List schedules; local: costs of the placement's stages."""
    for policy in _policies(placement.num_ranks):
        yield list_schedule(placement, num_microbatches, local, memory, policy)
    if local != Costs():
        # Waiting a little for an input, or the order for equal costs, is often better where costs differ.
        patience = 0.2 * cost_at(local.forward, 0)
        for policy in _policies(placement.num_ranks)[-3:]:
            patient = policy._replace(patience=patience)
            yield list_schedule(placement, num_microbatches, local, memory, patient)
        yield list_schedule(placement, num_microbatches, Costs(), memory, _policies(placement.num_ranks)[0])


def _policies(num_ranks: int) -> list[Policy]:
    """From plain to narrow. Each wins somewhere; in_flight and pending keep memory for what comes later."""
    P = num_ranks
    return [
        Policy("I"),
        Policy("F", in_flight=P, pending=3 * P // 2),
        Policy("F", in_flight=P, pending=2 * P),
        Policy("I", in_flight=5 * P // 4),
        Policy("turns", in_flight=P),
        Policy("turns", in_flight=9 * P // 8, pending=2 * P),
    ]


def _published(placements: Sequence[Placement], num_microbatches: int) -> Iterator[Schedule]:
    first = placements[0]
    P, M, rule = first.num_ranks, num_microbatches, first.slot_rule
    most = max(p.slots for p in placements)
    kinds = {p.kind for p in placements}
    if "loop" in kinds:
        yield from (one_f_one_b(P, M, rule), zb_h1(P, M, rule), zb_h2(P, M, rule))
        yield from (interleaved_1f1b(P, M, rule, v) for v in sorted({2, most}) if 2 <= v <= most)
    if "v" in kinds and most >= 2:
        yield from (zb_v(P, M, rule), v_half(P, M, rule), v_min(P, M, rule))
        if M >= 2 * P:
            yield dualpipe_v(P, M, rule)
    if "bidirectional" in kinds and M >= 2 * P:
        yield dualpipe(P, M, rule)


def fits(schedule: Schedule, memory: Memory) -> bool:
    """Does no rank ever keep more than the limit?"""
    return max(peak_memory(schedule, memory)) <= memory.limit + SAME


def peak_memory(schedule: Schedule, memory: Memory) -> tuple[float, ...]:
    """For each rank the most that it keeps, in the unit of `memory`."""
    activation, weight = memory.sizes(schedule.placement)
    found = []
    for cells in schedule.ranks:
        kept = most = 0.0
        for action in (a for cell in cells for a in cell):
            a, w = activation[action.stage], weight[action.stage]
            kept += {Kind.F: a, Kind.B: -a, Kind.I: w - a, Kind.W: -w}[action.kind]
            most = max(most, kept)
        found.append(most)
    return tuple(found)
