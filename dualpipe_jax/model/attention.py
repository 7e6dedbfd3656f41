"""Causal self-attention over grouped heads, and the product that all attention goes through.

Shapes: B sequences, S tokens each, D model width, H query heads of width K, G key/value heads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dualpipe_jax.config import ModelConfig
from dualpipe_jax.model.layers import RMSNorm, scaled_normal
from dualpipe_jax.model.packing import Packing, positions, same_document
from dualpipe_jax.model.rope import rotary_table, rotate


class Attention(nnx.Module):
    """Rotary positions, query heads that share keys and values (Ainslie et al., GQA, 2023), optional norms of queries
    and keys before they are turned (Qwen3)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        d, width = config.d_model, config.head_width
        total = (config.num_heads + 2 * config.num_kv_heads) * width
        self.qkv = nnx.Param(scaled_normal(rngs.params(), (d, total), d))
        self.out = nnx.Param(scaled_normal(rngs.params(), (config.num_heads * width, d), config.num_heads * width))
        if config.qk_norm:
            self.q_norm = RMSNorm(width, config.norm_eps, rngs=rngs)
            self.k_norm = RMSNorm(width, config.norm_eps, rngs=rngs)

    def __call__(self, x: Float[Array, "B S D"], packing: Packing | None = None) -> Float[Array, "B S D"]:
        c = self.config
        heads = (x @ self.qkv[...]).reshape(*x.shape[:2], c.num_heads + 2 * c.num_kv_heads, -1)
        q, k, v = jnp.split(heads, [c.num_heads, c.num_heads + c.num_kv_heads], axis=2)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        table = rotary_table(positions(packing, x.shape[1]), c.head_width, c.rope_theta, c.yarn)
        mixed = attend(rotate(q, table), rotate(k, table), v, c.head_width**-0.5, packing)
        return mixed.reshape(*x.shape[:2], -1) @ self.out[...]


def attend(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G V"],
    scale: float,
    packing: Packing | None,
) -> Float[Array, "B S H V"]:
    """softmax(scale * q k^T) v over the tokens before, and itself, of the same document; softmax in float32."""
    width = v.shape[-1]
    # JAX wants one width. Zeros in keys change no score; zeros in values give columns that are cut off again.
    q, k, v = (_widened(a, max(width, q.shape[-1])) for a in (q, k, v))
    with jax.named_scope("attention"), jax.numpy_dtype_promotion("standard"):  # it promotes bfloat16 to float32 itself
        mixed = jax.nn.dot_product_attention(q, k, v, mask=same_document(packing), scale=scale, is_causal=True)
    return mixed[..., :width]


def _widened(x: Array, width: int) -> Array:
    return x if x.shape[-1] == width else jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])])
