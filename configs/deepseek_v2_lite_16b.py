"""DeepSeek-V2-Lite as published: 15.7B parameters, 2.4B of them active; sizes of its `config.json` on the hub.

The context is the 4,096 tokens of its pretraining; YaRN is on, as in its checkpoint (DeepSeek-V2, 2024, appendix B).
"""

from dualpipe_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LatentAttentionConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    TrainConfig,
    YarnConfig,
)
from moe.config import MoEConfig


def config() -> Config:
    return Config(
        model=ModelConfig(
            vocab_size=102_400,
            d_model=2048,
            num_layers=27,
            num_heads=16,
            num_kv_heads=16,
            mla=LatentAttentionConfig(q_lora_rank=None, kv_lora_rank=512, qk_nope_dim=128, qk_rope_dim=64, v_dim=128),
            d_ff=10_944,
            num_dense_layers=1,
            yarn=YarnConfig(factor=40.0, original_length=4096, mscale=0.707, mscale_all_dim=0.707),
            moe=MoEConfig(
                d_ff=1408,
                num_experts=64,
                top_k=6,
                num_shared_experts=2,
                normalize_weights=False,
                bias_rate=0.0,
                balance_loss_weight=1e-3,
                block_size=128,
            ),
        ),
        pipeline=PipelineConfig(schedule="dualpipe", pp=4, dp=1, ep=8, num_microbatches=16),
        data=DataConfig(seq_len=4096, batch_size=512),
        optimizer=OptimizerConfig(learning_rate=4.2e-4, min_learning_rate=4.2e-5, warmup_steps=2000),
        train=TrainConfig(steps=100_000, dtype="bfloat16"),
        checkpoint=CheckpointConfig(every=500, keep=3),
    )
