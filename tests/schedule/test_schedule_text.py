"""Text goes both ways."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpipe_jax.schedule import (
    Action,
    Kind,
    Placement,
    build,
    format_cell,
    format_schedule,
    parse_action,
    parse_cell,
    parse_schedule,
)

ACTIONS = st.builds(Action, st.sampled_from(Kind), st.integers(0, 99), st.integers(0, 1), st.integers(0, 999))


@given(st.lists(ACTIONS, min_size=1, max_size=3).map(tuple))
def test_cells_both_ways(cell):
    assert parse_cell(format_cell(cell)) == cell


@settings(deadline=None)
@given(st.sampled_from(["1f1b", "dualpipe", "dualpipe_v"]), st.integers(1, 3), st.sampled_from([" ", ","]))
def test_schedules_both_ways(name, half, separator):
    schedule = build(name, num_ranks=2 * half, num_microbatches=4 * half)
    text = format_schedule(schedule, separator)
    assert parse_schedule(text, schedule.placement, name) == schedule


def test_idle_ticks_of_csv_are_skipped():
    schedule = parse_schedule("0F0,,0B0\n,1F0,1B0,\n", Placement("loop", 2, 1))
    assert format_schedule(schedule) == "0F0 0B0\n1F0 1B0"


@pytest.mark.parametrize("text", ["F0", "2X0", "2F", "2F0''", "-1F0", ""])
def test_refuses_what_is_no_action(text):
    with pytest.raises(ValueError, match="is no action: write <stage>"):
        parse_action(text)


def test_refuses_a_wrong_suffix():
    with pytest.raises(ValueError, match=r"nearest valid text is '\(0F7;7I3\)OVERLAP_F_I'"):
        parse_cell("(0F7;7I3)OVERLAP_F_B")


def test_refuses_another_number_of_lines():
    with pytest.raises(ValueError, match="1 lines for num_ranks=2"):
        parse_schedule("0F0 0B0", Placement("loop", 2, 1))
