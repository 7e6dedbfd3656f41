"""Stages, ranks and slots: round trips, and `fold` as the transpose of `copies`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dualpipe_jax.executor import layout, make_mesh
from dualpipe_jax.schedule import Placement

PLACEMENTS = [
    Placement("loop", num_ranks=4, slots=1),
    Placement("loop", num_ranks=2, slots=3),
    Placement("v", num_ranks=4, slots=2),
    Placement("v", num_ranks=4, slots=2, slot_rule="steady"),
    Placement("bidirectional", num_ranks=4, slots=2),
    Placement("bidirectional", num_ranks=4, slots=2, slot_rule="steady"),
]
ids = [f"{p.kind}-{p.slots}-{p.slot_rule}" for p in PLACEMENTS]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=ids)
def test_stack_and_unstack(placement):
    stages = [{"w": np.full((2, 3), s)} for s in range(placement.num_stages)]
    stacked = layout.stack_stages(stages, placement)
    assert all(tree["w"].shape == (placement.num_ranks, 2, 3) for tree in stacked)
    for stage, tree in enumerate(layout.unstack_stages(stacked, placement)):
        np.testing.assert_array_equal(tree["w"], stage)


def on_ranks(f, placement, num_out, *args):
    """Run `f` on one value a rank for each slot."""
    specs = tuple((P("pp"),) * len(a) for a in args)
    mesh = make_mesh(placement.num_ranks)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=(P("pp"),) * num_out, check_vma=False))(*args)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=ids)
def test_every_slot_works_on_its_stage(placement):
    owned = layout.stack_stages([jnp.float32(s) for s in range(placement.num_stages)], placement)
    slots = on_ranks(lambda o: layout.copies(o, placement), placement, placement.slots, owned)
    for slot, values in enumerate(slots):
        expected = [placement.stage_of(rank, slot)[0] for rank in range(placement.num_ranks)]
        np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=ids)
def test_fold_is_the_transpose_of_copies(placement):
    num_owned = len(layout.owned_stages(placement))
    rng = np.random.default_rng(0)
    x = tuple(rng.normal(size=placement.num_ranks).astype(np.float32) for _ in range(num_owned))
    y = tuple(rng.normal(size=placement.num_ranks).astype(np.float32) for _ in range(placement.slots))
    forward = on_ranks(lambda o: layout.copies(o, placement), placement, placement.slots, x)
    backward = on_ranks(lambda s: layout.fold(s, placement), placement, num_owned, y)
    left = sum(float(np.dot(a, b)) for a, b in zip(forward, y, strict=True))
    right = sum(float(np.dot(a, b)) for a, b in zip(x, backward, strict=True))
    assert left == pytest.approx(right, rel=1e-5)  # float32 sums of eight products


def test_mesh_axes():
    mesh = make_mesh(2, 2, 2)
    assert dict(mesh.shape) == {"pp": 2, "dp": 2, "ep": 2}
    # The expert axis varies fastest: an expert group sits on neighbouring devices.
    assert [d.id for d in mesh.devices[0, 0]] == [0, 1]
