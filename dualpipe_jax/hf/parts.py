"""Which tensor of a Hugging Face checkpoint is which part of which of our parameters.

Our parameters are fewer and larger: one matrix for queries, keys and values, one array for all experts of a layer. Our
matrices are [in, out], theirs [out, in]. Each of their tensors fills one rectangle of one leaf of our tree; together
they fill every leaf (but for router biases, which only DeepSeek-V3 has), so that the same list reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from dualpipe_jax.config import LatentAttentionConfig, ModelConfig
from dualpipe_jax.hf.write_config import model_type
from dualpipe_jax.model.model import Model
from moe.config import MoEConfig

Region = tuple[int | slice, ...]


class Part(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
        name: of the tensor. leaf: of our parameter, as "layers.0.attention.qkv".
        region: of the leaf that the tensor fills; (): all of it.
        transposed: whether the tensor is [out, in] and the region [in, out].
        copy: the region is that of another tensor, which must be equal.
    """

    name: str
    leaf: str
    region: Region = ()
    transposed: bool = True
    copy: bool = False


def parts(config: ModelConfig) -> list[Part]:
    """All tensors of a checkpoint of this model, in the order of our parameters.

    Raises:
        ValueError: no known model type is like it.
    """
    kind = model_type(config)
    found = [Part("model.embed_tokens.weight", "embedding.table", transposed=False)]
    for i in range(config.num_layers):
        ours = f"dense.{i}" if i < config.num_dense_layers else f"layers.{i - config.num_dense_layers}"
        found += _layer(config, kind, f"model.layers.{i}", ours, dense=i < config.num_dense_layers)
    found.append(Part("model.norm.weight", "head.norm.scale", transposed=False))
    if not config.tied_embeddings:
        found.append(Part("lm_head.weight", "head.projection"))
    if config.mtp_depth:
        found += _second_token(config, kind)
    return found


def leaf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each of our parameters by its path, as "layers.0.attention.qkv"; allocates nothing."""
    tree = jax.eval_shape(Model(config, num_sequences=1, seq_len=1).init, jax.random.key(0))
    return {name: leaf.shape for name, leaf in named_leaves(tree).items()}


def named_leaves(tree: object) -> dict[str, jax.Array]:
    """Leaves by their path, as "layers.0.attention.qkv"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def part_shape(part: Part, leaf: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a tensor, from that of its leaf.

    Example:
        >>> part_shape(Part("a", "b", (3, slice(None), slice(2, 6))), (8, 16, 12))
        (4, 16)
    """
    region = np.broadcast_to(np.empty((), np.int8), leaf)[part.region]  # a view: no memory
    return region.shape[::-1] if part.transposed else region.shape


def _layer(config: ModelConfig, kind: str, theirs: str, ours: str, *, dense: bool) -> Iterator[Part]:
    yield Part(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.scale", transposed=False)
    yield Part(f"{theirs}.post_attention_layernorm.weight", f"{ours}.ffn_norm.scale", transposed=False)
    names = f"{theirs}.self_attn", f"{ours}.attention"
    yield from _grouped(config, *names) if config.mla is None else _latent(config.mla, *names)
    if dense:
        for name in ("gate", "up", "down"):
            yield Part(f"{theirs}.mlp.{name}_proj.weight", f"{ours}.ffn.{name}")
    else:
        assert config.moe is not None
        yield from _experts(config.moe, kind, theirs, f"{ours}.moe")


def _second_token(config: ModelConfig, kind: str) -> Iterator[Part]:
    """Multi-token prediction: a layer behind the last, with copies of what it shares with the model."""
    theirs = f"model.layers.{config.num_layers}"
    yield Part(f"{theirs}.enorm.weight", "mtp.token_norm.scale", transposed=False)
    yield Part(f"{theirs}.hnorm.weight", "mtp.hidden_norm.scale", transposed=False)
    yield Part(f"{theirs}.eh_proj.weight", "mtp.projection")
    yield from _layer(config, kind, theirs, "mtp.block", dense=config.moe is None)
    yield Part(f"{theirs}.shared_head.norm.weight", "mtp.norm.scale", transposed=False)
    yield Part(f"{theirs}.embed_tokens.weight", "embedding.table", transposed=False, copy=True)
    tied = config.tied_embeddings
    head = "embedding.table" if tied else "head.projection"
    yield Part(f"{theirs}.shared_head.head.weight", head, transposed=not tied, copy=True)


def _grouped(config: ModelConfig, theirs: str, ours: str) -> Iterator[Part]:
    start = 0
    for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
        stop = start + heads * config.head_width
        yield Part(f"{theirs}.{name}_proj.weight", f"{ours}.qkv", (slice(None), slice(start, stop)))
        start = stop
    yield Part(f"{theirs}.o_proj.weight", f"{ours}.out")
    if config.qk_norm:
        yield Part(f"{theirs}.q_norm.weight", f"{ours}.q_norm.scale", transposed=False)
        yield Part(f"{theirs}.k_norm.weight", f"{ours}.k_norm.scale", transposed=False)


def _latent(mla: LatentAttentionConfig, theirs: str, ours: str) -> Iterator[Part]:
    if mla.q_lora_rank is None:
        yield Part(f"{theirs}.q_proj.weight", f"{ours}.q")
    else:
        yield Part(f"{theirs}.q_a_proj.weight", f"{ours}.q_down")
        yield Part(f"{theirs}.q_a_layernorm.weight", f"{ours}.q_norm.scale", transposed=False)
        yield Part(f"{theirs}.q_b_proj.weight", f"{ours}.q_up")
    yield Part(f"{theirs}.kv_a_proj_with_mqa.weight", f"{ours}.kv_down")
    yield Part(f"{theirs}.kv_a_layernorm.weight", f"{ours}.kv_norm.scale", transposed=False)
    yield Part(f"{theirs}.kv_b_proj.weight", f"{ours}.kv_up")
    yield Part(f"{theirs}.o_proj.weight", f"{ours}.out")


def _experts(moe: MoEConfig, kind: str, theirs: str, ours: str) -> Iterator[Part]:
    mixtral = kind == "mixtral"
    block = f"{theirs}.{'block_sparse_moe' if mixtral else 'mlp'}"
    yield Part(f"{block}.gate.weight", f"{ours}.router.weight")
    if kind == "deepseek_v3":
        yield Part(f"{block}.gate.e_score_correction_bias", f"{ours}.router.bias", transposed=False)
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for e in range(moe.num_experts):
        part = partial(Part, leaf=f"{ours}.experts.gate_up")
        yield part(f"{block}.experts.{e}.{gate}.weight", region=(e, slice(None), slice(0, moe.d_ff)))
        yield part(f"{block}.experts.{e}.{up}.weight", region=(e, slice(None), slice(moe.d_ff, None)))
    for e in range(moe.num_experts):
        yield Part(f"{block}.experts.{e}.{down}.weight", f"{ours}.experts.down", (e,))
    if moe.num_shared_experts:
        for name in ("gate", "up", "down"):
            yield Part(f"{block}.shared_experts.{name}_proj.weight", f"{ours}.shared.{name}")
