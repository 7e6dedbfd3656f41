"""Packing and unpacking against plain loops, and as each other's transpose."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.rows import pack, row_map, unpack

ROWS, CHOICES, PLACES, WIDTH = 5, 3, 12, 4


@st.composite
def place_tables(draw):
    """A place of its own, or none (outside the range), for each (row, choice)."""
    places = draw(st.permutations(range(PLACES + 4)))[: ROWS * CHOICES]
    table = np.array(places, np.int32).reshape(ROWS, CHOICES)
    return np.where(table == PLACES, -1, table)


def whole(seed, *shape):
    """Small integers: sums are exact in any order."""
    return jnp.asarray(np.random.default_rng(seed).integers(-9, 10, shape), jnp.float32)


@settings(max_examples=40, deadline=None)
@given(place_tables())
def test_pack_and_unpack_move_every_kept_row(table):
    rows = row_map(jnp.asarray(table), PLACES)
    x, y = whole(0, ROWS, WIDTH), whole(1, PLACES, WIDTH)
    packed, unpacked = np.zeros((PLACES, WIDTH)), np.zeros((ROWS, WIDTH))
    for row, choice in np.ndindex(ROWS, CHOICES):
        if 0 <= (place := table[row, choice]) < PLACES:
            packed[place] = x[row]
            unpacked[row] += y[place]
    np.testing.assert_array_equal(pack(x, rows), packed)
    np.testing.assert_array_equal(unpack(y, rows), unpacked)


@settings(max_examples=20, deadline=None)
@given(place_tables())
def test_each_is_the_transpose_of_the_other(table):
    """<pack x, y> = <x, unpack y>, and each one's gradient is the other."""
    rows = row_map(jnp.asarray(table), PLACES)
    x, y = whole(2, ROWS, WIDTH), whole(3, PLACES, WIDTH)
    packed, pack_vjp = jax.vjp(lambda x: pack(x, rows), x)
    unpacked, unpack_vjp = jax.vjp(lambda y: unpack(y, rows), y)
    assert float(jnp.vdot(packed, y)) == float(jnp.vdot(x, unpacked))
    np.testing.assert_array_equal(pack_vjp(y)[0], unpacked)
    np.testing.assert_array_equal(unpack_vjp(x)[0], packed)


def test_a_row_may_have_no_place():
    rows = row_map(jnp.array([[-1], [PLACES], [7]], jnp.int32), PLACES)
    assert rows.place.tolist() == [[PLACES], [PLACES], [7]]
    assert rows.source.tolist() == [2 if place == 7 else 3 for place in range(PLACES)]
    assert np.flatnonzero(np.any(np.asarray(pack(jnp.ones((3, 2)), rows)), axis=1)).tolist() == [7]


def test_dtypes_are_kept():
    rows = row_map(jnp.array([[0, 1], [2, 3]], jnp.int32), 4)
    x = jnp.ones((2, 8), jnp.bfloat16)
    assert pack(x, rows).dtype == unpack(pack(x, rows), rows).dtype == jnp.bfloat16
    assert unpack(pack(x, rows), rows).tolist() == [[2.0] * 8] * 2
