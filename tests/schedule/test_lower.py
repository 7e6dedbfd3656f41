"""Tables: correct by replay, no larger than needed, and any corruption is noticed."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpipe_jax.schedule import (
    BUILDERS,
    Placement,
    ScheduleError,
    build,
    lower,
    nearest_microbatches,
    parse_schedule,
    simulate,
    validate_table,
)
from dualpipe_jax.schedule.table import COLUMNS

GOLDENS = Path(__file__).parents[1] / "data" / "schedules" / "tables"


@st.composite
def schedules(draw):
    name = draw(st.sampled_from(sorted(BUILDERS)))
    num_ranks = draw(st.integers(1, 6))
    num_ranks += num_ranks % 2 if BUILDERS[name].even_ranks else 0
    num_microbatches = nearest_microbatches(name, num_ranks, draw(st.integers(1, 16)))[-1]
    rule = draw(st.sampled_from(["depth", "steady"]))
    return build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, slot_rule=rule)


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(1, 3))
def test_any_schedule_lowers_to_a_valid_table(schedule, num_kinds):
    kinds = [s % num_kinds for s in range(schedule.placement.num_stages)]
    table = lower(schedule, kinds)
    validate_table(table, schedule)
    assert {c.dtype for c in (getattr(table, name) for name in COLUMNS)} == {np.dtype(np.int32)}
    assert len(table.num_residual_slots) == max(kinds) + 1


@settings(max_examples=40, deadline=None)
@given(schedules())
def test_slots_never_exceed_the_peak(schedule):
    """An activation is kept from F to B or W, and so are its weight residuals: one kind of stage, one pool."""
    table, simulation = lower(schedule), simulate(schedule)
    peak = max(simulation.peak_activations)
    assert table.num_weight_residual_slots[0] == peak
    assert table.num_residual_slots[0] <= peak
    # A cut is written in the tick in which another is read at the earliest one tick later.
    assert table.num_cut_slots[0] <= max(simulation.pending_weight_max) + 1


def test_a_table_has_as_many_ticks_as_the_lockstep_simulation():
    schedule = build("dualpipe", num_ranks=4, num_microbatches=10)
    table = lower(schedule)
    busy = (table.forward_stage >= 0) | (table.backward_stage >= 0) | (table.weight_stage >= 0)
    assert busy.any(1).all()
    assert busy.sum() == sum(map(len, schedule.ranks))


@pytest.mark.parametrize("num_microbatches", [60, 120])
def test_steady_ticks_are_the_same_on_all_ranks(num_microbatches):
    """With steady slots, every tick in which all ranks run a pair is in a uniform segment."""
    schedule = build("dualpipe", num_ranks=8, num_microbatches=num_microbatches, slot_rule="steady")
    table = lower(schedule)
    pairs = ((table.forward_stage >= 0) & (table.backward_stage >= 0)).all(1)
    (steady,) = (s for s in table.segments if s.uniform)
    assert len(steady.patterns) == 2  # the two directions take turns
    assert pairs[steady.start : steady.stop].all()
    assert pairs.sum() - (steady.stop - steady.start) in (0, 1)  # whole cycles only
    assert [[(o.kind, o.slot) for o in p] for p in steady.patterns] in (
        [[("F", 0), ("B", 1)], [("F", 1), ("B", 0)]],
        [[("F", 1), ("B", 0)], [("F", 0), ("B", 1)]],
    )


def test_with_depth_slots_the_steady_state_selects_its_slot():
    """The same ticks are uniform, but ranks of one half do in slot 0 what those of the other do in slot 1."""
    tables = [
        lower(build("dualpipe", num_ranks=8, num_microbatches=60, slot_rule=rule)) for rule in ("steady", "depth")
    ]
    (fixed,), (free,) = ([s for s in table.segments if s.uniform] for table in tables)
    assert abs((free.stop - free.start) - (fixed.stop - fixed.start)) <= 1
    assert {o.slot for p in free.patterns for o in p} == {None}
    assert len(free.patterns) == 1


def test_channels():
    """A loop of one stage a rank sends activations right and gradients left; both ends of DualPipe use all four."""
    (segment,) = lower(build("1f1b", num_ranks=4, num_microbatches=5)).segments
    assert segment.channels == {"right_activation", "left_gradient"}
    (segment,) = lower(build("dualpipe", num_ranks=4, num_microbatches=8)).segments
    assert segment.channels == {"right_activation", "left_gradient", "left_activation", "right_gradient"}
    assert all(not s.channels for s in lower(build("1f1b", num_ranks=1, num_microbatches=5)).segments)


def test_ring_messages_keep_their_direction():
    """Two stages a rank in a loop: stage 1 to 2 goes from the last rank on to the first."""
    text = "0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0"
    schedule = parse_schedule(text, Placement("loop", num_ranks=2, slots=2))
    table = lower(schedule)
    validate_table(table, schedule)
    assert (table.receive_left_activation < 0).all()
    assert (table.receive_right_gradient < 0).all()
    assert (table.receive_right_activation >= 0).sum() == 3


def test_stage_kinds_have_one_entry_a_stage():
    with pytest.raises(ValueError, match="stage_kinds has 3 entries; give one for each of 4 stages"):
        lower(build("1f1b", num_ranks=4, num_microbatches=4), [0, 0, 0])


@pytest.mark.parametrize("column", COLUMNS)
def test_a_corrupted_column_is_noticed(column):
    """Change one entry that means something; every column must be covered by some invariant."""
    schedule = build("dualpipe_v", num_ranks=2, num_microbatches=6)
    table = lower(schedule)
    values = getattr(table, column)
    tick, rank = np.argwhere(values >= 0)[-1]
    broken = values.copy()
    broken[tick, rank] += -1 if column == "backward_full" and values[tick, rank] else 1
    with pytest.raises(ScheduleError):
        validate_table(dataclasses.replace(table, **{column: broken}), schedule)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_activation_slots": 0}, "outside"),
        ({"num_cut_slots": (0,)}, "outside"),
        ({"segments": ()}, "do not cover"),
    ],
)
def test_a_wrong_size_is_noticed(change, message):
    schedule = build("dualpipe_v", num_ranks=2, num_microbatches=6)
    with pytest.raises(ScheduleError, match=message):
        validate_table(dataclasses.replace(lower(schedule), **change), schedule)


def table_text(table):
    """All columns, a line for each tick and rank that does or receives anything."""
    lines = [f"# tick rank {' '.join(COLUMNS)}"]
    for tick in range(table.num_ticks):
        for rank in range(table.num_ranks):
            row = [int(getattr(table, c)[tick, rank]) for c in COLUMNS]
            lines.append(f"{tick:>2} {rank} " + " ".join("." if x < 0 else str(x) for x in row))
    for segment in table.segments:
        lines.append(f"# {segment.start}..{segment.stop} {'uniform' if segment.patterns else 'mixed'}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches"), [("1f1b", 3, 4), ("dualpipe", 4, 8), ("dualpipe_v", 2, 5)]
)
def test_golden(name, num_ranks, num_microbatches):
    """Set REWRITE_GOLDENS=1 to write them anew, then read the difference."""
    text = table_text(lower(build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)))
    path = GOLDENS / f"{name}_{num_ranks}_{num_microbatches}.txt"
    if os.environ.get("REWRITE_GOLDENS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text
