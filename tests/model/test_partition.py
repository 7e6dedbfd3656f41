"""Layers to stages and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualpipe_jax.model.partition import from_pipeline, partition, to_pipeline
from dualpipe_jax.schedule import Placement


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"), [(30, 4, [8, 8, 7, 7]), (80, 32, [3] * 16 + [2] * 16), (4, 4, [1] * 4)]
)
def test_every_layer_once(layers, stages, sizes):
    """Case 2."""
    dealt = partition(layers, 3, stages)
    assert [len(s.dense) + len(s.trunk) for s in dealt] == sizes
    assert [i for s in dealt for i in s.dense] == [0, 1, 2]
    assert [i for s in dealt for i in s.trunk] == list(range(layers - 3))


def test_too_few_layers_names_both_numbers():
    with pytest.raises(ValueError, match=r"num_layers=3 is less than num_stages=4; use at least 4 layers"):
        partition(3, 0, 4)


@pytest.mark.parametrize("kind", ["loop", "v", "bidirectional"])
def test_round_trip_is_bitwise(kind):
    placement = Placement(kind, num_ranks=2, slots=1 if kind == "loop" else 2)
    keys = jax.random.split(jax.random.key(0), 7)
    params = {
        "embedding": {"table": jax.random.normal(keys[0], (5, 3))},
        "dense": [{"w": jax.random.normal(keys[1], (3, 4))}],
        "layers": [{"w": jax.random.normal(k, (3, 3))} for k in keys[2:]],
        "head": {"norm": jnp.ones(3)},
    }
    stages = partition(6, 1, placement.num_stages)
    arranged = to_pipeline(params, stages, placement)
    padded = max(len(s.trunk) for s in stages)
    assert arranged.stages[0]["layers"][0]["w"].shape == (2, 3, 3)
    assert len(arranged.stages[0]["layers"]) == padded
    back = from_pipeline(arranged, stages, placement)
    jax.tree.map(np.testing.assert_array_equal, back, params)
