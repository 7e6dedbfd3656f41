"""Qwen3-30B-A3B as published: 30.5B parameters, 3.3B of them active; sizes of its `config.json` on the hub."""

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
            vocab_size=151_936,
            d_model=2048,
            num_layers=48,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            qk_norm=True,
            d_ff=6144,
            num_dense_layers=0,
            rope_theta=1e6,
            moe=MoEConfig(
                d_ff=768,
                num_experts=128,
                top_k=8,
                num_shared_experts=0,
                bias_rate=0.0,
                balance_loss_weight=1e-3,
                block_size=128,
            ),
        ),
        pipeline=PipelineConfig(schedule="dualpipe", pp=8, dp=1, ep=8, num_microbatches=32),
        data=DataConfig(seq_len=4096, batch_size=256),
        optimizer=OptimizerConfig(learning_rate=1e-4, min_learning_rate=1e-5, warmup_steps=500),
        train=TrainConfig(steps=10_000, dtype="bfloat16"),
        checkpoint=CheckpointConfig(every=500, keep=3),
    )
