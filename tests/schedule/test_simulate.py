"""Modes and cost patterns; equality with other simulators is in test_oracles.py."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpipe_jax.schedule import Costs, Placement, build, parse_cell, parse_schedule, simulate

ROUNDING = 1e-9  # sums of floats in another order


@pytest.mark.parametrize(("num_ranks", "num_microbatches", "ratio"), [(8, 20, 1.09), (16, 32, 1.16), (16, 120, 1.05)])
def test_coupling_of_dualpipe(num_ranks, num_microbatches, ratio):
    """Lowered as it is, DualPipe pays for the exchange after every tick; two digits are known."""
    schedule = build("dualpipe", num_ranks=num_ranks, num_microbatches=num_microbatches)
    coupled = simulate(schedule, mode="neighbour").makespan / simulate(schedule).makespan
    assert coupled == pytest.approx(ratio, abs=0.005)


COST = st.floats(0.1, 3)


@settings(max_examples=40, deadline=None)
@given(st.builds(Costs, COST, COST, COST, pair=COST, transfer=st.floats(0, 1)), st.integers(1, 4), st.integers(0, 5))
def test_tighter_coupling_is_never_faster(costs, half, extra):
    schedule = build("dualpipe", num_ranks=2 * half, num_microbatches=4 * half + 2 * extra)
    free, neighbour, lockstep = (simulate(schedule, costs, m).makespan for m in ("async", "neighbour", "lockstep"))
    assert free <= neighbour + ROUNDING
    assert neighbour <= lockstep + ROUNDING
    assert free <= simulate(schedule, costs, "neighbour_1").makespan + ROUNDING


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), COST, COST)
def test_bubble_is_what_is_not_work(num_ranks, num_microbatches, forward, weight):
    costs = Costs(forward, 1.0, weight)
    simulation = simulate(build("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches), costs)
    each = num_microbatches * (forward + 1 + weight)
    assert simulation.work_per_rank == pytest.approx([each] * num_ranks)
    assert simulation.bubble_fraction == pytest.approx(1 - each / simulation.makespan, abs=ROUNDING)
    assert simulation.makespan == pytest.approx((num_microbatches + num_ranks - 1) * (forward + 1 + weight))


def test_cells_run_without_overlap():
    simulation = simulate(build("dualpipe", num_ranks=4, num_microbatches=8), Costs(transfer=0.3), "neighbour_1")
    for start, end in zip(simulation.start, simulation.end, strict=True):
        assert all(e <= s + ROUNDING for e, s in zip(end, start[1:], strict=False))


@pytest.mark.parametrize(
    ("text", "cost"),
    [
        ("0F0", 1.5),
        ("0I0", 1.25),
        ("0W0", 1.0),
        ("0B0", 2.0),
        ("(0F1;0I0)OVERLAP_F_I", 2.3),
        ("(0F1;0W0)OVERLAP_F_W", 2.1),
        ("(0I1;0W0)OVERLAP_I_W", 2.0),
        ("(0F1;0B0)OVERLAP_F_B", 3.0),
        ("(0F2;0I1;0W0)OVERLAP_F_I_W", 3.0),
    ],
)
def test_cost_of_each_pattern(text, cost):
    costs = Costs(1.5, 1.25, 1.0, pair=3.0, forward_input=2.3, forward_weight=2.1, input_weight=2.0)
    assert costs.cell(parse_cell(text)) == cost
    assert costs.for_stages(4, 8).cell(parse_cell(text)) == pytest.approx(cost / 2)


def test_patterns_default_to_the_sum_of_their_parts():
    assert Costs(1.0, 2.0, 4.0).cell(parse_cell("(0F2;0I1;0W0)OVERLAP_F_I_W")) == 7.0
    assert Costs(1.0, 2.0, 4.0).cell(parse_cell("0B0")) == 6.0


def test_costs_by_stage():
    """A heavy last stage; a pair over two stages takes the mean of theirs."""
    costs = Costs(forward=(1.0, 3.0), pair=(4.0, 8.0))
    assert costs.cell(parse_cell("1F0")) == 3.0
    assert costs.cell(parse_cell("(1F2;0B0)OVERLAP_F_B")) == 6.0
    assert simulate(build("1f1b", num_ranks=2, num_microbatches=1), costs).makespan == 1 + 3 + 2 + 2


def test_pending_weights():
    simulation = simulate(parse_schedule("0F0 0F1 0I0 0I1 0W0 0W1", Placement("loop", 1, 1)))
    assert simulation.pending_weight_max == (2,)
    assert simulation.peak_activations == (2,)


def test_summary_is_plain():
    summary = simulate(build("dualpipe", num_ranks=4, num_microbatches=8)).summary()
    assert summary["schedule"] == "dualpipe"
    assert (summary["ranks"], summary["microbatches"], summary["mode"]) == (4, 8, "async")
    assert summary["makespan"] == 26
    assert summary["work_per_rank"] == [24.0] * 4


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, (1.0, -0.5)])
@pytest.mark.parametrize("name", ["forward", "pair", "transfer"])
def test_refuses_costs(name, value):
    with pytest.raises(ValueError, match=f"cost {name}=.* must be finite and at least 0"):
        Costs(**{name: value})


def test_refuses_costs_of_other_stages():
    schedule = build("1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(ValueError, match="cost forward has 3 numbers; give one for each of num_stages=2"):
        simulate(schedule, Costs(forward=(1.0, 1.0, 1.0)))
    with pytest.raises(ValueError, match="unknown mode 'fast'; choose one of async, neighbour"):
        simulate(schedule, mode="fast")
