"""What a mixture-of-experts layer is: sizes, routing rule, losses, capacity. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MoEConfig:
    """One mixture-of-experts layer.

    Attributes:
        d_ff: hidden width of a routed expert, and of each shared expert.
        num_experts: routed experts, over all ranks.
        top_k: routed experts a token goes to.
        num_shared_experts: experts that every token goes to; they run as one dense SwiGLU of num_shared_experts *
        d_ff.
        scoring: of logits: softmax over experts, or sigmoid of each (DeepSeek-V3).
        normalize_weights: divide the chosen experts' scores by their sum.
        route_scale: factor on the weights.
        num_groups, top_groups: experts are ranked within the best `top_groups` of `num_groups` groups only.
        bias_rate: step of the aux-loss-free load balancing; 0: no bias.
        balance_loss_weight: of the sequence-wise balance loss.
        z_loss_weight: of the mean squared logsumexp of the logits.
        capacity_factor: rows that a rank may send to another, relative to an even spread; none: no token is dropped.
        block_size: rows of a block of the grouped matmul; each expert's rows are padded to a multiple.
    """

    d_ff: int = 128
    num_experts: int = 8
    top_k: int = 2
    num_shared_experts: int = 1
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize_weights: bool = True
    route_scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    bias_rate: float = 1e-3
    balance_loss_weight: float = 1e-4
    z_loss_weight: float = 0.0
    capacity_factor: float | None = None
    block_size: int = 16

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise ValueError("; ".join(problems))


def _problems(c: MoEConfig) -> list[str]:
    """What is wrong, each with the nearest valid value."""
    found = []
    for name in ("d_ff", "num_experts", "top_k", "num_groups", "top_groups", "block_size"):
        if getattr(c, name) < 1:
            found.append(f"moe.{name}={getattr(c, name)} must be at least 1; the nearest valid value is 1")
    if found:
        return found
    if c.num_shared_experts < 0:
        found.append(f"moe.num_shared_experts={c.num_shared_experts} must be at least 0; the nearest valid value is 0")
    if c.num_experts % c.num_groups:
        nearest = min((g for g in range(1, c.num_experts + 1) if c.num_experts % g == 0), key=_distance(c.num_groups))
        found.append(
            f"moe.num_experts={c.num_experts} must be a multiple of moe.num_groups={c.num_groups}; "
            f"the nearest valid num_groups is {nearest}"
        )
    if c.top_groups > c.num_groups:
        found.append(
            f"moe.top_groups={c.top_groups} must be at most moe.num_groups={c.num_groups}; "
            f"the nearest valid value is {c.num_groups}"
        )
    eligible = c.num_experts // c.num_groups * min(c.top_groups, c.num_groups)
    if c.top_k > eligible:
        found.append(
            f"moe.top_k={c.top_k} must be at most the {eligible} experts of the chosen groups; "
            f"the nearest valid value is {eligible}"
        )
    if c.scoring not in ("softmax", "sigmoid"):
        found.append(f"moe.scoring={c.scoring!r} must be 'softmax' or 'sigmoid'")
    for name in ("bias_rate", "balance_loss_weight", "z_loss_weight"):
        value = getattr(c, name)
        if not (value >= 0 and math.isfinite(value)):
            found.append(f"moe.{name}={value} must be finite and at least 0; the nearest valid value is 0")
    if c.capacity_factor is not None and not (c.capacity_factor > 0 and math.isfinite(c.capacity_factor)):
        found.append(f"moe.capacity_factor={c.capacity_factor} must be finite and above 0; 1.0 is an even spread")
    if c.top_k == 1 and c.normalize_weights and not (c.balance_loss_weight or c.z_loss_weight):
        found.append(
            "moe.top_k=1 with normalize_weights makes every weight 1, and without balance_loss_weight or z_loss_weight "
            "the router gets no gradient; the nearest valid setting is normalize_weights=False"
        )
    return found


def _distance(value: int) -> Callable[[int], int]:
    return lambda candidate: abs(candidate - value)
