"""Transformer blocks: attention, then a dense SwiGLU or a mixture of experts, each behind a norm and a skip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from dualpipe_jax.config import ModelConfig
from dualpipe_jax.model.attention import Attention
from dualpipe_jax.model.layers import RMSNorm, SwiGLU
from dualpipe_jax.model.mla import LatentAttention
from dualpipe_jax.model.packing import Packing
from moe.layer import MoEStats, init_moe, moe


def attention(config: ModelConfig, *, rngs: nnx.Rngs) -> Attention | LatentAttention:
    """The kind of attention that the configuration asks for."""
    return (Attention if config.mla is None else LatentAttention)(config, rngs=rngs)


def norm(config: ModelConfig, *, rngs: nnx.Rngs) -> RMSNorm:
    """Of the residual stream."""
    return RMSNorm(config.d_model, config.norm_eps, rngs=rngs)


class DenseBlock(nnx.Module):
    """x + attention(norm(x)), then x + swiglu(norm(x))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = norm(config, rngs=rngs)
        self.attention = attention(config, rngs=rngs)
        self.ffn_norm = norm(config, rngs=rngs)
        self.ffn = SwiGLU(config, rngs=rngs)

    def __call__(self, x: Float[Array, "B S D"], packing: Packing | None = None) -> Float[Array, "B S D"]:
        x = x + self.attention(self.attention_norm(x), packing)
        return x + self.ffn(self.ffn_norm(x))


@dataclass(frozen=True)
class MoEBlockConfig:
    """A model's configuration and the mesh axis over which experts are sharded (None: all are here)."""

    model: ModelConfig
    axis: str | None


class MoEBlock(nnx.Module):
    """x + attention(norm(x)), then x + moe(norm(x)); also returns the router's statistics."""

    def __init__(self, config: MoEBlockConfig, *, rngs: nnx.Rngs) -> None:
        model = config.model
        assert model.moe is not None
        self.experts, self.axis = model.moe, config.axis
        self.attention_norm = norm(model, rngs=rngs)
        self.attention = attention(model, rngs=rngs)
        self.ffn_norm = norm(model, rngs=rngs)
        self.moe = nnx.Dict(_as_params(init_moe(rngs.params(), model.d_model, self.experts)))

    def __call__(
        self, x: Float[Array, "B S D"], packing: Packing | None = None
    ) -> tuple[Float[Array, "B S D"], MoEStats]:
        x = x + self.attention(self.attention_norm(x), packing)
        params: Any = jax.tree.map(
            lambda p: p[...], nnx.to_pure_dict(nnx.state(self.moe)), is_leaf=lambda p: isinstance(p, nnx.Variable)
        )
        y, stats = moe(params, self.ffn_norm(x), self.experts, self.axis)
        return x + y, stats


def _as_params(tree: Any) -> Any:
    if isinstance(tree, dict):
        return nnx.Dict({k: _as_params(v) for k, v in tree.items()})
    return nnx.Param(tree)
