"""Look at schedules: `python run/schedule.py --schedule dualpipe --ranks 8 --microbatches 20`, or `--compare`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from dualpipe_jax.schedule import MOE_COSTS, Costs, Mode, Simulation, build, group, simulate
from dualpipe_jax.schedule.export import Row, chrome_trace, compare
from dualpipe_jax.schedule.render import draw_png, text_grid
from dualpipe_jax.schedule.text import format_schedule


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, exit code 2."""
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--schedule", default="dualpipe", help="1f1b, zb_v, dualpipe, auto, ...")
    add("--ranks", type=int, default=8)
    add("--microbatches", type=int, nargs="+", default=[20], help="several with --compare")
    add("--stages-per-rank", type=int, help="for interleaved_1f1b, zb_h1, wave, auto")
    add("--slot-rule", choices=["depth", "steady"], default="depth")
    add("--group", action="store_true", help="join neighbouring actions that may share a cell")
    add("--mode", choices=get_args(Mode), default="async", help="what couples the ranks")
    add(
        "--costs",
        type=float,
        nargs=3,
        metavar=("F", "I", "W"),
        default=[1.0, 1.0, 1.0],
        help="times of one stage (auto, --compare: of 1/P of the layers)",
    )
    add("--pair", type=float, help="cost of F and B in one cell; default their sum")
    add("--transfer", type=float, default=0.0, help="time of a message")
    add("--moe-costs", action="store_true", help="costs in which actions hide each other's communication")
    add("--compare", action="store_true", help="table of all schedules")
    add("--json", action="store_true", help="print figures as one JSON object, and nothing else")
    add("--csv", type=Path, help="write the order, one line a rank, as torch.distributed.pipelining reads it")
    add("--png", type=Path, help="write a Gantt chart")
    add("--svg", type=Path, help="write a Gantt chart")
    add("--trace", type=Path, help="write Chrome trace events (open in Perfetto)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print or write what the arguments ask for; 2 where they are wrong."""
    args = _parser().parse_args(argv)
    try:
        costs = MOE_COSTS if args.moe_costs else _costs(args)
        if args.compare:
            _print_comparison(compare(args.ranks, args.microbatches, costs, args.mode), args.json)
            return 0
        simulation = _simulate(args, costs)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _write(simulation, args)
    if args.json:
        print(json.dumps(simulation.summary()))
    else:
        _print(simulation)
    return 0


def _costs(args: argparse.Namespace) -> Costs:
    forward, backward_input, backward_weight = args.costs
    return Costs(forward, backward_input, backward_weight, pair=args.pair, transfer=args.transfer)


def _simulate(args: argparse.Namespace, costs: Costs) -> Simulation:
    if len(args.microbatches) > 1:
        raise ValueError("several --microbatches need --compare")
    options: dict[str, Any] = {} if args.stages_per_rank is None else {"stages_per_rank": args.stages_per_rank}
    if args.schedule == "auto":
        options |= {"costs": costs, "mode": args.mode}
    schedule = build(
        args.schedule,
        num_ranks=args.ranks,
        num_microbatches=args.microbatches[0],
        slot_rule=args.slot_rule,
        **options,
    )
    if args.schedule == "auto":
        costs = costs.for_stages(args.ranks, schedule.placement.num_stages)
    return simulate(group(schedule) if args.group else schedule, costs, args.mode)


def _write(simulation: Simulation, args: argparse.Namespace) -> None:
    if args.csv:
        args.csv.write_text(format_schedule(simulation.schedule, ",") + "\n")
    if args.trace:
        args.trace.write_text(chrome_trace(simulation))
    for path in (args.png, args.svg):
        if path:
            draw_png(simulation, path)


def _print(simulation: Simulation) -> None:
    print(text_grid(simulation.schedule, colour=sys.stdout.isatty()))
    summary = simulation.summary()
    print(
        f"{summary['schedule']}: makespan {summary['makespan']:g} ({summary['mode']}), "
        f"bubble {100 * summary['bubble_fraction']:.2f}% of P x makespan, "
        f"at most {summary['peak_activations']} activations and {summary['pending_weight_max']} W put off"
    )


def _print_comparison(rows: list[Row], as_json: bool) -> None:
    if as_json:
        print(json.dumps([vars(row) for row in rows]))
        return
    print(f"{'schedule':<17}{'M':>5}{'bubble':>9}{'idle':>9}{'formula':>9}{'peak':>8}{'copies':>8}{'transfers':>11}")
    for r in rows:
        formula = "-" if r.formula is None else f"{100 * r.formula:.2f}%"
        print(
            f"{r.schedule:<17}{r.microbatches:>5}{100 * r.bubble:>8.2f}%{100 * r.largest_idle:>8.2f}%{formula:>9}"
            f"{r.peak:>8g}{r.copies:>8}{r.transfers:>11}"
        )
    print("bubble: 1 - work / (P x makespan). idle: largest of any rank / makespan. formula: as articles quote it.")


if __name__ == "__main__":
    sys.exit(main())
