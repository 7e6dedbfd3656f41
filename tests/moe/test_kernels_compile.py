"""Every kernel compiles for Hopper, by the real compiler and without a GPU: `pip install 'jax[cuda12]'`."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from dualpipe_jax.plan.topology import Topology, can_compile, compile_only_devices
from moe.fp8 import fp8_grouped_matmul, fp8_matmul
from moe.kernels.grouped_matmul import grouped_matmul
from moe.kernels.quantize_pack import quantize_pack
from moe.kernels.unpack_reduce import unpack_reduce
from moe.rows import RowMap

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_compile(), reason="needs XLA's compiler for CUDA: pip install 'jax[cuda12]'"),
]
EXPERTS, ROWS, K, N, BLOCK, CHOICES = 4, 1024, 512, 768, 128, 2


@pytest.fixture(autouse=True)
def _not_from_the_cache():
    """Programs for devices that are not here cannot be read from it."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


def with_gradients(f):
    """f and the gradients of its sum, for its first two arguments."""

    def run(a, b, *rest):
        y, pull = jax.vjp(lambda a, b: f(a, b, *rest), a, b)
        return y, pull(jnp.ones_like(y))

    return run


BF16, INT = jnp.bfloat16, jnp.int32
CASES = {
    "grouped_matmul": (
        with_gradients(lambda lhs, rhs, blocks: grouped_matmul(lhs, rhs, blocks, BLOCK)),
        [((ROWS, K), BF16), ((EXPERTS, K, N), BF16), ((EXPERTS,), INT)],
        ["grouped_matmul", "grouped_matmul_dlhs", "grouped_matmul_drhs"],
    ),
    "fp8_grouped_matmul": (
        with_gradients(lambda lhs, rhs, blocks: fp8_grouped_matmul(lhs, rhs, blocks, BLOCK)),
        [((ROWS, K), BF16), ((EXPERTS, K, N), BF16), ((EXPERTS,), INT)],
        ["fp8_grouped_matmul", "fp8_grouped_matmul_dlhs", "fp8_grouped_matmul_drhs"],
    ),
    "fp8_matmul": (
        with_gradients(fp8_matmul),
        [((ROWS, K), BF16), ((K, N), BF16)],
        ["fp8_grouped_matmul", "fp8_grouped_matmul_dlhs", "fp8_grouped_matmul_drhs"],
    ),
    "quantize_pack": (quantize_pack, [((ROWS, K), BF16), ((ROWS * CHOICES,), INT)], ["quantize_pack"]),
    "unpack_reduce": (
        with_gradients(lambda p, w, source, place: unpack_reduce(p, w, RowMap(source, place))),
        [((ROWS * CHOICES, K), BF16), ((ROWS, CHOICES), jnp.float32), ((ROWS * CHOICES,), INT), ((ROWS, CHOICES), INT)],
        ["unpack_reduce", "scaled_pack"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_lowered_for_cuda_it_is_the_kernel(name):
    run, shapes, kernels = CASES[name]
    (device,) = compile_only_devices(Topology.parse("h100-80gb:1x1"))
    args = [jax.ShapeDtypeStruct(*shape, sharding=SingleDeviceSharding(device)) for shape in shapes]
    program = jax.jit(run).lower(*args).compile().as_text()
    for kernel in kernels:
        assert kernel in program
    assert program.count("mosaic_gpu") >= len(kernels)
