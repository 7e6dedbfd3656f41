"""List schedules, `auto`, and its bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpipe_jax.schedule import BUILDERS, Costs, Placement, build, lower, simulate, validate, validate_table
from dualpipe_jax.schedule.bound import lower_bound
from dualpipe_jax.schedule.costs import MOE_COSTS
from dualpipe_jax.schedule.greedy import Policy, list_schedule
from dualpipe_jax.schedule.memory import Memory, fits, peak_memory
from dualpipe_jax.schedule.search import search
from dualpipe_jax.schedule.ticks import tick_schedule

ROUNDING = 1e-9  # sums of floats in another order
PLACEMENTS = st.one_of(
    st.builds(Placement, st.sampled_from(["loop", "v"]), st.integers(1, 5), st.integers(1, 4)),
    st.builds(Placement, st.just("bidirectional"), st.sampled_from([2, 4]), st.just(2)),
)
POLICIES = st.builds(
    Policy,
    st.sampled_from(["I", "F", "turns"]),
    st.sampled_from(["deep", "early", "groups"]),
    st.one_of(st.none(), st.integers(1, 6)),
    st.one_of(st.none(), st.integers(1, 6)),
    st.sampled_from([0.0, 0.3]),
    hold=st.integers(0, 6),
    last=st.integers(0, 6),
)
COST = st.floats(0.25, 3)
COSTS = st.builds(Costs, COST, COST, COST, transfer=st.floats(0, 0.5))


@settings(max_examples=60, deadline=None)
@given(PLACEMENTS, st.integers(1, 6), COSTS, POLICIES, st.floats(0, 2), st.booleans())
def test_any_policy_in_any_memory_makes_a_valid_schedule(placement, half, costs, policy, spare, split):
    least = 1.0 if placement.num_directions == 1 else 2.0
    memory = Memory(limit=least + spare)
    schedule = list_schedule(placement, 2 * half, costs, memory, policy, split=split)
    validate(schedule)
    assert max(peak_memory(schedule, memory)) <= memory.limit + ROUNDING
    bound = lower_bound(placement, 2 * half, costs, memory)
    assert simulate(schedule, costs).makespan >= bound - ROUNDING


@settings(max_examples=40, deadline=None)
@given(PLACEMENTS, st.integers(1, 5), POLICIES, st.floats(0, 2))
def test_tick_schedules_are_valid(placement, half, policy, spare):
    memory = Memory(limit=spare + (1.0 if placement.num_directions == 1 else 2.0))
    schedule = tick_schedule(placement, 2 * half, memory, policy)
    validate(schedule)
    validate_table(lower(schedule), schedule)
    assert fits(schedule, memory)
    bound = lower_bound(placement, 2 * half, MOE_COSTS, memory)
    assert simulate(schedule, MOE_COSTS).makespan >= bound - ROUNDING


def test_too_little_memory_is_refused():
    with pytest.raises(ValueError, match=r"a memory limit of 0.5 is too small; nearest valid: 1.0"):
        list_schedule(Placement("v", 4, 2), 8, memory=Memory(limit=0.5))


def test_memory_by_stage():
    """Bytes: a first stage that keeps more, and weights that keep less than activations."""
    memory = Memory(limit=20.0, activation=(6.0, 2.0), weight=(1.0, 1.0))
    schedule = list_schedule(Placement("loop", 2, 1), 8, memory=memory)
    validate(schedule)
    assert peak_memory(schedule, memory)[0] <= 20.0
    assert peak_memory(schedule, Memory(activation=(6.0, 2.0), weight=(6.0, 2.0)))[0] > peak_memory(schedule, memory)[0]


@pytest.mark.parametrize(("num_microbatches", "percent"), [(32, 4.0), (64, 2.0), (120, 1.1)])
def test_auto_at_16_ranks(num_microbatches, percent):
    """F=I=W=1, 16 activations: as good as proven possible, and coupling costs nothing."""
    placements = [Placement("v", 16, 4)]
    found = search(placements, num_microbatches, memory=Memory(limit=16.0))
    assert found.simulation.makespan == pytest.approx(found.bound)
    assert found.simulation.mode == "neighbour"
    assert 100 * found.simulation.bubble_fraction <= percent
    assert found.simulation.peak_units <= 16


@pytest.mark.parametrize(
    ("num_microbatches", "percent"), [(32, 5.54), (64, 2.85), pytest.param(120, 1.7, marks=pytest.mark.slow)]
)
def test_auto_with_messages_that_take_time(num_microbatches, percent):
    """A tenth of a stage's F, in 16 activations: the bound, which the limit of memory raises above a simple one's
    4.1 / 2.1 / 1.1%, for M a multiple of 16."""
    placements = [Placement("v", 16, 4)]
    found = search(placements, num_microbatches, Costs(transfer=0.1 / 4), Memory(limit=16.0), "async")
    validate(found.schedule)
    assert found.simulation.peak_units <= 16
    assert 100 * found.simulation.bubble_fraction == pytest.approx(percent, abs=0.05)
    assert found.simulation.makespan <= found.bound + (ROUNDING if num_microbatches % 16 == 0 else 0.75)


def test_auto_in_both_directions():
    """Greedy with split backward everywhere: 6.80% at M=32 against DualPipe's 12.7%."""
    found = search([Placement("bidirectional", 16, 2)], 32, memory=Memory(limit=32.0))
    assert 100 * found.simulation.bubble_fraction == pytest.approx(6.80, abs=0.005)
    with pytest.raises(ValueError, match="must be even for two directions; nearest valid: 32 or 34"):
        search([Placement("bidirectional", 16, 2)], 33)


HEAVY = (1.0, 1.0, 1.0, 1.5)


@pytest.mark.parametrize("mode", ["async", "neighbour"])
@pytest.mark.parametrize(
    "costs",
    [
        Costs(),
        Costs(1, 1.2, 0.8),
        Costs(1, 1.5, 0.5),
        Costs(HEAVY, HEAVY, HEAVY),
        Costs(transfer=0.1),
        MOE_COSTS,
    ],
    ids=["equal", "1.2", "1.5", "heavy", "transfer", "moe"],
)
def test_auto_is_never_worse_than_a_builder_that_fits(costs, mode):
    P, M, memory = 4, 12, Memory(limit=4.5)
    found = search([Placement("v", P, 2), Placement("loop", P, 2)], M, costs, memory, mode)
    validate(found.schedule)
    assert fits(found.schedule, memory)
    assert found.bound <= found.simulation.makespan + ROUNDING
    for name in sorted(set(BUILDERS) - {"auto", "dualpipe", "wave"}):
        schedule = build(name, num_ranks=P, num_microbatches=M)
        if fits(schedule, memory):
            local = costs.for_stages(P, schedule.placement.num_stages)
            assert found.simulation.makespan <= simulate(schedule, local, mode).makespan + ROUNDING, name


@pytest.mark.slow
@pytest.mark.parametrize(("num_microbatches", "ratio"), [(32, 1.15), (64, 1.08), (100, 1.05), (120, 1.045)])
def test_auto_with_moe_costs(num_microbatches, ratio):
    """All-hidden work is 3M; 8 stages a rank in the memory of 20 activations. M need not be a multiple of P."""
    placements = [Placement("loop", 16, 8)]
    found = search(placements, num_microbatches, MOE_COSTS, Memory(limit=20.0))
    assert found.simulation.makespan / (3 * num_microbatches) <= ratio


def test_costs_that_do_not_fit_the_stages():
    with pytest.raises(ValueError, match="cost forward has 3 numbers, which do not fit num_stages=4; nearest valid: 4"):
        Costs(forward=(1.0, 1.0, 1.0)).for_stages(4, 4)


def test_sizes_are_scaled_to_published_schedules():
    """Sizes are those of the given placement's stages: with half as many stages each keeps twice as much."""
    placement, memory = Placement("v", 4, 2), Memory(limit=3.0, activation=0.5)
    schedule = search([placement, Placement("loop", 4, 2)], 8, memory=memory).schedule
    scaled = memory.for_stages(placement.num_stages, schedule.placement.num_stages)
    assert fits(schedule, scaled)
    assert simulate(schedule).peak_units <= 3


def test_costs_by_stage_of_three_stages_a_rank():
    """Published schedules whose stages do not coincide with the parts are left out."""
    costs = Costs((1.0,) * 5 + (2.0,))
    found = search([Placement("v", 2, 3), Placement("loop", 2, 3)], 4, costs)
    validate(found.schedule)
    assert found.schedule.placement.num_stages == 6
