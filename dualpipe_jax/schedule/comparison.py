"""All schedules side by side, with the formulas that papers and articles give for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dualpipe_jax.schedule.builders import BUILDERS, build, nearest_microbatches
from dualpipe_jax.schedule.costs import Costs
from dualpipe_jax.schedule.simulate import Mode, simulate


class Run(NamedTuple):
    """A published training run, from which `modelled_mfu` starts. Seconds a step, for a rank.

    Attributes:
        num_ranks, num_microbatches: P, M. step, bubble, optimizer: measured times. mfu: measured, causal count.
    """

    num_ranks: int = 16
    num_microbatches: int = 120
    step: float = 19.926
    bubble: float = 2.06
    optimizer: float = 0.29
    mfu: float = 0.389


DEEPSEEK_V3 = Run()
"""671B parameters on 2,048 H800, P=16, 128 pipelines of 120 sequences of 4,096 tokens; published by DeepSeek."""

MFU_MODEL = (
    "Modelled, not measured. MFU(schedule, M) = 38.9% x 19.926 s x (M/120) / step; "
    "step = 17.576 s x (M/120) / (1 - bubble) + 0.29 s.",
    "From DeepSeek-V3's published step on 2,048 H800 (P=16, M=120): 19.926 s = 17.576 work + 2.06 bubble "
    "+ 0.29 optimizer, 38.9% causal MFU.",
    "Assumes that a microbatch is the same work in every schedule, with all hidden that was hidden there. "
    "The bubble is simulated with the costs given here;",
    "measured, DualPipe's was 10.3% of the step, so expect less of every schedule. Whether it fits in memory is not "
    "checked.",
)
"""What the numbers of `modelled_mfu` rest on; printed wherever they are."""


@dataclass(frozen=True)
class Row:
    """One schedule in a comparison.

    Attributes:
        bubble: 1 - work / (P x makespan). largest_idle: of any rank, over the makespan (what the formulas give).
        formula: the simple formula that articles quote; None where there is none.
        exact: the largest idle time over the makespan by the schedule's exact formula; None where none is known.
        peak: activations of one microbatch through 1/P of the layers. copies: of the parameters.
        transfers: messages a microbatch sends between ranks in F (and as many in I).
        mfu: modelled, see `MFU_MODEL`; None where P is not the model's.
    """

    schedule: str
    microbatches: int
    bubble: float
    largest_idle: float
    formula: float | None
    exact: float | None
    peak: float
    copies: int
    transfers: int
    mfu: float | None


def compare(num_ranks: int, microbatches: Sequence[int], costs: Costs | None = None, mode: Mode = "async") -> list[Row]:
    """All schedules side by side, those that do not exist for P and M left out.

    Args:
        costs: times of 1/P of the layers (`Costs.for_stages`).

    Raises:
        ValueError: P < 1.

    Example:
        >>> [row.schedule for row in compare(3, [4])][:3]
        ['gpipe', '1f1b', 'interleaved_1f1b']
    """
    if num_ranks < 1:
        raise ValueError(f"{num_ranks=} must be at least 1; nearest valid: 1")
    rows = []
    for m in microbatches:
        for name, builder in BUILDERS.items():
            possible = not (builder.even_ranks and num_ranks % 2)
            if possible and m in nearest_microbatches(name, num_ranks, m):
                rows.append(_row(name, num_ranks, m, costs or Costs(), mode))
    return rows


def _row(name: str, num_ranks: int, num_microbatches: int, costs: Costs, mode: Mode) -> Row:
    schedule = build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    placement = schedule.placement
    s = simulate(schedule, costs.for_stages(num_ranks, placement.num_stages), mode)
    crossed = [placement.rank_of(i) != placement.rank_of(i + 1) for i in range(placement.num_stages - 1)]
    return Row(
        name,
        num_microbatches,
        s.bubble_fraction,
        max(s.idle) / s.makespan if s.makespan else 0.0,
        simple_formula(name, num_ranks, num_microbatches),
        exact_formula(name, num_ranks, num_microbatches, costs) if mode == "async" else None,
        s.peak_units,
        placement.num_directions,
        sum(crossed),
        modelled_mfu(s.bubble_fraction, num_microbatches) if num_ranks == DEEPSEEK_V3.num_ranks else None,
    )


def simple_formula(name: str, num_ranks: int, num_microbatches: int) -> float | None:
    """The bubble as articles quote it: (P-1)/M for 1F1B, a third of it for ZB-1P, (P/2-1)/(6M) for DualPipe; with
    b = (P-1)/(M+P-1), b/2 for V-Half and 2b/3 for V-Min; 0 for ZB-2P and ZB-V, which idle only in the ramps.

    Example:
        >>> simple_formula("1f1b", 16, 32)
        0.46875
    """
    P, M = num_ranks, num_microbatches
    known = {
        "gpipe": (P - 1) / M,
        "1f1b": (P - 1) / M,
        "interleaved_1f1b": (P - 1) / (2 * M),
        "zb_h1": (P - 1) / (3 * M),
        "zb_h2": 0.0,
        "zb_v": 0.0,
        "v_half": (P - 1) / (M + P - 1) / 2,
        "v_min": 2 * (P - 1) / (M + P - 1) / 3,
        "dualpipe": (P / 2 - 1) / (6 * M),
    }
    return known.get(name)


def exact_formula(name: str, num_ranks: int, num_microbatches: int, costs: Costs) -> float | None:
    """Idle time of the rank that idles most, over the makespan, in mode async; None where no formula holds.

    With B = I + W and F&B the pair: (P-1)(F+B) for 1F1B and GPipe, half of it for two interleaved stages (M a
    multiple of P), (P-1)(F+I-W) for ZB-1P (I >= W), (P-1)F for ZB-2P and half of it for ZB-V (both M >= 2P-1),
    (P/2-1)(F&B+B-3W) for DualPipe and (P-1)(F&B+B-3W)/2 for DualPipeV. ZB-V's and those of the last two hold for
    F = I = W only.

    Example:
        >>> round(exact_formula("dualpipe", 16, 32, Costs()), 3)
        0.127
    """
    P, M = num_ranks, num_microbatches
    F, I, W = costs.forward, costs.backward_input, costs.backward_weight  # noqa: E741
    if isinstance(F, tuple) or isinstance(I, tuple) or isinstance(W, tuple) or isinstance(costs.pair, tuple):
        return None
    if costs.transfer or costs.input_weight is not None:
        return None
    pair = F + I + W if costs.pair is None else costs.pair
    equal = F == I == W
    idle = {
        "gpipe": (P - 1) * (F + I + W),
        "1f1b": (P - 1) * (F + I + W),
        "interleaved_1f1b": (P - 1) * (F + I + W) / 2 if M % P == 0 else None,
        "zb_h1": (P - 1) * (F + I - W) if I >= W and M >= P else None,
        "zb_h2": (P - 1) * F if M >= 2 * P - 1 else None,
        "zb_v": (P - 1) * F / 2 if equal and M >= 2 * P - 1 else None,
        "dualpipe": (P / 2 - 1) * (pair + I - 2 * W) if equal else None,
        "dualpipe_v": (P - 1) * (pair + I - 2 * W) / 2 if equal else None,
    }.get(name)
    if idle is None:
        return None
    # In the last two, a pair cheaper than its parts changes the work: P and M of both directions, in halves for V.
    makespan = {
        "dualpipe": (2.5 * P + 4) * F + (M - P / 2 - 2) * pair,
        "dualpipe_v": ((5 * P + 4) * F + (2 * M - P - 2) * pair) / 2,
    }.get(name, idle + M * (F + I + W))
    return idle / makespan if makespan else 0.0


def modelled_mfu(bubble: float, num_microbatches: int, run: Run = DEEPSEEK_V3) -> float:
    """Model FLOP utilisation if a published run had another bubble and M: `MFU_MODEL` says how, and what it assumes.

    Example:
        >>> round(modelled_mfu(2.06 / (19.926 - 0.29), 120), 3)  # its own bubble gives its own MFU
        0.389
    """
    share = num_microbatches / run.num_microbatches
    work = (run.step - run.bubble - run.optimizer) * share
    return run.mfu * run.step * share / (work / (1 - bubble) + run.optimizer)
