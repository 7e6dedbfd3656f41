"""The smallest model with everything in it, its trainers (each compiled once a session) and its data."""

import dataclasses
from functools import cache

import jax
import numpy as np

from dualpipe_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    TrainConfig,
)
from dualpipe_jax.train_step import Trainer
from moe.config import MoEConfig

SEQ, BATCH, STEPS, WARMUP, PEAK = 16, 8, 20, 10, 1e-3
MOE = MoEConfig(
    d_ff=8, num_experts=4, top_k=2, block_size=4, scoring="sigmoid", bias_rate=0.01, balance_loss_weight=0.0
)
MODEL = ModelConfig(
    d_model=16, num_layers=2, num_heads=2, num_kv_heads=1, d_ff=16, num_dense_layers=0, tied_embeddings=True, moe=MOE
)


def config(schedule="dualpipe", pp=2, ep=1, *, microbatches=4, dtype="float32", **model):
    """Tied embeddings, no auxiliary loss (so that a batch without targets has loss 0), a router bias that moves."""
    return Config(
        model=dataclasses.replace(MODEL, **model),
        pipeline=PipelineConfig(schedule, pp, 1, ep, microbatches),
        data=DataConfig(seq_len=SEQ, batch_size=BATCH),
        optimizer=OptimizerConfig(
            learning_rate=PEAK, min_learning_rate=PEAK / 10, warmup_steps=WARMUP, weight_decay=0.5
        ),
        train=TrainConfig(steps=STEPS, dtype=dtype),
    )


def run_config(base, run_dir, text_file, *, stop_at=None, **checkpoint):
    """`base` as a run in a folder; no checkpoints but the last unless `every` says so."""
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, paths=(str(text_file),)),
        train=dataclasses.replace(base.train, run_dir=str(run_dir), stop_at=stop_at),
        checkpoint=dataclasses.replace(CheckpointConfig(every=100), **checkpoint),
    )


def trainer_of(config):
    """A trainer; it depends on neither the run's folder nor its data, so that runs can share it."""
    train = dataclasses.replace(config.train, run_dir=None, stop_at=None)
    data = dataclasses.replace(config.data, paths=())
    return _trainer(dataclasses.replace(config, train=train, data=data, checkpoint=CheckpointConfig()))


_trainer = cache(Trainer)


def write_text(path):
    """Random letters, a few of them far more often than others, so that experts are used unevenly."""
    rng = np.random.default_rng(0)
    path.write_bytes(bytes(rng.choice(np.frombuffer(b"abcdefgh", np.uint8), 8192, p=[0.6] + [0.4 / 7] * 7)))
    return path


def batch(microbatches=4, seed=0):
    """tokens and targets, int32 [microbatches, rows, SEQ]."""
    tokens = np.random.default_rng(seed).integers(97, 105, (microbatches, BATCH // microbatches, SEQ), np.int32)
    return {"tokens": tokens, "targets": np.roll(tokens, -1, axis=-1)}


def put(trainer, host_batch):
    """Onto the trainer's mesh."""
    return jax.device_put(host_batch, trainer.batch_sharding)


def bits(tree):
    """Every array of a pytree as bytes on the host, under its path; read before a step donates it."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.array(leaf).tobytes() for path, leaf in leaves}


def differing(a, b):
    """Paths of the arrays that are not bitwise equal."""
    a, b = bits(a), bits(b)
    assert a.keys() == b.keys()
    return [path for path in a if a[path] != b[path]]
