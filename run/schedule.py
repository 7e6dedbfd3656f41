"""Look at schedules: `python run/schedule.py --schedule dualpipe --ranks 8 --microbatches 20`, or `--compare`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from dualpipe_jax.schedule import MOE_COSTS, Costs, Memory, Mode, Simulation, build, group, simulate
from dualpipe_jax.schedule.comparison import MFU_MODEL, Row, compare
from dualpipe_jax.schedule.export import chrome_trace, comparison_page, schedule_page
from dualpipe_jax.schedule.render import draw_comparison, draw_png, text_grid
from dualpipe_jax.schedule.report import Bytes, report
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
    add(
        "--bytes",
        type=float,
        nargs="+",
        metavar="BYTES",
        help="of one microbatch through 1/P of the layers: kept from F to I, and from I to W (default: as much)",
    )
    add("--memory-limit", type=float, help="for auto, of a rank: activations, or bytes where --bytes is given")
    add("--compare", action="store_true", help="table of all schedules; --png, --svg, --html: also a chart")
    add("--json", action="store_true", help="print figures as one JSON object, and nothing else")
    add("--csv", type=Path, help="write the order, one line a rank, as torch.distributed.pipelining reads it")
    add("--png", type=Path, help="write a Gantt chart")
    add("--svg", type=Path, help="write a Gantt chart")
    add("--html", type=Path, help="write one interactive page, which needs no network")
    add("--trace", type=Path, help="write Chrome trace events (open in Perfetto)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print or write what the arguments ask for; 2 where they are wrong."""
    args = _parser().parse_args(argv)
    try:
        costs = MOE_COSTS if args.moe_costs else _costs(args)
        if args.compare:
            _compare(args, costs)
            return 0
        sizes = _bytes(args)
        simulation = _simulate(args, costs, sizes)
        figures = report(simulation, sizes)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _write(simulation, args)
    if args.json:
        print(json.dumps(figures))
    else:
        _print(simulation, figures)
    return 0


def _costs(args: argparse.Namespace) -> Costs:
    forward, backward_input, backward_weight = args.costs
    return Costs(forward, backward_input, backward_weight, pair=args.pair, transfer=args.transfer)


def _bytes(args: argparse.Namespace) -> Bytes | None:
    if args.bytes is None:
        return None
    if len(args.bytes) > 2:
        raise ValueError(f"--bytes takes one or two numbers, not {len(args.bytes)}; nearest valid: 2")
    return Bytes(*args.bytes)


def _simulate(args: argparse.Namespace, costs: Costs, sizes: Bytes | None) -> Simulation:
    if len(args.microbatches) > 1:
        raise ValueError("several --microbatches need --compare")
    options: dict[str, Any] = {} if args.stages_per_rank is None else {"stages_per_rank": args.stages_per_rank}
    if args.schedule == "auto":
        options |= {"costs": costs, "mode": args.mode, "memory": _memory(args, sizes)}
    elif args.memory_limit is not None:
        raise ValueError("--memory-limit is for --schedule auto")
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


def _memory(args: argparse.Namespace, sizes: Bytes | None) -> Memory | None:
    if args.memory_limit is None:
        return None
    if sizes is None:
        return Memory(args.memory_limit)
    # auto has 4 stages a rank unless told otherwise
    return sizes.memory(1, args.stages_per_rank or 4, args.memory_limit)


def _write(simulation: Simulation, args: argparse.Namespace) -> None:
    if args.csv:
        args.csv.write_text(format_schedule(simulation.schedule, ",") + "\n")
    if args.trace:
        args.trace.write_text(chrome_trace(simulation))
    if args.html:
        args.html.write_text(schedule_page(simulation), encoding="utf-8")
    for path in (args.png, args.svg):
        if path:
            draw_png(simulation, path)


def _print(simulation: Simulation, figures: dict[str, Any]) -> None:
    print(text_grid(simulation.schedule, colour=sys.stdout.isatty()))
    print(
        f"{figures['schedule']}: makespan {figures['makespan']:g} ({figures['mode']}), "
        f"bubble {100 * figures['bubble_fraction']:.2f}% of P x makespan, "
        f"at most {figures['peak_activations']} activations and {figures['pending_weight_max']} W put off"
    )
    if "peak_bytes" in figures:
        print(f"at most {figures['peak_bytes']:g} bytes kept on a rank")
    print("the lowered table, by what couples the ranks:")
    for mode, s in figures["modes"].items():
        print(
            f"{mode:>12} {s['makespan']:>9g}  bubble {100 * s['bubble_fraction']:>5.2f}%  {s['over_async']:.3f} x async"
        )


def _compare(args: argparse.Namespace, costs: Costs) -> None:
    if args.csv or args.trace:
        raise ValueError("--csv and --trace write one schedule; leave out --compare")
    rows = compare(args.ranks, args.microbatches, costs, args.mode)
    words = _words(args, costs)
    for path in (args.png, args.svg):
        if path:
            draw_comparison(rows, args.ranks, words, path)
    if args.html:
        args.html.write_text(comparison_page(rows, args.ranks, words), encoding="utf-8")
    if args.json:
        print(json.dumps({"ranks": args.ranks, "mode": args.mode, "rows": [vars(row) for row in rows]}))
    else:
        _print_comparison(rows)


def _words(args: argparse.Namespace, costs: Costs) -> str:
    """What was simulated, for titles."""
    words = f"F, I, W = {costs.forward:g}, {costs.backward_input:g}, {costs.backward_weight:g}"
    if costs.forward_input is not None:
        words += f", F+I, F+W, I+W = {costs.forward_input:g}, {costs.forward_weight:g}, {costs.input_weight:g}"
    if costs.pair is not None:
        words += f", F+I+W = {costs.pair:g}"
    return f"{words}, transfer {costs.transfer:g} ({args.mode})"


def _print_comparison(rows: list[Row]) -> None:
    with_mfu = any(r.mfu is not None for r in rows)
    titles = "".join(f"{title:>9}" for title in ("bubble", "idle", "exact", "simple"))
    titles = f"{'schedule':<17}{'M':>5}{titles}{'peak':>8}{'copies':>8}{'transfers':>11}"
    print(titles + (f"{'MFU*':>8}" if with_mfu else ""))
    for r in rows:
        shares = "".join(f"{_percent(x):>9}" for x in (r.bubble, r.largest_idle, r.exact, r.formula))
        mfu = f"{_percent(r.mfu, 1):>8}" if with_mfu else ""
        print(f"{r.schedule:<17}{r.microbatches:>5}{shares}{r.peak:>8g}{r.copies:>8}{r.transfers:>11}{mfu}")
    print("bubble: 1 - work / (P x makespan). idle: largest of any rank / makespan; exact: the same by formula.")
    print("simple: as articles quote it. peak: activations of one microbatch through 1/P of the layers.")
    if with_mfu:
        print("*" + "\n ".join(MFU_MODEL))


def _percent(share: float | None, digits: int = 2) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f}%"


if __name__ == "__main__":
    sys.exit(main())
