"""The layer: router, dispatch, experts, combine, and the shared experts beside them; a pure function of arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from moe.config import MoEConfig
from moe.dispatch import capacity_rows, combine, dispatch, layout
from moe.experts import experts, swiglu
from moe.router import expert_counts, mask_routing, route, sequence_balance_loss, z_loss

Params = dict[str, Any]


class MoEStats(NamedTuple):
    """Of one call, over this shard's tokens; sums, so that they add up over shards and microbatches.

    Attributes:
        counts: assignments of each expert by valid tokens, before drops. dropped: assignments that found no room.
        balance_loss: sum over sequences. z_loss: sum over tokens.
    """

    counts: Int32[Array, " E"]
    dropped: Int32[Array, ""]
    balance_loss: Float[Array, ""]
    z_loss: Float[Array, ""]


def init_moe(key: jax.Array, d_model: int, config: MoEConfig) -> Params:
    """Fresh float32 parameters, normal of standard deviation 1/sqrt(fan in).

    `{"router": {"weight": [D, E], "bias": [E]}, "experts": {"gate_up": [E, D, 2F], "down": [E, F, D]}}`, and with n
    shared experts `"shared": {"gate": [D, nF], "up": [D, nF], "down": [nF, D]}`. On a mesh, the leaves under "experts"
    are sharded over the expert axis along their first dim.
    """
    keys = jax.random.split(key, 6)
    e, f = config.num_experts, config.d_ff

    def normal(key: jax.Array, *shape: int) -> Array:
        return jax.random.normal(key, shape, jnp.float32) / shape[-2] ** 0.5

    params: Params = {
        "router": {"weight": normal(keys[0], d_model, e), "bias": jnp.zeros(e, jnp.float32)},
        "experts": {"gate_up": normal(keys[1], e, d_model, 2 * f), "down": normal(keys[2], e, f, d_model)},
    }
    if config.num_shared_experts:
        wide = config.num_shared_experts * f
        params["shared"] = {
            "gate": normal(keys[3], d_model, wide),
            "up": normal(keys[4], d_model, wide),
            "down": normal(keys[5], wide, d_model),
        }
    return params


def moe(
    params: Params,
    x: Float[Array, "B S D"],
    config: MoEConfig,
    axis: str | None = None,
    valid: Bool[Array, "B S"] | None = None,
) -> tuple[Float[Array, "B S D"], MoEStats]:
    """y = shared(x) + sum over the chosen experts of weight * expert(x).

    Args:
        params: as `init_moe` makes them, but for the router cast to the dtype of x; under `shard_map` with `axis`,
            "experts" holds this rank's experts only.
        x: B sequences of S tokens, this shard's; float32 or bfloat16.
        axis: mesh axis over which experts are sharded and tokens exchanged; None: all experts are here.
        valid: false for padding, which goes to no routed expert and counts in no statistic; None: all are valid.

    Raises:
        ValueError: if num_experts is no multiple of the axis' size.
    """
    sequences, length, width = x.shape
    tokens = x.reshape(-1, width)
    ranks = 1 if axis is None else jax.lax.axis_size(axis)
    axis = axis if ranks > 1 else None
    with jax.named_scope("router"):
        routing = route(tokens, params["router"]["weight"], params["router"]["bias"], config)
        if valid is not None:
            routing = mask_routing(routing, valid.reshape(-1))
        capacity = capacity_rows(tokens.shape[0], config.top_k, ranks, config.capacity_factor)
        handle = layout(routing.topk_idx, config.num_experts, ranks, capacity)
    with jax.named_scope("dispatch"):
        received = dispatch(tokens, routing.topk_weights, handle, axis)
    y = experts(received, params["experts"]["gate_up"], params["experts"]["down"], config.block_size)
    with jax.named_scope("combine"):
        y = combine(y, handle, axis)
    if config.num_shared_experts:
        shared = params["shared"]
        y = y + swiglu(tokens, shared["gate"], shared["up"], shared["down"])
    stats = MoEStats(
        expert_counts(routing.topk_idx, config.num_experts),
        handle.dropped,
        sequence_balance_loss(routing, sequences),
        z_loss(routing),
    )
    return y.reshape(sequences, length, width), stats
