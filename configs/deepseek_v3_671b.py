"""DeepSeek-V3 as published, without multi-token prediction: 671B parameters, 37B of them active.

Mesh and batch are those of its training (DeepSeek-V3 Technical Report, 2024, sections 3.2 and 4.2): 2,048 devices, 16
pipeline ranks, experts over 64; 15,360 sequences of 4,096 tokens a step. YaRN, which came after training, is left out.
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
)
from moe.config import MoEConfig


def config() -> Config:
    return Config(
        model=ModelConfig(
            vocab_size=129_280,
            d_model=7168,
            num_layers=61,
            num_heads=128,
            num_kv_heads=128,
            mla=LatentAttentionConfig(q_lora_rank=1536, kv_lora_rank=512, qk_nope_dim=128, qk_rope_dim=64, v_dim=128),
            d_ff=18_432,
            num_dense_layers=3,
            moe=MoEConfig(
                d_ff=2048,
                num_experts=256,
                top_k=8,
                num_shared_experts=1,
                scoring="sigmoid",
                route_scale=2.5,
                num_groups=8,
                top_groups=4,
                bias_rate=1e-3,
                balance_loss_weight=1e-4,
                block_size=128,
            ),
        ),
        pipeline=PipelineConfig(schedule="dualpipe", pp=16, dp=2, ep=64, num_microbatches=120),
        data=DataConfig(seq_len=4096, batch_size=15_360),
        optimizer=OptimizerConfig(learning_rate=2.2e-4, min_learning_rate=2.2e-5, warmup_steps=2000),
        train=TrainConfig(steps=240_000, dtype="bfloat16"),
        checkpoint=CheckpointConfig(every=500, keep=3),
    )
