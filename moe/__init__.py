"""Mixture-of-experts layers in JAX: router, dispatch and combine over a mesh axis, grouped experts.

Knows nothing of pipelines. Names are looked up when first used, so that `moe.config` can be read without importing
jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe.config import MoEConfig
    from moe.layer import MoEStats, init_moe, moe

__all__ = ["MoEConfig", "moe", "init_moe", "MoEStats"]
_MODULE_OF = {"MoEConfig": "moe.config", "moe": "moe.layer", "init_moe": "moe.layer", "MoEStats": "moe.layer"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
