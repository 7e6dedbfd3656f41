"""The lower bound: what raises it, and that a small search cannot go below."""

from itertools import product

import pytest

from dualpipe_jax.schedule import MOE_COSTS, Costs, Memory, Placement, Policy, list_schedule, lower_bound, simulate

WAVE = Placement("v", num_ranks=16, slots=4)
ROUNDING = 1e-9  # sums of floats in another order


def test_arrival():
    """The last rank waits for 15 stages and as many messages."""
    assert lower_bound(WAVE, 32, Costs()) == 15 + 32 * 12
    assert lower_bound(WAVE, 32, Costs(transfer=0.1)) == pytest.approx(15 * 1.1 + 32 * 12)


def test_one_microbatch_alone():
    assert lower_bound(WAVE, 1, Costs(transfer=0.1)) == pytest.approx(2 * 64 + 2 * 60 * 0.1)


@pytest.mark.parametrize(("limit", "late"), [(64.0, 6.0), (66.0, 4.0), (32.0, 38.0), (70.0, 0.0), (1000.0, 0.0)])
def test_memory_full_of_forwards(limit, late):
    """The first I comes 64 stages and 60 messages after the first F; before, a rank runs the F that fit."""
    memory = Memory(limit=limit, activation=1.0)
    assert lower_bound(WAVE, 32, Costs(transfer=0.1), memory) == pytest.approx(15 * 1.1 + late + 32 * 12)


@pytest.mark.parametrize(("limit", "forwards"), [(6.0, 6), (12.0, 6 + 2), (13.5, 6 + 2.5), (100.0, 12)])
def test_memory_by_stage(limit, forwards):
    """Rank 0 keeps 3 for stage 0 and 1 for stage 2; its first I is at 4 F, 4 messages and 1 I."""
    memory = Memory(limit, activation=(3.0, 1.0, 1.0, 1.0))
    bound = lower_bound(Placement("loop", 2, 2), 6, Costs(transfer=10.0), memory)
    alone = 2 * 4 + 6 * 10.0
    assert bound == pytest.approx(max(4 + 4 * 10.0 + 1 + 6 * 6 - forwards, alone))


@pytest.mark.parametrize("costs", [Costs(), Costs(transfer=0.3), Costs(1.0, 1.5, 0.5, transfer=0.1), MOE_COSTS])
def test_no_list_schedule_goes_below(costs):
    placement, memory = Placement("v", 4, 2), Memory(limit=6.0, activation=1.0)
    bound = lower_bound(placement, 6, costs, memory)
    for first, in_flight, hold in product(("I", "F", "turns"), (3, 4, 5), (0, 4)):
        schedule = list_schedule(placement, 6, costs, memory, Policy(first, in_flight=in_flight, hold=hold))
        assert simulate(schedule, costs).makespan >= bound - ROUNDING
