"""Joined cells: the same actions in the same order, valid, and cheaper where they hide each other."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpipe_jax.schedule import build, lower, simulate, validate, validate_table
from dualpipe_jax.schedule.costs import MOE_COSTS
from dualpipe_jax.schedule.group import ALL, group

NAMES = ["1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe", "dualpipe_v"]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 3), st.integers(0, 4), st.sets(st.sampled_from(sorted(ALL))))
def test_keeps_all_actions_and_stays_valid(name, half, extra, patterns):
    schedule = build(name, num_ranks=2 * half, num_microbatches=4 * half + 2 * extra)
    grouped = group(schedule, patterns)
    validate(grouped)
    validate_table(lower(grouped), grouped)
    for before, after in zip(schedule.ranks, grouped.ranks, strict=True):
        assert sorted(a for c in before for a in c) == sorted(a for c in after for a in c)
        made = {"".join(a.kind for a in c) for c in after if len(c) > 1}
        assert made <= patterns | {"".join(a.kind for a in c) for c in before if len(c) > 1}


def test_nothing_wanted_changes_nothing():
    schedule = build("dualpipe", num_ranks=4, num_microbatches=8)
    assert group(schedule, set()) == schedule


@pytest.mark.parametrize(("num_ranks", "num_microbatches", "ratio"), [(16, 32, 1.164), (16, 120, 1.049)])
def test_dualpipe_gains_from_its_triples(num_ranks, num_microbatches, ratio):
    """Running I W F of the warm-up as one cell beats the plain table under coupling (1.16 and 1.05)."""
    schedule = build("dualpipe", num_ranks=num_ranks, num_microbatches=num_microbatches)
    grouped = group(schedule, {"FIW"})
    coupled = simulate(grouped, mode="neighbour").makespan / simulate(schedule).makespan
    assert coupled < ratio


def test_zero_bubble_gains_under_moe_costs():
    schedule = build("zb_v", num_ranks=4, num_microbatches=12)
    costs = MOE_COSTS.for_stages(4, 8)
    assert simulate(group(schedule), costs, "neighbour").makespan < simulate(schedule, costs, "neighbour").makespan
