"""Batches: every window once an epoch, in an order that only the seed decides, from a position that can be saved."""

import json
import threading

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dualpipe_jax.data.pipeline import Batches, shard_batch


def text(size):
    return (np.arange(size) % 251).astype(np.uint8)  # 251 is prime: every window of these tests starts differently


def make(size=1001, seq_len=10, batch_size=4, seed=0):
    return Batches(text(size), seq_len=seq_len, batch_size=batch_size, seed=seed)


def take(batches, count):
    return [next(batches) for _ in range(count)]


def starts(batches):
    return [row[0] for batch in batches for row in batch["tokens"].tolist()]


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_targets_are_the_next_tokens():
    batch = next(make())
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int32
    assert batch["tokens"].shape == batch["targets"].shape == (4, 10)
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    np.testing.assert_array_equal(batch["targets"], (batch["tokens"] + 1) % 251)


def test_an_epoch_takes_each_window_once_and_the_next_in_another_order():
    batches = make(size=25 * 4 + 1, seq_len=4, batch_size=5)
    first, second = starts(take(batches, 5)), starts(take(batches, 5))
    assert sorted(first) == sorted(second) == [i * 4 for i in range(25)]
    assert first != second
    assert first != sorted(first)


def test_batches_run_across_epochs():
    batches = make(size=7 * 4 + 1, seq_len=4, batch_size=3)
    assert sorted(starts(take(batches, 7))) == sorted([i * 4 for i in range(7)] * 3)


def test_seed_decides_the_order():
    assert_equal(take(make(seed=1), 5), take(make(seed=1), 5))
    assert starts(take(make(seed=1), 5)) != starts(take(make(seed=2), 5))


@settings(max_examples=15, deadline=None)
@given(before=st.integers(0, 40), after=st.integers(1, 10), seed=st.integers(0, 2**31 - 1))
def test_position_is_restored_exactly(before, after, seed):
    live = make(seed=seed)
    take(live, before)
    state = json.loads(json.dumps(live.get_state()))
    resumed = make(seed=seed)
    resumed.set_state(state)
    assert_equal(take(resumed, after), take(live, after))


def test_position_in_other_data_is_refused():
    state = make().get_state()
    with pytest.raises(ValueError, match=r"seed 0 \(now 1\)"):
        make(seed=1).set_state(state)
    with pytest.raises(ValueError, match=r"text_bytes 1001 \(now 1002\), text_crc32"):
        make(size=1002).set_state(state)
    with pytest.raises(ValueError, match=r"batch_size 4 \(now 2\)"):
        make(batch_size=2).set_state(state)


@pytest.mark.parametrize("size", [0, 1, 10])
def test_text_too_short_for_a_window(size):
    with pytest.raises(ValueError, match=rf"the text has {size} bytes, enough for 0 .* give at least 41 bytes$"):
        make(size=size)


def test_text_too_short_for_a_batch():
    make(size=41)
    with pytest.raises(ValueError, match=r"40 bytes, enough for 3 .* or set data.batch_size to at most 3"):
        make(size=40)


def test_no_threads_are_left():
    before = set(threading.enumerate())
    take(make(), 3)
    assert set(threading.enumerate()) <= before


def test_shards_hold_their_rows():
    mesh = jax.make_mesh((4, 2), ("dp", "pp"), (AxisType.Auto,) * 2)
    batch = next(make())
    arrays = shard_batch(batch, NamedSharding(mesh, PartitionSpec("dp")))
    assert_equal(arrays, dict(batch))
    assert {shard.data.shape for shard in arrays["tokens"].addressable_shards} == {(1, 10)}
