"""Train mixture-of-experts language models in JAX with bidirectional, near-zero-bubble pipeline schedules.

The public names are looked up when first used, so that importing this package does not import jax: a program can still
set up emulated devices (`dualpipe_jax.emulate`).
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualpipe_jax.dropout import dropout_key, dropout_leaves
    from dualpipe_jax.executor import (
        Aux,
        LastOutput,
        PipelineParams,
        StageFns,
        StageOutput,
        make_mesh,
        pipeline_value_and_grad,
        stack_stages,
        unstack_stages,
    )
    from dualpipe_jax.hand_written import hand_written
    from dualpipe_jax.non_finite import find_non_finite
    from dualpipe_jax.reference import reference_value_and_grad
    from dualpipe_jax.schedule import build, simulate
    from dualpipe_jax.split_report import split_report
    from dualpipe_jax.split_vjp import split_vjp

_HOME = {
    "dualpipe_jax.executor": (
        "pipeline_value_and_grad",
        "PipelineParams",
        "Aux",
        "StageFns",
        "StageOutput",
        "LastOutput",
        "make_mesh",
        "stack_stages",
        "unstack_stages",
    ),
    "dualpipe_jax.schedule": ("build", "simulate"),
    "dualpipe_jax.split_vjp": ("split_vjp",),
    "dualpipe_jax.split_report": ("split_report",),
    "dualpipe_jax.hand_written": ("hand_written",),
    "dualpipe_jax.dropout": ("dropout_key", "dropout_leaves"),
    "dualpipe_jax.non_finite": ("find_non_finite",),
    "dualpipe_jax.reference": ("reference_value_and_grad",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "pipeline_value_and_grad",
    "PipelineParams",
    "Aux",
    "StageFns",
    "StageOutput",
    "LastOutput",
    "make_mesh",
    "stack_stages",
    "unstack_stages",
    "build",
    "simulate",
    "split_vjp",
    "split_report",
    "hand_written",
    "dropout_key",
    "dropout_leaves",
    "find_non_finite",
    "reference_value_and_grad",
]


class _Package(ModuleType):
    """Keeps a function's name for the function: importing a module of that name would take it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
