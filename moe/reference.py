"""The oracle of `moe.layer`: every expert on every token, no exchange, float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe.config import MoEConfig
from moe.experts import swiglu
from moe.layer import Params
from moe.router import route


def dense_moe(params: Params, x: Float[Array, "B S D"], config: MoEConfig) -> Float[Array, "B S D"]:
    """The layer's output without capacity limits, by E dense experts and a one-hot sum."""
    tokens = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    routing = route(tokens, params["router"]["weight"], params["router"]["bias"], config)
    one_hot = jax.nn.one_hot(routing.topk_idx, config.num_experts, dtype=jnp.float32)
    share = jnp.sum(one_hot * routing.topk_weights[:, :, None], axis=1)
    gate, up = jnp.split(jnp.einsum("td,edf->etf", tokens, params["experts"]["gate_up"]), 2, axis=-1)
    y = jnp.einsum("etf,efd->etd", jax.nn.silu(gate) * up, params["experts"]["down"])
    out = jnp.einsum("etd,te->td", y, share)
    if config.num_shared_experts:
        shared = params["shared"]
        out = out + swiglu(tokens, shared["gate"], shared["up"], shared["down"])
    return out.reshape(x.shape)
