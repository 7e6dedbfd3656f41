"""What a run is: small frozen dataclasses, their defaults, and their JSON form.

The defaults are the run of `python run/train.py` without a flag: 8 emulated CPU devices, DualPipe over 4 ranks, experts
over 2. The classes hold values and check nothing (but see `MoEConfig`): `dualpipe_jax.validation.check_config` looks at
the whole. Functions elsewhere take the numbers they need, never a whole `Config`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from moe.config import MoEConfig

T = TypeVar("T")


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): keys and values from one narrow vector a token.

    Attributes:
        q_lora_rank: width of the queries' latent vector; none: queries come from the residual stream directly.
        kv_lora_rank: width of the latent vector of keys and values.
        qk_nope_dim: width of a head's query and key without position.
        qk_rope_dim: width of a head's query with rotary position, and of the one such key that all heads share; even.
        v_dim: width of a head's value.
        rope_interleaved: rotary pairs are neighbouring dims, as published; else dim i and i + half.
    """

    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_nope_dim: int = 128
    qk_rope_dim: int = 64
    v_dim: int = 128
    rope_interleaved: bool = True


@dataclass(frozen=True)
class YarnConfig:
    """Rotary frequencies stretched for a longer context (Peng et al., YaRN, 2023, section 3).

    With g(m) = 0.1 m ln(factor) + 1, cosines and sines are multiplied by g(mscale) / g(mscale_all_dim) where both are
    above 0, else by g(1); the softmax' scale of latent attention by g(mscale_all_dim)^2 where that is above 0.

    Attributes:
        factor: context length over the original one.
        original_length: context, in tokens, of the training before.
        beta_fast: pairs that turn more often than this in the original context keep their frequency.
        beta_slow: pairs that turn less often have it divided by `factor`; between the two it is mixed.
        mscale, mscale_all_dim: see above.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: RMSNorm, rotary attention, SwiGLU feed-forward, dense layers first and then mixtures of experts.

    Attention is over grouped heads, or latent: DeepSeek-V2 and V3, Mixtral and Qwen3-MoE are values of this class.

    Attributes:
        vocab_size: number of token ids; 256 for bytes.
        d_model: width of the residual stream.
        num_layers: decoder layers, split over the pipeline's stages.
        num_heads: query heads.
        num_kv_heads: key and value heads, each shared by num_heads / num_kv_heads query heads. Latent attention has
            as many as query heads, whatever this says.
        head_dim: width of a head of grouped attention, even (rotary pairs); none: d_model / num_heads.
        qk_norm: RMSNorm of each head's query and key, with a scale (Qwen3); grouped attention only.
        mla: latent attention; none: grouped.
        d_ff: hidden width of the dense layers' feed-forward.
        num_dense_layers: this many first layers are dense, the others have experts.
        rope_theta: base of the rotary frequencies.
        yarn: how they are stretched; none: not at all.
        norm_eps: added to the mean square in RMSNorm; latent attention's inner norms have 1e-6 always.
        tied_embeddings: use the embedding as the output head too.
        mtp_depth: 1: one more layer predicts the token after the next (multi-token prediction); 0: none does.
        mtp_loss_weight: of that prediction's cross entropy.
        moe: the experts' layers; none: all layers are dense.
    """

    vocab_size: int = 256
    d_model: int = 128
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int | None = None
    qk_norm: bool = False
    mla: LatentAttentionConfig | None = None
    d_ff: int = 384
    num_dense_layers: int = 1
    rope_theta: float = 10_000.0
    yarn: YarnConfig | None = None
    norm_eps: float = 1e-6
    tied_embeddings: bool = False
    mtp_depth: int = 0
    mtp_loss_weight: float = 0.3
    moe: MoEConfig | None = field(
        default_factory=lambda: MoEConfig(d_ff=128, bias_rate=0.01, balance_loss_weight=0.003)
    )

    @property
    def head_width(self) -> int:
        """Of grouped attention: `head_dim`, or what it stands for."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim


@dataclass(frozen=True)
class PipelineConfig:
    """The mesh and the order of work. Devices needed: pp x dp x ep.

    Attributes:
        schedule: the order of work: 1f1b, dualpipe, dualpipe_v, ...
        pp: pipeline ranks.
        dp: copies of the pipeline, each with its own part of the batch and of the optimizer's state.
        ep: ranks that share the experts of a layer; the batch is split over them too.
        num_microbatches: parts that a batch is cut into.
        recompute: recompute a stage's forward in its backward rather than keep its activations.
        slot_rule: where a rank keeps its stages: by depth (fewest programs), steady (same code on all ranks), or auto.
    """

    schedule: str = "dualpipe"
    pp: int = 4
    dp: int = 1
    ep: int = 2
    num_microbatches: int = 8
    recompute: Literal["none", "full"] = "none"
    slot_rule: Literal["auto", "depth", "steady"] = "auto"

    @property
    def num_devices(self) -> int:
        return self.pp * self.dp * self.ep


@dataclass(frozen=True)
class DataConfig:
    """The text and how it is cut.

    Attributes:
        paths: text files, or folders of them; none: the documentation and sources that come with Python.
        seq_len: tokens a sequence.
        batch_size: sequences a step, over the whole mesh.
        seed: of the order of the sequences.
    """

    paths: tuple[str, ...] = ()
    seq_len: int = 128
    batch_size: int = 16
    seed: int = 0


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW; the learning rate rises linearly, then falls as a cosine until the last step.

    Attributes:
        learning_rate: the highest, reached after the warm-up.
        min_learning_rate: the lowest, reached at the last step.
        warmup_steps: steps of the linear rise.
        weight_decay: decoupled, a step: learning_rate * weight_decay * weight.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of squared gradients.
        eps: added to the root of the mean square.
        clip_norm: the gradient's global norm is scaled down to this.
    """

    learning_rate: float = 3e-3
    min_learning_rate: float = 3e-4
    warmup_steps: int = 10
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0


@dataclass(frozen=True)
class TrainConfig:
    """The loop.

    Attributes:
        steps: optimizer steps of the whole run; the learning rate is planned over them.
        stop_at: end after this step and leave the rest to a resumed run.
        seed: of the initial parameters.
        dtype: of activations and matmuls; parameters and sums are float32 always.
        run_dir: folder for metrics, checkpoints and pictures; none: a new one under runs/.
        log_every: show every n-th step where the output is no terminal; metrics.jsonl has them all.
    """

    steps: int = 80
    stop_at: int | None = None
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    run_dir: str | None = None
    log_every: int = 10


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints in the run folder.

    Attributes:
        every: steps from one to the next; the last step is always saved. 0: none at all.
        keep: this many newest are kept.
        resume: go on from the newest complete checkpoint, if the run folder has one.
    """

    every: int = 50
    keep: int = 2
    resume: bool = True


@dataclass(frozen=True)
class Config:
    """Everything that one run needs to be told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


def to_json(config: Config) -> str:
    """The configuration as indented JSON.

    Example:
        >>> from_json(to_json(Config())) == Config()
        True
    """
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str) -> Config:
    """The configuration that `to_json` wrote; what it does not name keeps its default.

    Raises:
        ValueError: not JSON, an unknown name, or a value of another type; names the entry.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the configuration is no JSON: {error}") from None
    return _decode(Config, value, "")


def _decode(kind: Any, value: Any, where: str) -> Any:
    """`value`, as JSON gave it, as a value of type `kind`."""
    if dataclasses.is_dataclass(kind):
        return _decode_fields(typing.cast(type, kind), value, where)
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(options[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is types.UnionType:
        if value is None and type(None) in options:
            return None
        return _decode(next(o for o in options if o is not type(None)), value, where)
    if origin is Literal and value in options:
        return value
    if kind is float and type(value) in (int, float):
        return float(value)
    if type(value) is kind:
        return value
    raise ValueError(f"{where} must be {_spell(kind)}, got {value!r}")


def _decode_fields(kind: type[T], value: Any, where: str) -> T:
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'the configuration'} must be an object, got {value!r}")
    hints = typing.get_type_hints(kind)
    for name in value:
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(hints)}"
            raise ValueError(f"unknown entry {_join(where, name)!r} in the configuration; {hint}")
    return kind(**{name: _decode(hints[name], item, _join(where, name)) for name, item in value.items()})


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _spell(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(kind)))
    return getattr(kind, "__name__", str(kind)) if typing.get_origin(kind) is None else str(kind)
