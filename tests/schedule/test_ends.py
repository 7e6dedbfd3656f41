"""Warm-up and cool-down of list schedules, planned."""

import pytest

from dualpipe_jax.schedule import Costs, Kind, Memory, Placement, Policy, list_schedule, lower_bound, simulate, validate
from dualpipe_jax.schedule.ends import planned_ends
from dualpipe_jax.schedule.greedy import Greedy
from dualpipe_jax.schedule.memory import fits

ROUNDING = 1e-9  # sums of floats in another order
WAVE, SLOW = Placement("v", num_ranks=8, slots=4), Costs(transfer=0.1)
MEMORY = Memory(limit=32.0, activation=1.0)


def idle(schedule, costs=SLOW):
    simulation = simulate(schedule, costs)
    return min(simulation.idle)


def first_backward(schedule, rank):
    simulation = simulate(schedule, SLOW)
    starts = zip(schedule.ranks[rank], simulation.start[rank], strict=True)
    return next(start for cell, start in starts if cell[0].kind is Kind.I)


def test_hold_lets_the_first_microbatch_pass():
    """Its first I on each rank is as early as if it were alone."""
    for hold, late in ((0, True), (8, False)):
        schedule = list_schedule(WAVE, 16, SLOW, MEMORY, Policy("F", in_flight=8, hold=hold))
        alone = [32 + 28 * 0.1 + rank * 1.1 for rank in range(8)]
        found = [first_backward(schedule, rank) for rank in range(8)]
        assert (max(f - a for f, a in zip(found, alone, strict=True)) > 0.5) is late


def test_last_enter_early():
    """In_flight does not hold back the last microbatches: the last F of stage 0 comes earlier."""

    def entry(last):
        schedule = list_schedule(WAVE, 24, SLOW, MEMORY, Policy("F", in_flight=7, hold=8, last=last))
        actions = [cell[0] for cell in schedule.ranks[0]]
        at = next(i for i, a in enumerate(actions) if (a.kind, a.stage, a.microbatch) == (Kind.F, 0, 23))
        return simulate(schedule, SLOW).start[0][at]

    assert entry(4) < entry(0)


@pytest.mark.parametrize("num_microbatches", [12, 17, 30])
def test_planned_ends_are_valid_and_better(num_microbatches):
    schedules = list(planned_ends(WAVE, num_microbatches, SLOW, MEMORY))
    bound = lower_bound(WAVE, num_microbatches, SLOW, MEMORY)
    for schedule in schedules:
        validate(schedule)
        assert fits(schedule, MEMORY)
        assert simulate(schedule, SLOW).makespan >= bound - ROUNDING
    plain = list_schedule(WAVE, num_microbatches, SLOW, MEMORY, Policy("F", in_flight=8))
    assert min(map(idle, schedules)) < idle(plain)


def test_multiples_of_the_ranks_meet_the_bound():
    for num_microbatches in (16, 40):
        bound = lower_bound(WAVE, num_microbatches, SLOW, MEMORY)
        first = next(planned_ends(WAVE, num_microbatches, SLOW, MEMORY, bound))
        assert simulate(first, SLOW).makespan == pytest.approx(bound)


def test_in_both_directions():
    placement, costs, memory = Placement("bidirectional", 4, 2), Costs(1.0, 1.2, 0.8, transfer=0.05), Memory(8.0)
    for schedule in planned_ends(placement, 14, costs, memory):
        validate(schedule)
        assert fits(schedule, memory)


def test_a_copy_goes_on_by_itself():
    """Two ways from one state: neither changes the state, and the same way gives the same schedule."""
    policy = Policy("F", in_flight=8, hold=8)
    start = Greedy(WAVE, 16, SLOW, MEMORY, policy, split=True)
    start.advance(60.0)
    done = [list(rank.done) for rank in start.ranks]
    once, other, again = (start.copy(p).run("x") for p in (policy, Policy("I"), policy))
    assert [list(rank.done) for rank in start.ranks] == done
    assert once == again == list_schedule(WAVE, 16, SLOW, MEMORY, policy, name="x")
    assert once != other
