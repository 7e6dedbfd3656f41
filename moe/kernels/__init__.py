"""Kernels for Hopper GPUs (Pallas Mosaic GPU), each with the same function in plain jnp.

    quantize_pack    gather rows into places, quantised to FP8 with 1 x 128 scales
    unpack_reduce    weighted sum of each row's places; scaled_pack is its transpose
    grouped_matmul   rows times their expert's matrix, and both gradients, in bf16 and in FP8

A public function is traced once for all platforms; lowered for CUDA it is the kernel, elsewhere the jnp function.
"""
