"""Eight accelerators: DualPipe over 4 ranks, experts over 2; 32 experts of which each token uses 4."""

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
            d_model=512,
            num_layers=16,
            num_heads=8,
            num_kv_heads=4,
            d_ff=1536,
            num_dense_layers=1,
            moe=MoEConfig(num_experts=32, top_k=4, d_ff=384, num_shared_experts=1, scoring="sigmoid"),
        ),
        pipeline=PipelineConfig(schedule="dualpipe", pp=4, dp=1, ep=2, num_microbatches=16),
        data=DataConfig(seq_len=512, batch_size=64),
        optimizer=OptimizerConfig(learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=20),
        train=TrainConfig(steps=2000, dtype="bfloat16"),
        checkpoint=CheckpointConfig(every=200, keep=3),
    )
