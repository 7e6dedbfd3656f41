"""Presets: named starting points that flags change. Each file here has one function, `config() -> Config`."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from configs import (
    debug_one_device,
    deepseek_v2_lite_16b,
    deepseek_v3_671b,
    eight_device,
    mixtral_8x7b,
    qwen3_moe_30b_a3b,
    tiny_cpu,
)
from dualpipe_jax.config import Config

PRESETS: dict[str, Callable[[], Config]] = {
    "tiny_cpu": tiny_cpu.config,
    "eight_device": eight_device.config,
    "debug_one_device": debug_one_device.config,
    "deepseek_v3_671b": deepseek_v3_671b.config,
    "deepseek_v2_lite_16b": deepseek_v2_lite_16b.config,
    "mixtral_8x7b": mixtral_8x7b.config,
    "qwen3_moe_30b_a3b": qwen3_moe_30b_a3b.config,
}
DEFAULT = "tiny_cpu"


def get(name: str) -> Config:
    """The preset of this name.

    Raises:
        ValueError: there is none; names the nearest, or all.

    Example:
        >>> get("tiny_cpu").pipeline.schedule
        'dualpipe'
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose one of them."
        raise ValueError(f"no preset {name!r} among {', '.join(PRESETS)}; {hint}")
    return PRESETS[name]()
