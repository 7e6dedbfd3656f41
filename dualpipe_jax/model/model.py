"""The decoder as the pipeline takes it: initial parameters, and first, stage and last functions.

A microbatch is a dict: `tokens` int32 [rows, seq], `targets` int32 [rows, seq] (-1: ignored), `weights` float32
[rows, seq]: what each target's loss counts for, so that the loss is a plain sum (see `with_weights`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dualpipe_jax.config import ModelConfig
from dualpipe_jax.executor import LastOutput, StageFns, StageOutput
from dualpipe_jax.model.block import DenseBlock, MoEBlock, MoEBlockConfig
from dualpipe_jax.model.definition import Definition
from dualpipe_jax.model.layers import Embedding, Head
from dualpipe_jax.model.partition import StageLayers

PyTree = Any


@dataclass(frozen=True)
class Model:
    """Static definition of the decoder.

    Attributes:
        config: the sizes.
        num_sequences: of the whole global batch; balance losses are means over them.
        seq_len: tokens a sequence.
        axis: mesh axis over which experts are sharded and tokens exchanged; None: no exchange.
        recompute: run a layer's forward again in its backward.
    """

    config: ModelConfig
    num_sequences: int
    seq_len: int
    axis: str | None = None
    recompute: bool = False

    @property
    def num_dense(self) -> int:
        """Layers in the dense prefix; a model without experts is all trunk."""
        return min(self.config.num_dense_layers, self.config.num_layers) if self.config.moe else 0

    @property
    def trunk(self) -> Definition:
        if self.config.moe:
            return Definition(MoEBlock, MoEBlockConfig(self.config, self.axis))
        return Definition(DenseBlock, self.config)

    def init(self, key: jax.Array) -> PyTree:
        """Fresh float32 parameters: {"embedding", "dense": [...], "layers": [...], "head"}.

        A layer's values depend on its index in the model alone, not on how layers are dealt to stages.
        """
        dense = Definition(DenseBlock, self.config)
        keys = jax.random.split(key, self.config.num_layers + 2)
        return {
            "embedding": Definition(Embedding, self.config).init(keys[-1]),
            "dense": [dense.init(k) for k in keys[: self.num_dense]],
            "layers": [self.trunk.init(k) for k in keys[self.num_dense : -2]],
            "head": Definition(Head, self.config).init(keys[-2]),
        }

    def stage_fns(self, stages: tuple[StageLayers, ...]) -> StageFns:
        """The model cut into these stages."""
        padded = max(len(s.trunk) for s in stages)
        return StageFns(
            first=self._embed,
            stages=[Stage(self, stage.dense, len(stage.trunk), padded) for stage in stages],
            last=self._loss,
        )

    def _embed(self, shared: PyTree, microbatch: PyTree) -> jax.Array:
        return Definition(Embedding, self.config).apply(shared["embedding"], microbatch["tokens"])

    def _loss(self, shared: PyTree, y: jax.Array, microbatch: PyTree) -> LastOutput:
        table = shared["embedding"]["table"] if self.config.tied_embeddings else None
        logits = Definition(Head, self.config).apply(shared["head"], y, table)
        loss = cross_entropy(logits, microbatch["targets"], microbatch["weights"])
        return LastOutput(loss, {"cross_entropy": loss})


@dataclass(frozen=True)
class Stage:
    """A stage function. Stages with as many layers of the same kinds compare equal, and are compiled once.

    Attributes:
        dense: indices of its layers in `shared["dense"]`.
        num_layers: trunk layers it runs, of `padded` that its parameters have room for.
    """

    model: Model
    dense: tuple[int, ...]
    num_layers: int
    padded: int

    def __call__(self, params: PyTree, shared: PyTree, x: jax.Array, microbatch: PyTree) -> StageOutput:
        dense, trunk = Definition(DenseBlock, self.model.config), self.model.trunk
        wrap = jax.checkpoint if self.model.recompute else lambda f: f
        for i in self.dense:
            x = wrap(dense.apply)(shared["dense"][i], x)
        loss, stats = jnp.float32(0), []
        for layer in params["layers"][: self.num_layers]:
            out = wrap(trunk.apply)(layer, x)
            if self.model.config.moe is None:
                x = out
                continue
            x, router = out
            loss = loss + self._auxiliary_loss(router)
            stats.append({"counts": router.counts, "dropped": router.dropped})
        return StageOutput(x, loss, self._padded_stats(stats))

    def _auxiliary_loss(self, router: Any) -> jax.Array:
        moe, model = self.model.config.moe, self.model
        assert moe is not None
        balance = moe.balance_loss_weight / model.num_sequences * router.balance_loss
        return balance + moe.z_loss_weight / (model.num_sequences * model.seq_len) * router.z_loss

    def _padded_stats(self, stats: list[PyTree]) -> PyTree:
        """Stack over layers, zeros for those that only other stages have."""
        moe = self.model.config.moe
        if moe is None:
            return None
        empty = {"counts": jnp.zeros(moe.num_experts, jnp.int32), "dropped": jnp.int32(0)}
        return jax.tree.map(lambda *a: jnp.stack(a), *stats, *[empty] * (self.padded - len(stats)))


def cross_entropy(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """sum over tokens of -weight * log softmax(logits)[target]; a target of -1 counts nothing.

    Args:
        logits: [rows, seq, vocab], any float dtype; computed in float32.
        targets: int32 [rows, seq]. weights: float32 [rows, seq].
    """
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    return jnp.sum(jnp.where(targets >= 0, weights * losses, 0.0))


def with_weights(batch: PyTree) -> PyTree:
    """Add `weights`: one over the number of valid targets in the *whole* batch, so that summed losses are their mean.

    A batch without a valid target gets weight 0 everywhere: loss 0, no gradient.
    """
    valid = (batch["targets"] >= 0).astype(jnp.float32)
    return {**batch, "weights": valid / jnp.maximum(jnp.sum(valid), 1.0)}


def expert_specs(params: PyTree) -> PyTree:
    """`PartitionSpec` of each leaf of a parameter tree: experts' leading dim over "ep", everything else
    replicated."""

    def spec(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        del leaf
        names = [getattr(k, "key", None) for k in path]
        return PartitionSpec("ep") if "experts" in names else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, params)
