"""Measure the pipeline: `python run/bench.py step|bubble|memory|compile [--json]`. Ratios are of one run's figures."""

from __future__ import annotations

from typing import Annotated

import tyro

from dualpipe_jax.bench.bubble import Bubble
from dualpipe_jax.bench.step import Compile, Memory, Step
from dualpipe_jax.cli import fail
from dualpipe_jax.emulate import emulate_devices


def main() -> None:
    named = lambda name: tyro.conf.subcommand(name, prefix_name=False)  # noqa: E731
    command = tyro.cli(
        Annotated[Step, named("step")]  # type: ignore[arg-type]
        | Annotated[Bubble, named("bubble")]
        | Annotated[Memory, named("memory")]
        | Annotated[Compile, named("compile")],
        description=__doc__,
    )
    try:
        emulate_devices(command.ranks)
        command.run()
    except ValueError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
