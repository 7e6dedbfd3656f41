"""One device, one stage: the smallest run that passes through all of the program; it compiles in seconds."""

from dualpipe_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    TrainConfig,
)
from moe.config import MoEConfig


def config() -> Config:
    return Config(
        model=ModelConfig(
            d_model=32,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            d_ff=64,
            moe=MoEConfig(num_experts=4, top_k=2, d_ff=32),
        ),
        pipeline=PipelineConfig(schedule="1f1b", pp=1, dp=1, ep=1, num_microbatches=2),
        data=DataConfig(seq_len=32, batch_size=4),
        optimizer=OptimizerConfig(warmup_steps=2),
        train=TrainConfig(steps=10, log_every=1),
        checkpoint=CheckpointConfig(every=5),
    )
