"""The dense model that is measured, as a pipeline and as the unpipelined reference."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A dense model.

    Attributes:
        d_model: width. d_ff: hidden width of the SwiGLU. heads: of attention.
        layers: all dense.
        seq: tokens a sequence; a microbatch is one sequence.
        vocab: token ids.
    """

    d_model: int = 256
    d_ff: int = 1024
    heads: int = 4
    layers: int = 8
    seq: int = 128
    vocab: int = 512


def reference(sizes: Sizes, microbatches: int) -> tuple[Any, tuple[Any, ...]]:
    """(jitted function, its arguments): the unpipelined program on one device."""
    import jax

    from dualpipe_jax.model.partition import partition, to_stages
    from dualpipe_jax.reference import reference_value_and_grad

    model, params, batch = _model_and_batch(sizes, microbatches)
    stages = partition(sizes.layers, 0, 1)
    fns = model.stage_fns(stages)
    args = jax.device_put((*to_stages(params, stages), batch), jax.devices()[0])
    return jax.jit(lambda *a: reference_value_and_grad(fns, *a)), args


def pipeline(sizes: Sizes, name: str, ranks: int, microbatches: int) -> tuple[Any, tuple[Any, ...]]:
    """(`GradFn`, its arguments): the same by a schedule, arrays where the program wants them."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from dualpipe_jax import build, make_mesh, pipeline_value_and_grad
    from dualpipe_jax.executor import PipelineParams
    from dualpipe_jax.model.partition import partition, to_pipeline

    model, params, batch = _model_and_batch(sizes, microbatches)
    schedule = build(name, num_ranks=ranks, num_microbatches=microbatches)
    stages = partition(sizes.layers, 0, schedule.placement.num_stages)
    mesh = make_mesh(ranks)
    arranged = to_pipeline(params, stages, schedule.placement)
    whole, staged = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("pp",)))
    placed = PipelineParams(jax.device_put(arranged.stages, staged), jax.device_put(arranged.shared, whole))
    grad_fn = pipeline_value_and_grad(model.stage_fns(stages), schedule, mesh=mesh)
    return grad_fn, (placed, jax.device_put(batch, whole))


def _model_and_batch(sizes: Sizes, microbatches: int) -> tuple[Any, Any, Any]:
    import jax

    from dualpipe_jax.config import ModelConfig
    from dualpipe_jax.model.model import Model, with_weights

    config = ModelConfig(
        vocab_size=sizes.vocab,
        d_model=sizes.d_model,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.heads,
        d_ff=sizes.d_ff,
        moe=None,
    )
    model = Model(config, num_sequences=microbatches, seq_len=sizes.seq)
    tokens = jax.random.randint(jax.random.key(1), (microbatches, 1, sizes.seq), 0, sizes.vocab)
    return model, jax.jit(model.init)(jax.random.key(0)), with_weights({"tokens": tokens, "targets": tokens})
