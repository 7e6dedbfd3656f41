"""A schedule that would lose or repeat a gradient is refused before anything is traced, with the cells at fault."""

import dataclasses

import pytest

from dualpipe_jax import StageFns, build, make_mesh, pipeline_value_and_grad
from dualpipe_jax.schedule import Kind, ScheduleError


def never(*args):
    raise AssertionError("was traced")


def edited(schedule, change):
    """The schedule with each action of rank 0 replaced by those that `change` returns for it."""
    cells = [tuple(new for action in cell for new in change(action)) for cell in schedule.ranks[0]]
    return dataclasses.replace(schedule, ranks=(tuple(c for c in cells if c), *schedule.ranks[1:]))


LAST_W, FIRST_I, FIRST_F = (Kind.W, 3), (Kind.I, 0), (Kind.F, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: () if (a.kind, a.microbatch) == LAST_W else (a,), "0I3 has no W"),  # outstanding at the end
        (lambda a: () if (a.kind, a.microbatch) == FIRST_I else (a,), "0F0 has no backward"),
        (lambda a: () if (a.kind, a.microbatch) == FIRST_F else (a,), "0F0 is missing"),
        (lambda a: (dataclasses.replace(a, stage=1),) if (a.kind, a.microbatch) == FIRST_F else (a,), "is on rank 0"),
        (lambda a: (dataclasses.replace(a, microbatch=2),) if (a.kind, a.microbatch) == LAST_W else (a,), "repeats"),
    ],
)
def test_a_bad_table_is_refused_before_tracing(change, message):
    good = build("zb_h1", num_ranks=2, num_microbatches=4)
    fns, mesh = StageFns(never, never, never), make_mesh(2)
    with pytest.raises(ScheduleError, match=message) as error:
        pipeline_value_and_grad(fns, edited(good, change), mesh=mesh)
    assert isinstance(error.value, ValueError)
    assert "zb_h1" in str(error.value)
    with pytest.raises(ScheduleError, match=message):  # nor as one of several
        pipeline_value_and_grad(fns, [good, edited(good, change)], mesh=mesh)
    pipeline_value_and_grad(fns, edited(good, lambda a: (a,)), mesh=mesh)
