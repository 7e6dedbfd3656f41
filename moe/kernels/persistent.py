"""Products of tiles on every SM: TMA fills a ring of stages, two warpgroups multiply, tile after tile.

One warpgroup in three only issues copies. The other two share each stage, and each computes half of the output tile: a
half of its rows or of its columns. A tile with no steps is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from moe.kernels.launch import H100_SMS, PARAMS, tiled

_SHARED_MEMORY = 227 * 1024 - 2048  # of a Hopper SM, less barriers
_WARPGROUPS = 2
_MEMORY_REGISTERS = 40
_OUT_COLUMNS = 64  # of a piece of the output that is staged in shared memory


class Block(NamedTuple):
    """What a step reads of one operand: its shape (None: an index, not a dim), and how it lies in shared memory."""

    shape: tuple[int | None, ...]
    transforms: tuple[Any, ...] = ()

    def bytes(self, dtype: Any) -> int:
        return math.prod(size for size in self.shape if size) * jnp.dtype(dtype).itemsize


class Tile(NamedTuple):
    """One output tile.

    Attributes:
        steps: how many blocks are multiplied.
        blocks: for each operand a function from the step to the block's index.
        rows, columns: where the tile starts in the output's last two dims.
        lead: where in the output's dims before those.
    """

    steps: Array
    blocks: tuple[Callable[[Array], tuple[Any, ...]], ...]
    rows: Array
    columns: Array
    lead: tuple[Array, ...] = ()


class Shape(NamedTuple):
    """One warpgroup's part of an output tile; the two parts are neighbours along dim `split`."""

    rows: int
    columns: int
    split: int

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of both parts together."""
        return (self.rows * _WARPGROUPS, self.columns) if self.split == 0 else (self.rows, self.columns * _WARPGROUPS)

    def part(self, ref: Any, size: int) -> Any:
        """This warpgroup's `size` rows of a block."""
        return ref.at[pl.ds(jax.lax.axis_index("wg") * size, size)]


def persistent_products(
    tables: tuple[Array, ...],
    operands: tuple[Array, ...],
    blocks: tuple[Block, ...],
    out_type: jax.ShapeDtypeStruct,
    grid: tuple[int, ...],
    shape: Shape,
    tile: Callable[..., Tile],
    accumulate: Callable[[Callable[[Any], Any]], Array],
    step: Callable[..., Any],
    *,
    name: str,
    num_sms: int = H100_SMS,
    interpret: Any = None,
) -> Array:
    """Run `step` over the blocks of every tile in `grid`, tile i on SM i mod num_sms, and store what it accumulates.

    Args:
        tables: small integer arrays that say what the tiles are.
        tile: (index in the grid, *tables) -> Tile.
        accumulate: given a function from the first carry to the last, what to store, in float32.
        step: (*blocks in shared memory, carry) -> carry. When it returns, the blocks may be overwritten.
    """
    piece = min(_OUT_COLUMNS, shape.columns)
    staged = _WARPGROUPS * shape.rows * piece * out_type.dtype.itemsize
    stage = sum(block.bytes(operand.dtype) for block, operand in zip(blocks, operands, strict=True))
    stages = min(6, (_SHARED_MEMORY - staged) // stage)

    def pipeline(t: Tile | None, context: Callable[..., None]) -> Any:
        maps = [t.blocks[i] if t else _any_block(block) for i, block in enumerate(blocks)]
        return plgpu.emit_pipeline_warp_specialized(
            lambda _, *args: step(*args),
            grid=(t.steps if t else stages,),
            in_specs=[
                plgpu.BlockSpec(block.shape, index, transforms=block.transforms)
                for block, index in zip(blocks, maps, strict=True)
            ],
            wg_axis="wg",
            num_compute_wgs=_WARPGROUPS,
            memory_registers=_MEMORY_REGISTERS,
            max_concurrent_steps=stages,
            compute_context=context,
        )

    def body(*refs: Any) -> None:
        table_refs, operand_refs, out_g = refs[: len(tables)], refs[len(tables) : -1], refs[-1]

        def scope(allocations: Any, out_s: Any) -> None:
            mine = out_s.at[jax.lax.axis_index("wg")]

            @plgpu.nd_loop(grid, collective_axes="sm")
            def _(loop: Any) -> None:
                t = tile(loop.index, *table_refs)

                def context(run: Callable[[Any], Any]) -> None:
                    _store(accumulate(run).astype(out_type.dtype), mine, out_g, t, shape)

                pipeline(t, context)(*operand_refs, allocations=allocations)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.run_scoped(
            scope,
            pipeline(None, lambda _: None).get_allocations(*operand_refs),
            plgpu.SMEM((_WARPGROUPS, shape.rows, piece), out_type.dtype, transforms=tiled(piece, out_type.dtype)),
            collective_axes="wg",
        )

    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(num_sms,),
        grid_names=("sm",),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=PARAMS,
        kernel_name=name,
        interpret=interpret,
    )
    return kernel(*tables, *operands)


def _any_block(block: Block) -> Callable[[Array], tuple[Any, ...]]:
    return lambda k: (k,) * len(block.shape)


def _store(result: Array, staged: Any, out: Any, t: Tile, shape: Shape) -> None:
    """Piece by piece through shared memory; the next piece waits until TMA has read the one before."""
    piece = staged.shape[1]
    warpgroup = jax.lax.axis_index("wg")
    rows = t.rows + (warpgroup * shape.rows if shape.split == 0 else 0)
    columns = t.columns + (warpgroup * shape.columns if shape.split == 1 else 0)
    for start in range(0, shape.columns, piece):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged[...] = result[:, start : start + piece]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, out.at[(*t.lead, pl.ds(rows, shape.rows), pl.ds(columns + start, piece))])
