"""All schedules side by side, and the formulas for them."""

import pytest

from dualpipe_jax.schedule import Costs, build, simulate
from dualpipe_jax.schedule.comparison import compare, exact_formula, modelled_mfu, simple_formula
from dualpipe_jax.schedule.render import draw_comparison

ROUNDING = 1e-9  # sums of floats in another order


def test_comparison_has_the_published_figures():
    """P=16, M=32 in per cent: the largest idle time over the makespan; activations; copies of the parameters."""
    rows = {row.schedule: row for row in compare(16, [32])}
    for name, idle, peak, copies in [
        ("1f1b", 31.9, 16, 1),
        ("interleaved_1f1b", 19.0, 23.5, 1),
        ("zb_h1", 13.5, 16, 1),
        ("dualpipe", 12.7, 17, 2),
        ("dualpipe_v", 13.5, 16.5, 1),
        ("zb_v", 7.25, 16, 1),
    ]:
        assert 100 * rows[name].largest_idle == pytest.approx(idle, abs=0.051)
        assert (rows[name].peak, rows[name].copies) == (peak, copies)
    assert rows["dualpipe"].transfers == 15
    assert rows["zb_v"].transfers == 30
    assert rows["auto"].bubble < 0.04


def test_comparison_leaves_out_what_does_not_exist():
    assert "dualpipe" not in {row.schedule for row in compare(3, [8])}
    with pytest.raises(ValueError, match="num_ranks=0 must be at least 1"):
        compare(0, [8])


NAMES = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "dualpipe", "dualpipe_v"]
COSTS = [Costs(), Costs(2.0, 2.0, 2.0, pair=5.0), Costs(1.0, 1.2, 0.8), Costs(1.0, 0.8, 1.2), Costs(1.5, 1.25, 1.25)]


@pytest.mark.parametrize("name", NAMES)
def test_exact_formulas_are_what_simulation_gives(name):
    """Wherever a formula is given, for equal and other costs."""
    checked = 0
    for P, M in [(2, 4), (4, 8), (4, 11), (4, 12), (8, 20), (8, 32)]:
        if name == "dualpipe" and M % 2:
            continue
        schedule = build(name, num_ranks=P, num_microbatches=M)
        for costs in COSTS:
            found = exact_formula(name, P, M, costs)
            if found is not None:
                s = simulate(schedule, costs.for_stages(P, schedule.placement.num_stages))
                assert found == pytest.approx(max(s.idle) / s.makespan, abs=ROUNDING), (P, M, costs)
                checked += 1
    assert checked >= 8


def test_dualpipe_formula_needs_equal_costs():
    """DeepSeek's (P/2-1)(F&B+B-3W) at (8, 20): 7.8 where the ranks idle 7.2, and 4.2 where they idle 6."""
    for costs, formula, idle in [(Costs(1, 1.2, 0.8), 7.8, 7.2), (Costs(1, 0.8, 1.2), 4.2, 6.0)]:
        backward = costs.backward_input + costs.backward_weight
        assert 3 * (1 + backward + backward - 3 * costs.backward_weight) == pytest.approx(formula)
        schedule = build("dualpipe", num_ranks=8, num_microbatches=20)
        assert max(simulate(schedule, costs).idle) == pytest.approx(idle)
        assert exact_formula("dualpipe", 8, 20, costs) is None


@pytest.mark.parametrize("costs", [Costs(transfer=0.1), Costs((1.0, 2.0)), Costs(input_weight=1.5)])
def test_no_exact_formula_for_other_costs(costs):
    assert exact_formula("1f1b", 2, 4, costs) is None


def test_simple_formulas():
    assert simple_formula("dualpipe", 16, 32) == pytest.approx(7 / 192)
    assert simple_formula("zb_h1", 16, 32) == pytest.approx(15 / 96)
    assert simple_formula("auto", 16, 32) is None


def test_modelled_mfu():
    """No bubble: the published step without its 2.06 s; more of it, less utilisation; only for the run's P."""
    assert modelled_mfu(0.0, 120) == pytest.approx(0.389 * 19.926 / (19.926 - 2.06))
    assert modelled_mfu(0.1, 120) > modelled_mfu(0.2, 120)
    assert modelled_mfu(0.1, 120) > modelled_mfu(0.1, 32)  # the optimizer's time counts for more
    assert {row.mfu for row in compare(4, [8])} == {None}


def test_chart_states_its_assumptions(tmp_path):
    rows = [row for row in compare(16, [32]) if row.schedule in ("1f1b", "dualpipe")]
    draw_comparison(rows, 16, "F, I, W = 1, 1, 1", tmp_path / "chart.svg")
    text = (tmp_path / "chart.svg").read_text()
    assert "Bubble and modelled MFU for 671B on 2,048 GPUs, P=16; F, I, W = 1, 1, 1" in text
    assert "Modelled, not measured. MFU(schedule, M) = " in text
    draw_comparison(compare(2, [4]), 2, "unit costs", tmp_path / "small.svg")
    assert "MFU" not in (tmp_path / "small.svg").read_text()
