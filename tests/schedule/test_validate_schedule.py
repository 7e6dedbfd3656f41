"""Each way in which a schedule can be wrong is found, and shown in the grid."""

import pytest

from dualpipe_jax.schedule import Placement, ScheduleError, build, lower, parse_schedule, validate

TWO = Placement("loop", num_ranks=2, slots=1)


@pytest.mark.parametrize(
    ("text", "message", "marked"),
    [
        ("0F0 0B0\n1F0", "1F0 has no backward", ">>1F0<<"),
        ("0B0\n1F0 1B0", "0F0 is missing", None),
        ("0F0 0B0\n1F0 1I0", "1I0 has no W", ">>1I0<<"),
        ("0F0 0B0 0W0\n1F0 1B0", "0W0 repeats what 0B0 does", ">>0W0<<"),
        ("0F0 0F0 0B0\n1F0 1B0", "0F0 repeats 0F0", ">>0F0<< >>0F0<<"),
        ("0F0 0B0 0I0\n1F0 1B0", "0I0 repeats 0B0", ">>0I0<<"),
        ("0F0 0B0 1B0\n1F0", "1B0 is on rank 0; its stage is on rank 1", ">>1B0<<"),
        ("0F0 0W0 0I0\n1F0 1B0", "0W0 comes before 0I0", ">>0W0<< >>0I0<<"),
        ("0F0 2F0 0B0\n1F0 1B0", "2F0: there is no such stage", ">>2F0<<"),
        ("0F0 0F0' 0B0\n1F0 1B0", "0F0': there is no such stage or direction", ">>0F0'<<"),
        ("0F0 0B0\n1B0 1F0", "deadlock.*rank 1 at 1B0", ">>1B0<<"),
        ("0B0 0F0\n1F0 1B0", "deadlock", ">>0B0<<"),
        ("(0F0;0F1)OVERLAP_F_F 0B0 0B1\n1F0 1B0 1F1 1B1", "at most one F", ">>(0F0;0F1)OVERLAP_F_F<<"),
        ("(0B0;0F0)OVERLAP_B_F\n1F0 1B0", "in this order", "OVERLAP_B_F<<"),
    ],
)
def test_shows_what_is_wrong(text, message, marked):
    schedule = parse_schedule(text, TWO)
    with pytest.raises(ScheduleError, match=message) as caught:
        validate(schedule)
    assert "rank 1:" in str(caught.value)
    if marked:
        assert marked in str(caught.value)
    with pytest.raises(ScheduleError):
        lower(schedule)


def test_uneven_directions():
    schedule = build("dualpipe", num_ranks=2, num_microbatches=4)
    with pytest.raises(ScheduleError, match="num_microbatches=5"):
        validate(type(schedule)(schedule.name, schedule.placement, 5, schedule.ranks))


def test_wrong_number_of_ranks():
    schedule = build("1f1b", num_ranks=2, num_microbatches=4)
    with pytest.raises(ScheduleError, match="1 lists for 2 ranks"):
        validate(type(schedule)(schedule.name, schedule.placement, 4, schedule.ranks[:1]))


def test_in_one_cell_the_last_stage_may_use_its_own_forward():
    validate(parse_schedule("(0F0;0I0;0W0)OVERLAP_F_I_W", Placement("loop", 1, 1)))


def test_long_lines_are_cut_around_the_fault():
    schedule = build("1f1b", num_ranks=2, num_microbatches=60)
    broken = (schedule.ranks[0][:-1], schedule.ranks[1])
    with pytest.raises(ScheduleError, match="0F59 has no backward") as caught:
        validate(type(schedule)("cut", schedule.placement, 60, broken))
    assert "... " in str(caught.value)
    assert len(str(caught.value).splitlines()[1]) < 300
