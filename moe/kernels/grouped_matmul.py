"""Grouped matmul for Hopper in bf16: rows times their expert's matrix, and both gradients.

The layout is that of moe.experts.grouped_matmul: rows sorted by expert, every group whole blocks. So an output tile
meets one matrix, and tiles need no masks. Blocks in use are a value, not a shape: tiles beyond them are only zeroed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from moe.experts import rows_times, weight_gradient
from moe.kernels.launch import H100_SMS, divisor, multiple, on_cuda, tiled
from moe.kernels.persistent import Block, Shape, Tile, persistent_products

_CONTRACTED = 64  # of a step: 128 bytes, the widest swizzle


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
    lhs: Float[Array, "places K"], rhs: Float[Array, "E K N"], blocks: Int32[Array, " E"], block_size: int
) -> Float[Array, "places N"]:
    """moe.experts.grouped_matmul: the kernel on CUDA where it fits, jnp elsewhere.

    The kernel needs bfloat16, block_size a multiple of 64, K and N multiples of 128.
    """
    return _rows_times(lhs, rhs, blocks, block_size, transpose=False)


def fits(lhs: Array, rhs: Array, block_size: int) -> bool:
    """Whether the kernels can do this product and its gradients."""
    bf16 = lhs.dtype == rhs.dtype == jnp.bfloat16
    return bf16 and block_size % 64 == 0 and rhs.shape[1] % 128 == 0 and rhs.shape[2] % 128 == 0


def _rows_times(lhs: Array, rhs: Array, blocks: Array, block_size: int, *, transpose: bool) -> Array:
    plain = partial(rows_times, block_size=block_size, transpose=transpose)
    if not fits(lhs, rhs, block_size):
        return plain(lhs, rhs, blocks)
    return on_cuda(partial(rows_times_kernel, block_size=block_size, transpose=transpose), plain, lhs, rhs, blocks)


def _forward(lhs: Array, rhs: Array, blocks: Array, block_size: int) -> tuple[Array, tuple[Array, ...]]:
    return grouped_matmul(lhs, rhs, blocks, block_size), (lhs, rhs, blocks)


def _backward(block_size: int, kept: tuple[Array, ...], g: Array) -> tuple[Array, Array, None]:
    lhs, rhs, blocks = kept
    dlhs = _rows_times(g, rhs, blocks, block_size, transpose=True)
    plain = partial(weight_gradient, block_size=block_size)
    if not fits(lhs, rhs, block_size):
        return dlhs, plain(lhs, g, blocks, like=rhs), None
    kernel = partial(weight_gradient_kernel, block_size=block_size)
    return dlhs, on_cuda(kernel, lambda *args: plain(*args, like=rhs), lhs, g, blocks), None


grouped_matmul.defvjp(_forward, _backward)


def expert_of_block(blocks: Int32[Array, " E"], num_blocks: int) -> Int32[Array, " num_blocks"]:
    """The expert whose rows a block has; E for those beyond the last.

    >>> expert_of_block(jnp.array([2, 0, 1], dtype=jnp.int32), 4).tolist()
    [0, 0, 2, 3]
    """
    stop = jnp.cumsum(blocks, dtype=jnp.int32)
    return jnp.searchsorted(stop, jnp.arange(num_blocks, dtype=jnp.int32), side="right").astype(jnp.int32)


def rows_times_kernel(
    lhs: Array,
    rhs: Array,
    blocks: Array,
    block_size: int,
    *,
    transpose: bool,
    num_sms: int = H100_SMS,
    interpret: Any = None,
) -> Array:
    """Forward (rhs as it is) and the gradient for lhs (each matrix transposed, in place) as one kernel.

    Raises:
        ValueError: if a size is no multiple of the kernel's tiles, or a dtype not bfloat16.
    """
    contracted, columns = rhs.shape[2 if transpose else 1], rhs.shape[1 if transpose else 2]
    shape = _check(lhs, rhs, block_size, columns)
    height, width = shape.tile
    experts = expert_of_block(blocks * (block_size // height), lhs.shape[0] // height)

    def tile(index: tuple[Array, ...], expert_g: Any) -> Tile:
        m, n = index
        expert = expert_g[m]
        used, e = expert < rhs.shape[0], jnp.minimum(expert, rhs.shape[0] - 1)
        steps = jnp.where(used, contracted // _CONTRACTED, 0)
        right = (lambda k: (e, n, k)) if transpose else (lambda k: (e, k, n))
        return Tile(steps, (lambda k: (m, k), right), m * height, n * width)

    def step(a: Any, b: Any, acc: Any) -> Any:
        plgpu.wgmma(acc, a, transposed(shape.part(b, shape.columns)) if transpose else _columns(b, shape))
        plgpu.wgmma_wait(0)
        return acc

    right = (None, width, _CONTRACTED) if transpose else (None, _CONTRACTED, width)
    return persistent_products(
        (experts,),
        (lhs, rhs),
        (Block((height, _CONTRACTED), tiled(_CONTRACTED, lhs.dtype)), Block(right, tiled(right[2], rhs.dtype))),
        jax.ShapeDtypeStruct((lhs.shape[0], columns), lhs.dtype),
        (lhs.shape[0] // height, columns // width),
        shape,
        tile,
        partial(in_accumulator, shape=shape),
        step,
        name="grouped_matmul_dlhs" if transpose else "grouped_matmul",
        num_sms=num_sms,
        interpret=interpret,
    )


def in_accumulator(run: Any, shape: Shape) -> Array:
    """Carry the tensor cores' own accumulator from step to step."""

    def scope(acc: Any) -> Array:
        run(acc)
        return acc[...]

    return pl.run_scoped(scope, plgpu.ACC((shape.rows, shape.columns), jnp.float32))


def weight_gradient_kernel(
    lhs: Array, g: Array, blocks: Array, block_size: int, *, num_sms: int = H100_SMS, interpret: Any = None
) -> Array:
    """lhs^T g for each expert, [E, K, N] in bfloat16, with float32 sums; exactly zero for an expert without rows.

    Raises:
        ValueError: if a size is no multiple of the kernel's tiles, or a dtype not bfloat16.
    """
    multiple("K", lhs.shape[1], 128)
    shape = _check(lhs, g, block_size, g.shape[1])._replace(rows=128)
    height, width = shape.tile
    steps = blocks * (block_size // _CONTRACTED)
    first = jnp.cumsum(steps, dtype=jnp.int32) - steps

    def tile(index: tuple[Array, ...], first_g: Any, steps_g: Any) -> Tile:
        e, m, n = index
        start = first_g[e]
        return Tile(steps_g[e], (lambda k: (start + k, m), lambda k: (start + k, n)), m * height, n * width, (e,))

    def step(a: Any, b: Any, acc: Any) -> Any:
        plgpu.wgmma(acc, transposed(a), _columns(b, shape))
        plgpu.wgmma_wait(0)
        return acc

    return persistent_products(
        (first, steps),
        (lhs, g),
        (
            Block((_CONTRACTED, height), tiled(height, lhs.dtype)),
            Block((_CONTRACTED, width), tiled(width, g.dtype)),
        ),
        jax.ShapeDtypeStruct((blocks.shape[0], lhs.shape[1], g.shape[1]), g.dtype),
        (blocks.shape[0], lhs.shape[1] // height, g.shape[1] // width),
        shape,
        tile,
        partial(in_accumulator, shape=shape),
        step,
        name="grouped_matmul_drhs",
        num_sms=num_sms,
        interpret=interpret,
    )


def transposed(ref: Any) -> Any:
    """A block as the tensor cores read it along its other dim; nothing moves."""
    return ref.transpose((1, 0))


def _columns(ref: Any, shape: Shape) -> Any:
    """This warpgroup's columns of a block."""
    return ref.at[:, pl.ds(jax.lax.axis_index("wg") * shape.columns, shape.columns)]


def _check(lhs: Array, rhs: Array, block_size: int, columns: int) -> Shape:
    """The output tile: up to 128 x 256, each warpgroup half of its columns."""
    if lhs.dtype != jnp.bfloat16 or rhs.dtype != jnp.bfloat16:
        raise ValueError(f"{lhs.dtype=} and {rhs.dtype=} must both be bfloat16")
    multiple("block_size", block_size, 64)
    multiple("columns", columns, 128)
    multiple("K", lhs.shape[1], _CONTRACTED)
    return Shape(divisor(block_size, (128, 64)), divisor(columns, (256, 128)) // 2, split=1)
