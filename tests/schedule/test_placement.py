"""Every placement is a bijection, and the steady slots are what they are for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpipe_jax.schedule import Placement

PLACEMENTS = st.one_of(
    st.builds(Placement, st.just("loop"), st.integers(1, 9), st.integers(1, 5)),
    st.builds(Placement, st.just("v"), st.integers(1, 9), st.integers(1, 5), st.sampled_from(["depth", "steady"])),
    st.builds(
        Placement,
        st.just("bidirectional"),
        st.integers(1, 8).map(lambda n: 2 * n),
        st.just(2),
        st.sampled_from(["depth", "steady"]),
    ),
)


@given(PLACEMENTS)
def test_each_rank_and_slot_holds_one_stage(placement):
    pairs = [(s, d) for d in range(placement.num_directions) for s in range(placement.num_stages)]
    places = {(placement.rank_of(s, d), placement.slot_of(s, d)): (s, d) for s, d in pairs}
    assert sorted(places) == [(r, k) for r in range(placement.num_ranks) for k in range(placement.slots)]
    assert all(placement.stage_of(*place) == pair for place, pair in places.items())


@given(PLACEMENTS)
def test_next_stage_is_on_the_same_rank_or_a_neighbour(placement):
    for d in range(placement.num_directions):
        for s in range(placement.num_stages - 1):
            step = placement.rank_of(s + 1, d) - placement.rank_of(s, d)
            around = {1 - placement.num_ranks} if placement.kind == "loop" else set()
            assert step in {-1, 0, 1} | around


def test_bidirectional_copies_mirror_each_other():
    placement = Placement("bidirectional", num_ranks=6, slots=2, slot_rule="steady")
    for stage in range(6):
        rank, slot = placement.home(stage)
        assert placement.rank_of(stage, 1) == 5 - rank
        assert placement.stage_of(rank, slot) == (stage, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ring", 4, 1), "unknown placement"),
        (("v", 4, 2, "first"), "unknown slot_rule 'first'"),
        (("loop", 0, 1), "num_ranks=0 must be at least 1"),
        (("loop", 2, 0), "slots=0 must be at least 1"),
        (("bidirectional", 4, 3), "slots=2"),
        (("bidirectional", 5, 2), "num_ranks=5 must be even .* 4 and 6"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        Placement(*arguments)
