"""Building blocks: RMS norm, SwiGLU, embedding and head, as flax nnx modules.

Shapes: B sequences, S tokens each, D model width, V token ids.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dualpipe_jax.config import ModelConfig
from moe.experts import swiglu


def scaled_normal(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> Array:
    """Float32 normal weights of standard deviation 1/sqrt(fan_in)."""
    return jax.random.normal(key, shape, jnp.float32) / fan_in**0.5


class RMSNorm(nnx.Module):
    """y = x / sqrt(mean(x^2) + eps) * scale, computed in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int, eps: float, *, rngs: nnx.Rngs) -> None:
        del rngs
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        return (normed * scale).astype(x.dtype)


class SwiGLU(nnx.Module):
    """y = (silu(x W_gate) * (x W_up)) W_down (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        d, f = config.d_model, config.d_ff
        self.gate = nnx.Param(scaled_normal(rngs.params(), (d, f), d))
        self.up = nnx.Param(scaled_normal(rngs.params(), (d, f), d))
        self.down = nnx.Param(scaled_normal(rngs.params(), (f, d), f))

    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        return swiglu(x, self.gate[...], self.up[...], self.down[...])


class Embedding(nnx.Module):
    """A table of token vectors, standard deviation 0.02 as in the DeepSeek-V3 report (section 4.2: 0.006 at 671B)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        table = 0.02 * jax.random.normal(rngs.params(), (config.vocab_size, config.d_model), jnp.float32)
        self.table = nnx.Param(table)

    def __call__(self, tokens: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        return jnp.take(self.table[...], tokens, axis=0)


class Head(nnx.Module):
    """Final norm and output projection; with tied embeddings the projection is the embedding's table, handed in."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.norm = RMSNorm(config.d_model, config.norm_eps, rngs=rngs)
        d = config.d_model
        if not config.tied_embeddings:
            # Half the usual size: the first loss is near that of a uniform guess, log(vocab_size). Much smaller learns
            # slower.
            self.projection = nnx.Param(0.5 * scaled_normal(rngs.params(), (d, config.vocab_size), d))

    def __call__(self, x: Float[Array, "B S D"], table: Float[Array, "V D"] | None) -> Float[Array, "B S V"]:
        """Logits in float32."""
        h = self.norm(x)
        weight = self.projection[...] if table is None else table.T
        return jnp.matmul(h, weight, preferred_element_type=jnp.float32)
