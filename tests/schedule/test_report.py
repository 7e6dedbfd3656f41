"""Figures of a schedule beyond one simulation: all modes, bytes, phases."""

import pytest

from dualpipe_jax.schedule import Bytes, Costs, build, peak_bytes, phases, report, side_by_side, simulate


def test_modes_beside_each_other():
    """DeepSeek's DualPipe, plainly lowered, at (8, 20): 66, and 1.09 times as much coupled."""
    simulation = simulate(build("dualpipe", num_ranks=8, num_microbatches=20))
    found = side_by_side(simulation)
    assert list(found) == ["async", "neighbour", "neighbour_1", "lockstep"]
    assert found["async"] == simulation
    modes = report(simulation)["modes"]
    assert modes["neighbour"]["makespan"] == 72
    assert modes["neighbour"]["over_async"] == pytest.approx(72 / 66)


def test_bytes_of_activations_and_weight_residuals():
    """DualPipe keeps P+1 microbatches; V schedules count halves; what W's need may be smaller than an activation."""
    assert max(peak_bytes(build("dualpipe", num_ranks=4, num_microbatches=8), Bytes(10.0))) == 50
    assert max(peak_bytes(build("zb_v", num_ranks=4, num_microbatches=8), Bytes(10.0))) == 40
    late = build("zb_h2", num_ranks=4, num_microbatches=8)
    assert peak_bytes(late, Bytes(10.0)) == (70, 70, 70, 70)
    # Rank r has 7-2r forwards before its first I; the rest of 70 are W's put off, of a tenth of the size.
    assert peak_bytes(late, Bytes(10.0, 1.0)) == (70, 52, 34, 16)
    figures = report(simulate(late), Bytes(10.0))
    assert figures["peak_bytes"] == max(figures["peak_bytes_per_rank"])
    with pytest.raises(ValueError, match="must be at least 0; nearest valid: 0"):
        peak_bytes(late, Bytes(1.0, -1.0))


def test_phases_split_each_rank():
    simulation = simulate(build("1f1b", num_ranks=4, num_microbatches=8), Costs(backward_weight=0.5))
    for rank, (steady, cooldown) in enumerate(phases(simulation)):
        cells = list(zip(simulation.schedule.ranks[rank], simulation.start[rank], strict=True))
        assert [c[0].kind for c, start in cells if start < steady] == ["F"] * (4 - rank)
        assert {c[0].kind for c, start in cells if start >= cooldown} == {"B"}


def test_a_rank_with_forwards_only_last():
    """GPipe: no F after the first backward, so no steady phase."""
    simulation = simulate(build("gpipe", num_ranks=2, num_microbatches=3))
    assert all(steady == cooldown for steady, cooldown in phases(simulation))
