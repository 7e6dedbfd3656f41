"""`auto`: try list schedules and published ones, keep the shortest, and say how short any could be."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from dualpipe_jax.schedule.actions import Schedule
from dualpipe_jax.schedule.bound import lower_bound
from dualpipe_jax.schedule.building_block import v_half, v_min
from dualpipe_jax.schedule.costs import Costs, cost_at
from dualpipe_jax.schedule.dualpipe import dualpipe
from dualpipe_jax.schedule.dualpipe_v import dualpipe_v
from dualpipe_jax.schedule.ends import planned_ends, warm_ups
from dualpipe_jax.schedule.greedy import Policy, list_schedule
from dualpipe_jax.schedule.group import group
from dualpipe_jax.schedule.interleaved import interleaved_1f1b
from dualpipe_jax.schedule.memory import Memory, fits
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
        bound: no schedule on the placements searched, in the memory given, takes less time.
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
    bound = _bound(placements, num_microbatches, costs, memory)
    best: Simulation | None = None
    tried = 0
    with _without_collection():
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


@contextmanager
def _without_collection() -> Iterator[None]:
    """Schedules are many small objects without cycles: looking for cycles is a third of a search's time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _bound(placements: Sequence[Placement], num_microbatches: int, costs: Costs, memory: Memory) -> float:
    """Over the placements given and those of the published schedules, which have fewer slots."""
    bounds = []
    for placement in placements:
        fewer = () if placement.kind == "bidirectional" else range(1, min(2, placement.slots) + 1)
        for tried in (placement, *(replace(placement, slots=slots) for slots in fewer)):
            try:
                local, sizes = _for(costs, tried), memory.for_stages(placements[0].num_stages, tried.num_stages)
            except ValueError:  # its stages do not coincide with the parts whose costs are known
                continue
            bounds.append(lower_bound(tried, num_microbatches, local, sizes))
    return min(bounds)


def _for(costs: Costs, placement: Placement) -> Costs:
    return costs.for_stages(placement.num_ranks, placement.num_stages)


def _candidates(
    placements: Sequence[Placement], num_microbatches: int, costs: Costs, memory: Memory, mode: Mode
) -> Iterator[Schedule]:
    given = placements[0].num_stages
    for placement in placements:
        sizes = memory.for_stages(given, placement.num_stages)
        yield from _listed(placement, num_microbatches, _for(costs, placement), sizes, mode)
        if mode != "async":
            for policy in _tick_policies(placement):
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


def _listed(
    placement: Placement, num_microbatches: int, local: Costs, memory: Memory, mode: Mode
) -> Iterator[Schedule]:
    """List schedules; local: costs of the placement's stages."""
    policies = _policies(placement.num_ranks)
    # Waiting a little for an input, or the order for equal costs, is often better where costs differ.
    patience = 0.2 * cost_at(local.forward, 0)
    policies += [policy._replace(patience=patience) for policy in policies[-3:]]
    if mode != "async":
        policies += warm_ups(placement.num_ranks)
    for policy in policies:
        yield list_schedule(placement, num_microbatches, local, memory, policy)
    if mode == "async":
        bound = lower_bound(placement, num_microbatches, local, memory)
        yield from planned_ends(placement, num_microbatches, local, memory, bound)
    else:
        yield list_schedule(placement, num_microbatches, Costs(), memory, policies[0])


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


def _tick_policies(placement: Placement) -> list[Policy]:
    grouped = [Policy("I", "groups")] if placement.kind == "loop" else []
    return [Policy("I", "deep"), Policy("I", "deep", in_flight=2 * placement.num_ranks), *grouped]


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
