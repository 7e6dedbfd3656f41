"""Rotary position embedding, in either order of pairs, with or without YaRN, from the start of each row or segment.

References:
    Su et al., RoFormer, 2021, section 3.2.2. Peng et al., YaRN: Efficient Context Window Extension, 2023, section 3.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dualpipe_jax.config import YarnConfig


class RotaryTable(NamedTuple):
    """Cosine and sine of each pair's angle at each position, float32."""

    cos: Float[Array, "#B S half"]
    sin: Float[Array, "#B S half"]


def rotary_table(
    positions: Int[Array, "#B S"], width: int, theta: float, yarn: YarnConfig | None = None
) -> RotaryTable:
    """Angle of pair i at position t: t * frequency_i; both tables times YaRN's factor of attention, where there is one.

    Args:
        width: of the heads' part that is turned; twice the number of pairs.
    """
    half = width // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if yarn is not None:
        kept = jnp.asarray(unstretched_share(width, theta, yarn))
        frequency = frequency * (kept + (1.0 - kept) / yarn.factor)
    angle = positions.astype(jnp.float32)[:, :, None] * frequency[None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if yarn is not None and (factor := table_factor(yarn)) != 1.0:
        cos, sin = cos * factor, sin * factor
    return RotaryTable(cos, sin)


def rotate(x: Float[Array, "B S H K"], table: RotaryTable, *, interleaved: bool = False) -> Float[Array, "B S H K"]:
    """Turn the pairs of K: dims (i, i + K/2), or (2i, 2i + 1) if interleaved.

    The result has the pairs' first dims, then their second ones, in both cases: products of queries and keys turned
    alike do not depend on the order.
    """
    half = x.shape[-1] // 2
    cos, sin = (t[:, :, None, :].astype(x.dtype) for t in table)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def unstretched_share(width: int, theta: float, yarn: YarnConfig) -> Float[np.ndarray, " half"]:
    """How much of each pair's own frequency is kept: 1 for fast pairs, 0 for slow ones, a line in between.

    Pair i turns original_length * theta^(-2i/width) / 2 pi times in the original context; solved for i at `beta_fast`
    and `beta_slow`, rounded outwards.

    Example:
        >>> yarn = YarnConfig(factor=4.0, original_length=16, beta_fast=2.0, beta_slow=0.125)
        >>> unstretched_share(8, 10_000.0, yarn).tolist()
        [1.0, 0.5, 0.0, 0.0]
    """

    def pair_that_turns(times: float) -> float:
        return width * math.log(yarn.original_length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), width - 1)
    if high == low:
        return np.where(np.arange(width // 2) > low, np.float32(0), np.float32(1))
    ramp = (np.arange(width // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    return 1 - np.clip(ramp, 0, 1)


def attention_gain(yarn: YarnConfig, mscale: float) -> float:
    """g(m) = 0.1 m ln(factor) + 1: longer contexts spread attention thinner, and this sharpens it again."""
    return 0.1 * mscale * math.log(yarn.factor) + 1.0


def table_factor(yarn: YarnConfig) -> float:
    """What cosines and sines are multiplied by: see `YarnConfig`.

    Example:
        >>> round(table_factor(YarnConfig(4.0, 16)), 5), round(table_factor(YarnConfig(4.0, 16, 32, 1, 1.0, 0.5)), 5)
        (1.13863, 1.06482)
    """
    if yarn.mscale and yarn.mscale_all_dim:
        return attention_gain(yarn, yarn.mscale) / attention_gain(yarn, yarn.mscale_all_dim)
    return attention_gain(yarn, 1.0)


def softmax_factor(yarn: YarnConfig | None) -> float:
    """What the softmax' scale of latent attention is multiplied by."""
    return attention_gain(yarn, yarn.mscale_all_dim) ** 2 if yarn is not None and yarn.mscale_all_dim else 1.0
