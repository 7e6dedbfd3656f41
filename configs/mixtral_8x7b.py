"""Mixtral 8x7B as published: 46.7B parameters, 12.9B of them active (Jiang et al., Mixtral of Experts, 2024)."""

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
            vocab_size=32_000,
            d_model=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            d_ff=14_336,
            num_dense_layers=0,
            rope_theta=1e6,
            norm_eps=1e-5,
            moe=MoEConfig(
                d_ff=14_336,
                num_experts=8,
                top_k=2,
                num_shared_experts=0,
                bias_rate=0.0,
                balance_loss_weight=0.02,
                block_size=128,
            ),
        ),
        pipeline=PipelineConfig(schedule="dualpipe", pp=8, dp=1, ep=8, num_microbatches=32),
        data=DataConfig(seq_len=4096, batch_size=256),
        optimizer=OptimizerConfig(learning_rate=1e-4, min_learning_rate=1e-5, warmup_steps=500),
        train=TrainConfig(steps=10_000, dtype="bfloat16"),
        checkpoint=CheckpointConfig(every=500, keep=3),
    )
