"""Multi-token prediction of depth 1: one more layer behind the last predicts the token after the next.

Embedding and output matrix are the model's own. The layer runs where the head does.

References:
    DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 2.2. The order of the projection's two inputs is that of
    the published weights (`eh_proj`: embedding, then hidden state), not of the report's formula.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dualpipe_jax.model.block import DenseBlock, MoEBlock, MoEBlockConfig, norm
from dualpipe_jax.model.layers import scaled_normal
from dualpipe_jax.model.packing import Packing
from moe.layer import MoEStats

PyTree = Any


class SecondToken(nnx.Module):
    """block(projection [norm(embedding of the next token), norm(hidden state)]), and a norm for the head behind it.

    The hidden state is the last layer's, before the model's final norm.
    """

    def __init__(self, config: MoEBlockConfig, *, rngs: nnx.Rngs) -> None:
        model, d = config.model, config.model.d_model
        self.token_norm = norm(model, rngs=rngs)
        self.hidden_norm = norm(model, rngs=rngs)
        self.projection = nnx.Param(scaled_normal(rngs.params(), (2 * d, d), 2 * d))
        self.block = MoEBlock(config, rngs=rngs) if model.moe else DenseBlock(model, rngs=rngs)
        self.norm = norm(model, rngs=rngs)

    def __call__(
        self, hidden: Float[Array, "B S D"], following: Float[Array, "B S D"], packing: Packing | None = None
    ) -> tuple[Float[Array, "B S D"], MoEStats | None]:
        """The hidden state for the head, before its norm, and the router's statistics if there is one.

        Args:
            hidden: of each token. following: the embedding of the token behind it.
        """
        both = jnp.concatenate([self.token_norm(following), self.hidden_norm(hidden)], axis=-1)
        out = self.block(both @ self.projection[...], packing)
        return out if isinstance(out, tuple) else (out, None)


def second_targets(microbatch: PyTree) -> tuple[jax.Array, jax.Array]:
    """(targets, weights) of the token after the next: those of the next position, where it is in the same document.

    A loss so weighted is divided by the number of first targets, as in the report's formula (24).
    """
    targets, weights = microbatch["targets"], microbatch["weights"]
    valid = jnp.arange(targets.shape[1])[None, :] < targets.shape[1] - 1
    if "segments" in microbatch:
        segments = microbatch["segments"]
        valid = valid & (jnp.roll(segments, -1, axis=1) == segments)
    return jnp.where(valid, jnp.roll(targets, -1, axis=1), -1), jnp.roll(weights, -1, axis=1)
