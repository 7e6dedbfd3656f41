"""Is a schedule right, and is a table what its schedule says?"""

from __future__ import annotations

from collections.abc import Iterator

from dualpipe_jax.schedule.actions import Action, Kind, Schedule
from dualpipe_jax.schedule.graph import PHASE, ScheduleError, cell_graph, result
from dualpipe_jax.schedule.text import marked_grid

Problem = tuple[str, list[tuple[int, int]]]
"""What is wrong, and the (rank, index) of the cells that show it."""


def validate(schedule: Schedule) -> None:
    """Check that a schedule computes every gradient once and can run.

    Every (direction, stage, microbatch) is once F, once B or I, and has one W for each I, on the rank of its stage;
    a cell has at most one F, one of B and I, one W, in this order; the W comes after its I; the ranks do not wait
    for each other for ever.

    Raises:
        ScheduleError: names the first problem and shows the grid with the cells at fault marked.
    """
    for message, marks in _problems(schedule):
        raise ScheduleError(f"schedule {schedule.name}: {message}\n{marked_grid(schedule, marks)}")
    try:
        cell_graph(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"schedule {schedule.name}: {error}\n{marked_grid(schedule, error.marks)}") from None


def _problems(schedule: Schedule) -> Iterator[Problem]:
    if len(schedule.ranks) != schedule.placement.num_ranks:
        yield f"{len(schedule.ranks)} lists for {schedule.placement.num_ranks} ranks", []
    if schedule.num_microbatches % schedule.placement.num_directions:
        yield f"num_microbatches={schedule.num_microbatches} is not the same number in each direction", []
    yield from _bad_cells(schedule)
    places: dict[tuple[str, int, int, int], tuple[int, int, Action]] = {}
    for rank, cells in enumerate(schedule.ranks):
        for index, cell in enumerate(cells):
            for action in cell:
                value = result(action)
                if value in places:
                    first_rank, first_index, first = places[value]
                    yield f"{action} repeats {first}", [(first_rank, first_index), (rank, index)]
                places[value] = rank, index, action
    yield from _missing(schedule, places)


def _bad_cells(schedule: Schedule) -> Iterator[Problem]:
    placement = schedule.placement
    for rank, cells in enumerate(schedule.ranks):
        for index, cell in enumerate(cells):
            phases = [PHASE[a.kind] for a in cell]
            if not phases or phases != sorted(set(phases)):
                yield "a cell has at most one F, one of B and I, one W, in this order", [(rank, index)]
            for action in cell:
                if not (0 <= action.stage < placement.num_stages and 0 <= action.direction < placement.num_directions):
                    yield f"{action}: there is no such stage or direction", [(rank, index)]
                elif not 0 <= action.microbatch < schedule.microbatches_per_direction:
                    yield f"{action}: microbatches are 0..{schedule.microbatches_per_direction - 1}", [(rank, index)]
                elif placement.rank_of(action.stage, action.direction) != rank:
                    right = placement.rank_of(action.stage, action.direction)
                    yield f"{action} is on rank {rank}; its stage is on rank {right}", [(rank, index)]


def _missing(schedule: Schedule, places: dict[tuple[str, int, int, int], tuple[int, int, Action]]) -> Iterator[Problem]:
    placement = schedule.placement
    for direction in range(placement.num_directions):
        for stage in range(placement.num_stages):
            for microbatch in range(schedule.microbatches_per_direction):
                forward, backward, weight = (places.get((k, direction, stage, microbatch)) for k in "FBW")
                if forward is None:
                    yield f"{Action(Kind.F, stage, direction, microbatch)} is missing", []
                elif backward is None:
                    yield f"{forward[2]} has no backward", [forward[:2]]
                elif backward[2].kind is Kind.I and weight is None:
                    yield f"{backward[2]} has no W", [backward[:2]]
                elif backward[2].kind is Kind.B and weight is not None:
                    yield f"{weight[2]} repeats what {backward[2]} does", [backward[:2], weight[:2]]
                elif weight is not None and weight[1] < backward[1]:
                    yield f"{weight[2]} comes before {backward[2]}", [weight[:2], backward[:2]]
