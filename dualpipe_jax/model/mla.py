"""Multi-head latent attention: keys and values of all heads from one narrow vector a token.

References:
    DeepSeek-AI, DeepSeek-V2, 2024, section 2.1; DeepSeek-V3 Technical Report, 2024, section 2.1.1.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dualpipe_jax.config import ModelConfig
from dualpipe_jax.model.attention import attend
from dualpipe_jax.model.layers import RMSNorm, scaled_normal
from dualpipe_jax.model.packing import Packing, positions
from dualpipe_jax.model.rope import rotary_table, rotate, softmax_factor

INNER_EPS = 1e-6  # of the norms of latent vectors, whatever the model's eps, as published


class LatentAttention(nnx.Module):
    """Queries, keys and values through latent vectors; position in a part of its own (decoupled rotary embedding).

    A head's query and key are [without position | with position]; the part with position of the key is one for all
    heads and comes from the residual stream directly.

    Parameters (d model width, H heads, r and c the latent widths, n, p and v the widths of a head's parts): `q`
    [d, H(n+p)], or `q_down` [d, r], `q_norm`, `q_up` [r, H(n+p)]; `kv_down` [d, c+p], `kv_norm`, `kv_up` [c, H(n+v)];
    `out` [Hv, d].
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        assert config.mla is not None
        self.config, self.mla = config, config.mla
        mla, d, heads = config.mla, config.d_model, config.num_heads

        def matrix(fan_in: int, fan_out: int) -> nnx.Param:
            return nnx.Param(scaled_normal(rngs.params(), (fan_in, fan_out), fan_in))

        q_width = heads * (mla.qk_nope_dim + mla.qk_rope_dim)
        if mla.q_lora_rank is None:
            self.q = matrix(d, q_width)
        else:
            self.q_down = matrix(d, mla.q_lora_rank)
            self.q_norm = RMSNorm(mla.q_lora_rank, INNER_EPS, rngs=rngs)
            self.q_up = matrix(mla.q_lora_rank, q_width)
        self.kv_down = matrix(d, mla.kv_lora_rank + mla.qk_rope_dim)
        self.kv_norm = RMSNorm(mla.kv_lora_rank, INNER_EPS, rngs=rngs)
        self.kv_up = matrix(mla.kv_lora_rank, heads * (mla.qk_nope_dim + mla.v_dim))
        self.out = matrix(heads * mla.v_dim, d)

    def __call__(self, x: Float[Array, "B S D"], packing: Packing | None = None) -> Float[Array, "B S D"]:
        c, mla = self.config, self.mla
        latent, k_rope = jnp.split(x @ self.kv_down[...], [mla.kv_lora_rank], axis=-1)
        k_nope, v = self._heads(self.kv_norm(latent) @ self.kv_up[...], mla.qk_nope_dim)
        q_nope, q_rope = self._heads(self._queries(x), mla.qk_nope_dim)

        table = rotary_table(positions(packing, x.shape[1]), mla.qk_rope_dim, c.rope_theta, c.yarn)
        q_rope = rotate(q_rope, table, interleaved=mla.rope_interleaved)
        k_rope = rotate(k_rope[:, :, None, :], table, interleaved=mla.rope_interleaved)
        q = jnp.concatenate([q_nope, q_rope], axis=-1)
        k = jnp.concatenate([k_nope, jnp.broadcast_to(k_rope, q_rope.shape)], axis=-1)
        mixed = attend(q, k, v, q.shape[-1] ** -0.5 * softmax_factor(c.yarn), packing)
        return mixed.reshape(*x.shape[:2], -1) @ self.out[...]

    def _queries(self, x: Float[Array, "B S D"]) -> Float[Array, "B S HK"]:
        if self.mla.q_lora_rank is None:
            return x @ self.q[...]
        return self.q_norm(x @ self.q_down[...]) @ self.q_up[...]

    def _heads(self, x: Float[Array, "B S HK"], first: int) -> list[Float[Array, "B S H _"]]:
        """Cut into heads, and each into its first dims and the others."""
        return jnp.split(x.reshape(*x.shape[:2], self.config.num_heads, -1), [first], axis=-1)
