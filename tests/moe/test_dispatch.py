"""The exchange against plain loops: who gets which token, what is dropped, and the way back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from moe.dispatch import capacity_rows, combine, dispatch, layout

T, K, E, RANKS, D = 6, 2, 8, 4, 3
PER_RANK = E // RANKS


@pytest.mark.parametrize(
    ("tokens", "top_k", "ranks", "factor", "rows"),
    [
        (128, 2, 4, None, 128),
        (128, 2, 4, 1.0, 64),  # a token meets 2 of 4 ranks at most
        (128, 8, 4, 1.0, 128),  # all ranks
        (10, 1, 4, 1.0, 3),  # 2.5, rounded up
        (10, 1, 4, 1e-9, 1),
        (10, 1, 4, 100.0, 10),
    ],
)
def test_capacity(tokens, top_k, ranks, factor, rows):
    assert capacity_rows(tokens, top_k, ranks, factor) == rows


# Distinct experts for each token, as top-k gives them.
CHOICES = st.lists(st.permutations(range(E)).map(lambda p: p[:K]), min_size=T, max_size=T)
place_all = jax.jit(layout, static_argnums=(1, 2, 3))


def expected(idx, capacity):
    """(tokens for each rank, local experts for each place, dropped assignments), by loops."""
    sent, local, dropped = [], [], 0
    for rank in range(RANKS):
        mine = [[e - rank * PER_RANK if e // PER_RANK == rank else -1 for e in row] for row in idx]
        wanted = [t for t in range(T) if max(mine[t]) >= 0]
        kept = wanted[:capacity]
        dropped += sum(e >= 0 for t in wanted[capacity:] for e in mine[t])
        sent.append(kept)
        local += [mine[t] for t in kept] + [[-1] * K] * (capacity - len(kept))
    return sent, local, dropped


@pytest.mark.parametrize("capacity", [T, 2])
@settings(max_examples=50, deadline=None)
@given(idx=CHOICES)
def test_layout(capacity, idx):
    """A token goes once to each rank that has an expert of it; the last tokens are the first to be dropped."""
    handle = place_all(jnp.array(idx, jnp.int32), E, RANKS, capacity)
    sent, local, dropped = expected(idx, capacity)
    assert handle.sent_idx.tolist() == local
    assert int(handle.dropped) == dropped
    source = [kept + [T] * (capacity - len(kept)) for kept in sent]
    assert handle.rows.source.reshape(RANKS, capacity).tolist() == source
    assert dropped == 0 or capacity < T


def on_ranks(f, *args):
    """f on each rank's part of the arguments."""
    mesh = jax.make_mesh((RANKS,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = tuple(P("ep") for _ in args)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("ep"), check_vma=False))(*args)


@functools.cache
def exchanged(capacity):
    """Small integers sent out and back, and the gradients of both ways."""
    rng = np.random.default_rng(capacity)
    idx = np.stack([rng.permutation(E)[:K] for _ in range(RANKS * T)]).astype(np.int32)
    x = rng.integers(-9, 10, (RANKS * T, D)).astype(np.float32)
    y = rng.integers(-9, 10, (RANKS * RANKS * capacity, D)).astype(np.float32)
    weights = rng.integers(1, 10, idx.shape).astype(np.float32)

    def body(idx, x, weights, y):
        handle = layout(idx, E, RANKS, capacity)
        received, to_x = jax.vjp(lambda x: dispatch(x, weights, handle, "ep").x, x)
        everything = dispatch(x, weights, handle, "ep")
        back, to_y = jax.vjp(lambda y: combine(y, handle, "ep"), y)
        return everything, back, to_x(y)[0], to_y(x)[0], received

    return (idx, x, weights, y), on_ranks(body, idx, x, weights, y)


@pytest.mark.parametrize("capacity", [T, 2])
def test_dispatch_and_combine_are_transposes(capacity):
    (_, x, _, y), (received, back, x_grad, y_grad, _) = exchanged(capacity)
    assert float(np.vdot(received.x, y)) == float(np.vdot(x, back)) != 0.0
    np.testing.assert_array_equal(x_grad, back)
    np.testing.assert_array_equal(y_grad, received.x)


@pytest.mark.parametrize("capacity", [T, 2])
def test_each_rank_receives_its_tokens_experts_and_weights(capacity):
    (idx, x, weights, _), (received, *_) = exchanged(capacity)
    places = np.arange(RANKS * RANKS * capacity).reshape(RANKS, RANKS, capacity)
    for sender in range(RANKS):
        mine = slice(sender * T, (sender + 1) * T)
        sent, local, _ = expected(idx[mine].tolist(), capacity)
        for rank in range(RANKS):
            there = places[rank, sender]
            n = len(sent[rank])
            np.testing.assert_array_equal(received.x[there[:n]], x[mine][sent[rank]])
            np.testing.assert_array_equal(received.weights[there[:n]], weights[mine][sent[rank]])
            np.testing.assert_array_equal(received.idx[there], np.reshape(local, (RANKS, capacity, K))[rank])
            assert not np.any(np.asarray(received.x)[there[n:]])


@pytest.mark.parametrize("capacity", [T, 2])
def test_one_rank_keeps_its_rows(capacity):
    """Without an axis: the same rows, nothing to exchange, the last tokens dropped."""
    idx = jnp.array([[t % E, (t + 3) % E] for t in range(T)], jnp.int32)
    x = jnp.arange(1.0, 1 + T * D).reshape(T, D)
    handle = layout(idx, E, 1, capacity)
    received = dispatch(x, jnp.ones((T, K)), handle, None)
    np.testing.assert_array_equal(received.x, x[:capacity])
    np.testing.assert_array_equal(received.idx, idx[:capacity])
    assert int(handle.dropped) == K * (T - capacity)
    np.testing.assert_array_equal(combine(received.x, handle, None), jnp.where(jnp.arange(T)[:, None] < capacity, x, 0))
