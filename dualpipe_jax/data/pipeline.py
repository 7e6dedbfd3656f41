"""Text to batches: windows, an order shuffled anew in each epoch, and a position that can be saved.

Built on grain: the order is a pure function of (seed, epoch), so that a position is one number and nothing is replayed
on resume. No thread or process is started: a batch is a few thousand bytes, and is cut out of memory when asked for.

Several processes: each makes the same global batch (the order depends on nothing local) and `shard_batch` puts onto
this process's devices only the rows that belong there.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

import grain
import jax
import numpy as np
from jaxtyping import Int32, UInt8

IGNORED = -1  # a target that is no token: counts for nothing in the loss


class Batch(TypedDict):
    """Sequences of a step.

    Attributes:
        tokens: what the model reads.
        targets: the token that follows each, or `IGNORED`.
    """

    tokens: Int32[np.ndarray, "batch seq"]
    targets: Int32[np.ndarray, "batch seq"]


class Windows(grain.sources.RandomAccessDataSource[Batch]):
    """Consecutive windows of a text: window i has tokens [i * seq_len, (i + 1) * seq_len), targets one further on.

    Each byte is a target once, but for the first; a rest shorter than a window is left out.
    """

    def __init__(self, text: UInt8[np.ndarray, " bytes"], seq_len: int):
        self._text = text
        self._seq_len = seq_len

    def __len__(self) -> int:
        return max(0, (self._text.size - 1) // self._seq_len)

    def __getitem__(self, index: Any) -> Batch:
        start = int(index) * self._seq_len
        window = self._text[start : start + self._seq_len + 1].astype(np.int32)
        return Batch(tokens=window[:-1], targets=window[1:])


class Batches(Iterator[Batch]):
    """An endless iterator over batches whose position can be saved and set.

    An epoch takes each window once, in a new order. Batches run across the ends of epochs.

    Args:
        text: tokens, one a byte.
        seq_len: tokens a sequence.
        batch_size: sequences a batch, over all processes.
        seed: of the order.

    Raises:
        ValueError: the text has fewer windows than a batch; says how long it must be.

    Example:
        >>> batches = Batches(np.arange(9, dtype=np.uint8), seq_len=4, batch_size=2, seed=0)
        >>> sorted(next(batches)["targets"].tolist())
        [[1, 2, 3, 4], [5, 6, 7, 8]]
    """

    def __init__(self, text: UInt8[np.ndarray, " bytes"], *, seq_len: int, batch_size: int, seed: int):
        windows = Windows(text, seq_len)
        if len(windows) < batch_size:
            raise ValueError(
                f"the text has {text.size} bytes, enough for {len(windows)} sequences of {seq_len=}, but a batch needs "
                f"{batch_size=}: give at least {batch_size * seq_len + 1} bytes"
                + (f", or set data.batch_size to at most {len(windows)}" if len(windows) else "")
            )
        self._identity = {
            "text_bytes": int(text.size),
            "text_crc32": zlib.crc32(text),
            "seq_len": seq_len,
            "batch_size": batch_size,
            "seed": seed,
        }
        dataset = grain.MapDataset.source(windows).seed(seed).shuffle().repeat().batch(batch_size)
        self._batches = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))

    def __next__(self) -> Batch:
        return next(self._batches)

    def get_state(self) -> dict[str, int]:
        """The position, and what it is a position in; JSON-able."""
        return {**self._identity, "next_batch": self._batches.get_state()["next_index"]}

    def set_state(self, state: dict[str, int]) -> None:
        """Go to a position that `get_state` gave.

        Raises:
            ValueError: it is a position in another text, or in another order of it; names what differs.
        """
        differing = [
            f"{name} {state.get(name)} (now {value})"
            for name, value in self._identity.items()
            if state.get(name) != value
        ]
        if differing:
            raise ValueError(f"the saved data position belongs to other data: {', '.join(differing)}")
        self._batches.set_state({"next_index": state["next_batch"]})


def shard_batch(batch: Mapping[str, Any], sharding: jax.sharding.Sharding) -> dict[str, jax.Array]:
    """A global batch (NumPy arrays, equal on all processes) as arrays of `sharding`.

    Copies only the rows that this process's devices hold.
    """
    return {name: jax.make_array_from_callback(a.shape, sharding, a.__getitem__) for name, a in batch.items()}
