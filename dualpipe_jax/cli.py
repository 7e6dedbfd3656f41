"""The command line: a preset, and flags that change it. Imports no jax, so that devices can be emulated afterwards."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Annotated, Literal, NoReturn

import tyro

import configs
from dualpipe_jax.config import Config

USAGE_ERROR = 2  # the exit status of a wrong command line, by convention


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """Train a mixture-of-experts language model with a bidirectional pipeline.

    Without a flag: a small model on text that comes with Python, on 8 emulated CPU devices.

    Attributes:
        preset: the values that the flags below start from.
        config: the run.
    """

    preset: Literal[tuple(configs.PRESETS)]  # type: ignore[valid-type]
    config: Annotated[Config, tyro.conf.arg(name="")]


def parse_cli(argv: Sequence[str] | None = None) -> Config:
    """The configuration that a command line asks for: `--preset NAME` first, then the other flags over it.

    Args:
        argv: arguments without the program's name; default those of this process.

    Raises:
        SystemExit: status 0 after `--help`; status 2 after one message on stderr about a wrong flag or value.

    Example:
        >>> parse_cli(["--pipeline.schedule", "dualpipe_v", "--train.steps", "50"]).train.steps
        50
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        preset = _preset_name(argv)
        arguments = tyro.cli(
            _Arguments,
            args=argv,
            default=_Arguments(preset, configs.get(preset)),
            config=(tyro.conf.AvoidSubcommands,),
        )
    except ValueError as error:
        fail(str(error))
    return arguments.config


def fail(message: str) -> NoReturn:
    """Say what is wrong with the command line or the configuration, and end with status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(USAGE_ERROR)


def _preset_name(argv: Sequence[str]) -> str:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--preset", default=configs.DEFAULT)
    try:
        return parser.parse_known_args(argv)[0].preset
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
