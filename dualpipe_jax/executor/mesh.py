"""The device mesh: pipeline ranks first, then the axes that split the batch."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

PIPELINE_AXIS = "pp"


def make_mesh(pp: int, dp: int = 1, ep: int = 1, *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with axes ("pp", "dp", "ep").

    Args:
        pp: pipeline ranks.
        dp: copies of the pipeline, each with its own rows of the batch and its own copy of the experts.
        ep: shards of the experts; rows of the batch are split over dp x ep.
        devices: at least pp * dp * ep of them; default all. The last axis varies fastest, so that an expert group
            (whose all-to-all is the heaviest traffic) sits on neighbouring devices.

    Raises:
        ValueError: there are fewer devices than the mesh needs.
    """
    needed = pp * dp * ep
    found = list(jax.devices() if devices is None else devices)
    if len(found) < needed:
        raise ValueError(f"the mesh {pp=} x {dp=} x {ep=} needs {needed} devices, found {len(found)}")
    return jax.make_mesh((pp, dp, ep), (PIPELINE_AXIS, "dp", "ep"), (AxisType.Auto,) * 3, devices=found[:needed])


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes over which the rows of a batch are split: all but the pipeline's."""
    return tuple(name for name in mesh.axis_names if name != PIPELINE_AXIS)
