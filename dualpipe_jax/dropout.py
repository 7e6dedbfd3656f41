"""Random keys for dropout that do not depend on the pipeline.

The executor knows nothing of randomness: stage functions are pure, and a mask is a function of a key. So the key of a
mask must be made of what identifies it, (step, microbatch, layer, data shard), and of nothing that depends on how the
model is cut or in which order microbatches run. Then forward, recomputed forward and both halves of the backward see
the same bits, and so does any schedule on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, UInt32

Index = int | Int[Array, ""]


class DropoutLeaves(NamedTuple):
    """What a batch carries for dropout: integer leaves with one value for each microbatch.

    Attributes:
        key_data: the words of the run's key, each uint32 [num_microbatches] (a scalar in a microbatch).
        step: int32 [num_microbatches], the optimizer step.
        microbatch: int32 [num_microbatches], its number in the batch.
    """

    key_data: tuple[UInt32[Array, "*microbatches"], ...]
    step: Int[Array, "*microbatches"]
    microbatch: Int[Array, "*microbatches"]


def dropout_leaves(key: Key[Array, ""], step: Index, num_microbatches: int) -> DropoutLeaves:
    """What to put into a batch so that stage functions can make keys: the run's key, the step, 0, 1, ... M-1.

    Args:
        key: a typed key (`jax.random.key`) of the default implementation, the same in all steps.
        step: the optimizer step, int32; may be traced.
        num_microbatches: M; of the whole batch, both directions of a bidirectional schedule included.

    Raises:
        ValueError: the key is of another implementation than the default, which `dropout_key` would not know.

    Example:
        >>> leaves = dropout_leaves(jax.random.key(0), step=7, num_microbatches=3)
        >>> print(leaves.step, leaves.microbatch)
        [7 7 7] [0 1 2]
        >>> batch = {"tokens": jnp.zeros((3, 4, 16), jnp.int32), "dropout": leaves}
    """
    default = jax.eval_shape(lambda: jax.random.key(0)).dtype
    if key.dtype != default:
        raise ValueError(
            f"key is of dtype {key.dtype}, typed keys of the default implementation are {default}; make it with "
            "jax.random.key(seed), or set jax_default_prng_impl"
        )
    words = tuple(jnp.broadcast_to(word, num_microbatches) for word in jax.random.key_data(key))
    steps = jnp.broadcast_to(jnp.asarray(step, jnp.int32), num_microbatches)
    return DropoutLeaves(words, steps, jnp.arange(num_microbatches, dtype=jnp.int32))


def dropout_key(
    key_data: UInt32[Array, " words"] | Sequence[UInt32[Array, ""]],
    step: Index,
    microbatch: Index,
    *,
    layer: Index,
    shard: Index = 0,
) -> Key[Array, ""]:
    """The key of one layer's mask, for one microbatch of one step on one data shard.

    key = fold_in(fold_in(fold_in(fold_in(key, step), microbatch), layer), shard), in this order.

    Args:
        key_data: of the run's key, uint32 [words] or the words one by one.
        step: optimizer step. microbatch: its number in the batch. All int32 scalars (or int), all may be traced.
        layer: number of the layer in the whole model, not in its stage: an integer leaf that rides along with the
            activation counts it, or one of the stage's parameters holds it (its gradient is 0). A layer with several
            masks splits the key.
        shard: which rows of the microbatch these are, `jax.lax.axis_index(("dp", "ep"))`. Masks are the same under any
            schedule for the same split of rows over data shards; under another split they are others.

    Returns:
        A typed key of the default implementation.

    Example:
        >>> leaves = dropout_leaves(jax.random.key(0), step=7, num_microbatches=3)
        >>> microbatch = jax.tree.map(lambda a: a[2], {"dropout": leaves})  # what a stage function is given
        >>> key = dropout_key(*microbatch["dropout"], layer=5)
        >>> print(jax.random.bernoulli(key, 0.9, (4,)))
        [False  True  True  True]
    """
    key = jax.random.wrap_key_data(jnp.stack(list(key_data)))
    for index in (step, microbatch, layer, shard):
        key = jax.random.fold_in(key, index)
    return key
