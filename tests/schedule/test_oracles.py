"""Op orders and timings equal those recorded from other implementations; origins are named in the data files."""

import functools
import json
from pathlib import Path

import pytest

from dualpipe_jax.schedule import Costs, build, format_schedule, simulate

DATA = Path(__file__).parents[1] / "data" / "schedules"
# Sums of the same few short decimals in another order.
ROUNDING = 1e-9


@functools.cache
def cases(name):
    return json.loads((DATA / f"{name}.json").read_text())


def name_of(case):
    """Our name and options for a recorded schedule; None where we build another order on purpose."""
    match case["schedule"]:
        case "1F1B":
            return "1f1b", {}
        case "Interleaved1F1B":
            return "interleaved_1f1b", {"stages_per_rank": case["stages_per_rank"]}
        case "InterleavedZeroBubble":
            return "zb_h1", {"stages_per_rank": case["stages_per_rank"]}
        case "ZBVZeroBubble":
            return "zb_v", {}
        case "DualPipe" | "dualpipe":
            return "dualpipe", {}
        case "DualPipeV" | "dualpipe_v":
            return "dualpipe_v", {}
    return None


def deepseek_text(case):
    """Recorded text has the rank's own slot numbers: translate to stages and directions."""
    P, bidirectional = case["P"], case["schedule"] == "dualpipe"
    lines = []
    for rank, line in enumerate(case["ranks"]):
        near = min(rank, P - 1 - rank) if bidirectional else rank
        far = (P if bidirectional else 2 * P) - 1 - near
        words = []
        for word in line.split():
            actions = []
            for action in word.split("+"):
                slot, microbatch = action[1:].split(".")
                direction = int(slot) ^ (rank >= P // 2) if bidirectional else 0
                actions.append(f"{(near, far)[int(slot)]}{action[0]}{microbatch}{chr(39) * direction}")
            words.append(actions[0] if len(actions) == 1 else f"({';'.join(actions)})OVERLAP_F_B")
        lines.append(" ".join(words))
    return "\n".join(lines)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
def test_deepseek_order(name):
    chosen = [c for c in cases("deepseek")["cases"] if c["schedule"] == name]
    assert len(chosen) >= 18
    for case in chosen:
        schedule = build(name, num_ranks=case["P"], num_microbatches=case["M"])
        assert format_schedule(schedule) == deepseek_text(case), (case["P"], case["M"])


@pytest.mark.parametrize("recorded", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_torch_order(recorded):
    chosen = [c for c in cases("torch")["cases"] if c["schedule"] == recorded]
    assert len(chosen) >= 9
    for case in chosen:
        name, options = name_of(case)
        schedule = build(name, num_ranks=case["P"], num_microbatches=case["M"], **options)
        assert format_schedule(schedule) == "\n".join(case["ranks"]), (case["P"], case["M"], options)


def test_timing():
    """Makespan and idle time in every cost model, with and without transfer time, and the activations kept."""
    recorded, checked = cases("timing"), 0
    for case in recorded["cases"]:
        found = name_of(case)
        if found is None:
            continue
        schedule = build(found[0], num_ranks=case["P"], num_microbatches=case["M"], **found[1])
        for key, run in case["runs"].items():
            model, transfer = key.rsplit("_c", 1)
            c = recorded["cost_models"][model]
            costs = Costs(c["F"], c["I"], c["W"], pair=c["pair"], transfer=float(transfer))
            simulation = simulate(schedule, costs)
            where = (found, case["P"], case["M"], key)
            assert simulation.makespan == pytest.approx(run["makespan"], abs=ROUNDING), where
            assert simulation.idle == pytest.approx(run["idle"], abs=ROUNDING), where
            assert list(simulation.peak_activations) == case["peak"], where
            checked += 1
    assert checked >= 300
