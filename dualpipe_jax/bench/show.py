"""How a measurement is told: as a JSON line, or a line for people."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from typing import Any


def show(options: Any, line: dict[str, Any], text: str) -> None:
    """Print one measurement.

    Args:
        options: of the measurement, with `json` and perhaps `sizes`.
        line: its figures; versions and sizes are added.
    """
    import jax

    versions = {"jax": jax.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    sizes = {"sizes": dataclasses.asdict(options.sizes)} if hasattr(options, "sizes") else {}
    print(json.dumps({**line, **sizes, "versions": versions}) if options.json else text, flush=True)
