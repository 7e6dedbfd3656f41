"""What every builder takes and refuses, and the closed formulas for what it makes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpipe_jax.schedule import BUILDERS, Costs, build, nearest_microbatches, simulate, validate

COSTS = {3: Costs(), 2.5: Costs(pair=2.5)}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(BUILDERS)), st.integers(1, 8), st.integers(1, 20))
def test_any_valid_numbers_make_a_valid_schedule(name, num_ranks, num_microbatches):
    num_ranks += num_ranks % 2 if BUILDERS[name].even_ranks else 0
    num_microbatches = nearest_microbatches(name, num_ranks, num_microbatches)[0]
    validate(build(name, num_ranks=num_ranks, num_microbatches=num_microbatches))


@pytest.mark.parametrize("name", sorted(BUILDERS))
@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
def test_few_microbatches_run_or_are_refused(name, num_microbatches):
    """Case 1: P=4 and M = 1, 2, 3: built and valid, or refused with M, P and a value that then works."""
    nearest = nearest_microbatches(name, 4, num_microbatches)[0]
    validate(build(name, num_ranks=4, num_microbatches=nearest))
    if nearest != num_microbatches:
        message = f"num_ranks=4 needs .*, not {num_microbatches}; nearest valid: {nearest}"
        with pytest.raises(ValueError, match=message):
            build(name, num_ranks=4, num_microbatches=num_microbatches)


@pytest.mark.parametrize(("num_microbatches", "makespan"), [(1, 12), (3, 18)])
def test_1f1b_with_few_microbatches(num_microbatches, makespan):
    """Case 1: (M + P - 1) * 3."""
    assert simulate(build("1f1b", num_ranks=4, num_microbatches=num_microbatches)).makespan == makespan


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 16])
@pytest.mark.parametrize("extra", [0, 1, 7, 40])
def test_1f1b_formula(num_ranks, extra):
    simulation = simulate(build("1f1b", num_ranks=num_ranks, num_microbatches=num_ranks + extra))
    assert simulation.makespan == 3 * (num_ranks + extra + num_ranks - 1)
    assert simulation.peak_activations == tuple(range(num_ranks, 0, -1))


@pytest.mark.parametrize("pair", [3, 2.5])
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("extra", [0, 2, 20])
def test_dualpipe_formula(num_ranks, extra, pair):
    """5P/2 + 4 + (M - P/2 - 2) pair; the largest idle time is (P/2 - 1)(pair + B - 3W)."""
    P, M = num_ranks, 2 * num_ranks + extra
    simulation = simulate(build("dualpipe", num_ranks=P, num_microbatches=M), COSTS[pair])
    assert simulation.makespan == 5 * P / 2 + 4 + (M - P / 2 - 2) * pair
    assert max(simulation.idle) == (P / 2 - 1) * (pair + 2 - 3)
    assert set(simulation.peak_activations) == {P + 1}


@pytest.mark.parametrize("pair", [3, 2.5])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("extra", [0, 1, 9])
def test_dualpipe_v_formula(num_ranks, extra, pair):
    """The same with P -> 2P, M -> 2M, in times of half a stage."""
    P, M = num_ranks, 2 * num_ranks + extra
    simulation = simulate(build("dualpipe_v", num_ranks=P, num_microbatches=M), COSTS[pair])
    assert simulation.makespan == 5 * P + 4 + (2 * M - P - 2) * pair
    assert max(simulation.idle) == (P - 1) * (pair + 2 - 3)
    assert set(simulation.peak_activations) == {2 * P + 1}


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("v", [1, 2, 4])
def test_interleaved_formula(num_ranks, v):
    """3 (v M + P - 1) for M a multiple of P."""
    schedule = build("interleaved_1f1b", num_ranks=num_ranks, num_microbatches=3 * num_ranks, stages_per_rank=v)
    assert simulate(schedule).makespan == 3 * (v * 3 * num_ranks + num_ranks - 1)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("extra", [0, 3])
def test_zero_bubble_formulas(num_ranks, extra):
    """ZB-H1 ends P - 1 + P - 1 after its work, in 1F1B's memory; ZB-H2 and ZB-V idle at most P - 1 in all."""
    P, M = num_ranks, 2 * num_ranks + extra
    h1, h2, v = (simulate(build(n, num_ranks=P, num_microbatches=M)) for n in ("zb_h1", "zb_h2", "zb_v"))
    assert h1.makespan == 3 * M + P - 1
    assert set(h1.peak_activations) == {P}
    assert h2.makespan == 3 * M + P - 1
    assert set(h2.peak_activations) == {2 * P - 1}
    assert v.makespan == 6 * M + P - 1
    assert set(v.peak_activations) == {2 * P}


# Makespans and activations of the authors' published generator, F = I = W = 1. V-Min's order is as short; V-Half's is
# 3 longer everywhere, since F and I stay where the building block has them.
@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches", "makespan", "peak", "longer"),
    [
        ("v_min", 4, 8, 59, 4, 0),
        ("v_min", 8, 16, 123, 8, 0),
        ("v_min", 16, 32, 251, 12, 0),
        ("v_half", 4, 8, 53, 6, 3),
        ("v_half", 8, 16, 113, 10, 3),
        ("v_half", 16, 32, 233, 18, 3),
    ],
)
def test_controllable_memory(name, num_ranks, num_microbatches, makespan, peak, longer):
    simulation = simulate(build(name, num_ranks=num_ranks, num_microbatches=num_microbatches))
    assert simulation.makespan == makespan + longer
    assert max(simulation.peak_activations) == peak


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_wave_with_as_many_microbatches_as_ranks(num_ranks):
    """The paper's case; more stages a rank shorten the ramps (in times of the whole rank's layers)."""
    spans = [
        simulate(build("wave", num_ranks=num_ranks, num_microbatches=num_ranks, stages_per_rank=v)).makespan / v
        for v in (1, 2, 4)
    ]
    assert spans[0] > spans[1] > spans[2]


@pytest.mark.parametrize(
    ("name", "pair", "percent", "peak"),
    [
        ("1f1b", 3, (31.9, 19.0, 11.1), 16),
        ("dualpipe", 3, (12.7, 6.8, 3.7), 17),
        ("dualpipe", 2.5, (10.6, 5.9, 3.3), 17),
        ("dualpipe_v", 3, (13.5, 7.25, 4.0), 16.5),
        ("zb_h1", 3, (13.5, 7.25, 4.0), 16),
        ("zb_v", 3, (7.25, 3.8, 2.0), 16),
    ],
)
def test_published_bubbles(name, pair, percent, peak):
    """P=16, M = 32, 64, 120: idle over makespan in per cent, printed with one or two digits."""
    for num_microbatches, expected in zip((32, 64, 120), percent, strict=True):
        simulation = simulate(build(name, num_ranks=16, num_microbatches=num_microbatches), COSTS[pair])
        assert 100 * max(simulation.idle) / simulation.makespan == pytest.approx(expected, abs=0.051)
        assert simulation.peak_units == peak


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches", "message"),
    [
        ("pipe", 4, 8, "unknown schedule 'pipe'; choose one of .*1f1b.*dualpipe_v"),
        ("1f1b", 0, 8, "1f1b needs num_ranks >= 1, not 0; nearest valid: 1"),
        ("1f1b", 4, -1, "1f1b on num_ranks=4 needs num_microbatches >= 1, not -1; nearest valid: 1"),
        ("dualpipe", 5, 20, "dualpipe needs num_ranks even and at least 2, not 5; nearest valid: 4 or 6"),
        ("dualpipe", -4, 20, "nearest valid: 2"),
        ("dualpipe", 4, 11, "a multiple of 2, not 11; nearest valid: 10 or 12"),
        ("dualpipe", 4, 6, "num_microbatches >= 8 and a multiple of 2, not 6; nearest valid: 8"),
        ("dualpipe_v", 4, 7, "num_microbatches >= 8, not 7; nearest valid: 8"),
    ],
)
def test_refuses(name, num_ranks, num_microbatches, message):
    with pytest.raises(ValueError, match=message) as caught:
        build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    assert "\n" not in str(caught.value)
