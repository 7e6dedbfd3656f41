"""Building blocks: RMS norm, rotary attention, SwiGLU, embedding and head, as flax nnx modules.

Shapes: B sequences, S tokens each, D model width, H heads of width K, G key/value heads.
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

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        del rngs
        self.eps = config.norm_eps
        self.scale = nnx.Param(jnp.ones(config.d_model, jnp.float32))

    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (normed * self.scale[...].astype(jnp.float32)[None, None]).astype(x.dtype)


def rotate(x: Float[Array, "B S H K"], theta: float) -> Float[Array, "B S H K"]:
    """Rotary position embedding over the two halves of K (Su et al., RoFormer, 2021, section 3.2.2).

    Angle of pair i at position t: t * theta^(-2i/K). Positions count from the start of each row.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency[None, :]
    cos, sin = (f(angle)[None, :, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions and grouped key/value heads."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        d, width = config.d_model, config.d_model // config.num_heads
        total = (config.num_heads + 2 * config.num_kv_heads) * width
        self.qkv = nnx.Param(scaled_normal(rngs.params(), (d, total), d))
        self.out = nnx.Param(scaled_normal(rngs.params(), (config.num_heads * width, d), config.num_heads * width))

    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        c = self.config
        heads = (x @ self.qkv[...]).reshape(*x.shape[:2], c.num_heads + 2 * c.num_kv_heads, -1)
        q, k, v = jnp.split(heads, [c.num_heads, c.num_heads + c.num_kv_heads], axis=2)
        q, k = rotate(q, c.rope_theta), rotate(k, c.rope_theta)
        with jax.named_scope("attention"):
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return mixed.reshape(*x.shape[:2], -1) @ self.out[...]


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
        self.norm = RMSNorm(config, rngs=rngs)
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
