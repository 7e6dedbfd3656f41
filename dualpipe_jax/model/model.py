"""The decoder as the pipeline takes it: initial parameters, and first, stage and last functions.

A microbatch is a dict: `tokens` int32 [rows, seq], `targets` int32 [rows, seq] (-1: ignored), `weights` float32
[rows, seq]: what each target's loss counts for, so that the loss is a plain sum (see `with_weights`); and, where rows
hold several documents, `segments` int32 [rows, seq] (see `packing_of`).
"""

from __future__ import annotations

from collections.abc import Callable
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
from dualpipe_jax.model.mtp import SecondToken, second_targets
from dualpipe_jax.model.packing import packing_of
from dualpipe_jax.model.partition import StageLayers
from moe.layer import MoEStats

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

    @property
    def second_token(self) -> Definition:
        """Of multi-token prediction, whose layer is of the trunk's kind."""
        return Definition(SecondToken, MoEBlockConfig(self.config, self.axis))

    def init(self, key: jax.Array) -> PyTree:
        """Fresh float32 parameters: {"embedding", "dense": [...], "layers": [...], "head"}, and "mtp" where it is on.

        A layer's values depend on its index in the model alone, not on how layers are dealt to stages.
        """
        dense = Definition(DenseBlock, self.config)
        keys = jax.random.split(key, self.config.num_layers + 2)
        mtp = {"mtp": self.second_token.init(jax.random.fold_in(key, 1))} if self.config.mtp_depth else {}
        return {
            "embedding": Definition(Embedding, self.config).init(keys[-1]),
            "dense": [dense.init(k) for k in keys[: self.num_dense]],
            "layers": [self.trunk.init(k) for k in keys[self.num_dense : -2]],
            "head": Definition(Head, self.config).init(keys[-2]),
            **mtp,
        }

    def stage_fns(self, stages: tuple[StageLayers, ...]) -> StageFns:
        """The model cut into these stages."""
        padded = max(len(s.trunk) for s in stages)
        return StageFns(
            first=self._embed,
            stages=[Stage(self, stage.dense, len(stage.trunk), padded) for stage in stages],
            last=self._loss,
        )

    def logits(self, params: PyTree, tokens: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        """Of all layers, with no pipeline: float32 [rows, seq, vocab].

        Args:
            params: as `init` makes them. tokens, segments: int32 [rows, seq].
        """
        microbatch = {"tokens": tokens} | ({} if segments is None else {"segments": segments})
        stage = StageLayers(tuple(range(len(params["dense"]))), tuple(range(len(params["layers"]))))
        (run,) = self.stage_fns((stage,)).per_stage(1)
        x = run({"layers": params["layers"]}, params, self._embed(params, microbatch), microbatch).y
        return self._head(params, x)

    def _embed(self, shared: PyTree, microbatch: PyTree) -> jax.Array:
        return Definition(Embedding, self.config).apply(shared["embedding"], microbatch["tokens"])

    def _head(self, shared: PyTree, y: jax.Array) -> jax.Array:
        table = shared["embedding"]["table"] if self.config.tied_embeddings else None
        return Definition(Head, self.config).apply(shared["head"], y, table)

    def _loss(self, shared: PyTree, y: jax.Array, microbatch: PyTree) -> LastOutput:
        entropy = cross_entropy(self._head(shared, y), microbatch["targets"], microbatch["weights"])
        if not self.config.mtp_depth:
            return LastOutput(entropy, {"cross_entropy": entropy})
        loss, stats = self._second_token_loss(shared, y, microbatch)
        return LastOutput(entropy + loss, {"cross_entropy": entropy, "mtp": stats})

    def _second_token_loss(self, shared: PyTree, y: jax.Array, microbatch: PyTree) -> tuple[jax.Array, PyTree]:
        """Weighted cross entropy of the token after the next, with the layer's auxiliary losses; and statistics."""
        run = self.wrap(self.second_token.apply)
        following = jnp.roll(microbatch["tokens"], -1, axis=1)  # the last one is not used: it has no target
        embedded = self._embed(shared, {"tokens": following})
        y, router = run(shared["mtp"], y, embedded, packing_of(microbatch))
        head = {**shared["head"], "norm": shared["mtp"]["norm"]}
        logits = self._head({**shared, "head": head}, y)
        entropy = cross_entropy(logits, *second_targets(microbatch))
        loss, stats = self.config.mtp_loss_weight * entropy, {"cross_entropy": entropy}
        if router is None:
            return loss, stats
        stats |= {"counts": router.counts, "dropped": router.dropped}
        return loss + self.auxiliary_loss(router), stats

    def wrap(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        """A layer as it is, or run again in its backward."""
        return jax.checkpoint(layer) if self.recompute else layer

    def auxiliary_loss(self, router: MoEStats) -> jax.Array:
        """What a layer's router adds to the loss."""
        moe = self.config.moe
        assert moe is not None
        balance = moe.balance_loss_weight / self.num_sequences * router.balance_loss
        return balance + moe.z_loss_weight / (self.num_sequences * self.seq_len) * router.z_loss


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
        wrap = self.model.wrap
        packing = packing_of(microbatch)
        for i in self.dense:
            x = wrap(dense.apply)(shared["dense"][i], x, packing)
        loss, stats = jnp.float32(0), []
        for layer in params["layers"][: self.num_layers]:
            out = wrap(trunk.apply)(layer, x, packing)
            if self.model.config.moe is None:
                x = out
                continue
            x, router = out
            loss = loss + self.model.auxiliary_loss(router)
            stats.append({"counts": router.counts, "dropped": router.dropped})
        return StageOutput(x, loss, self._padded_stats(stats))

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
