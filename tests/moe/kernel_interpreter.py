"""Run GPU kernels on a CPU, watched for races: the only place that knows the interpreter's private names."""

import functools

import jax
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

INTERPRET = InterpretGPUParams(detect_races=True)

# Its interpreter fails on a reference that is transposed, as a tensor core's operand is: and then it waits for ever.
needs_transposed_references = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="this JAX cannot interpret transposed references"
)


def interpreted(kernel, *args, **static):
    """kernel(*args), interpreted; fails if two threads touch the same memory without an order between them."""
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    result = jax.block_until_ready(jax.jit(functools.partial(kernel, interpret=INTERPRET, **static))(*args))
    assert not interpret_pallas_call.get_races().races_found
    return result
