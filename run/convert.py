"""Hugging Face checkpoints in and out: `python run/convert.py import --source FOLDER --train.run-dir runs/mine`, and
`python run/convert.py export --run-dir runs/mine --target FOLDER`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from dualpipe_jax.cli import fail, parse_cli


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    importing = commands.add_parser(
        "import",
        allow_abbrev=False,
        help="a run folder at step 0 from a checkpoint; flags as of run/train.py set the run",
    )
    importing.add_argument("--source", required=True, help="folder with config.json and safetensors")
    importing.add_argument("--skip-mtp", action="store_true", help="leave out multi-token prediction's tensors")
    export = commands.add_parser("export", allow_abbrev=False, help="a checkpoint from a run folder")
    export.add_argument("--run-dir", required=True, help="of run/train.py, or imported")
    export.add_argument("--target", required=True, help="folder to write; must hold no safetensors yet")
    export.add_argument("--step", type=int, help="of the run's checkpoint; default the newest")
    export.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default that of the source")
    export.add_argument("--shard-gb", type=float, default=2.0, help="size of a file, in 10^9 bytes (default: 2)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; exit with 2 and one message where the arguments or the folders are wrong."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if args.command == "export" and rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    os.environ["JAX_PLATFORMS"] = "cpu"  # parameters pass through as they are: no accelerator is needed, or taken
    try:
        _import(args, rest) if args.command == "import" else _export(args)
    except (ValueError, OSError) as error:
        fail(str(error))
    return 0


def _import(args: argparse.Namespace, rest: list[str]) -> None:
    config = parse_cli(rest)
    from dualpipe_jax.hf.run_folder import import_run  # imports jax, which must see the platform

    import_run(args.source, config, skip_mtp=args.skip_mtp)
    print(f"{args.source} is step 0 of the run {config.train.run_dir}")


def _export(args: argparse.Namespace) -> None:
    if not args.shard_gb > 0:
        raise ValueError(f"--shard-gb={args.shard_gb} must be above 0; the default is 2")
    from dualpipe_jax.hf.run_folder import export_run

    shard_bytes = int(args.shard_gb * 1e9)
    step = export_run(args.run_dir, args.target, step=args.step, dtype=args.dtype, shard_bytes=shard_bytes)
    print(f"{args.target} has step {step} of the run {args.run_dir}")


if __name__ == "__main__":
    sys.exit(main())
