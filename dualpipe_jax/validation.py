"""All that can be wrong in a configuration, said before anything is compiled: value, rule, nearest valid value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from dualpipe_jax import schedule
from dualpipe_jax.config import (
    Config,
    DataConfig,
    LatentAttentionConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    YarnConfig,
)

BYTE_VALUES = 256


class ConfigError(ValueError):
    """The configuration cannot be run; the message has a line for each problem."""


def check_config(config: Config, num_devices: int | None = None, num_processes: int = 1) -> None:
    """Refuse what cannot run.

    Args:
        num_devices: those that JAX found, over all processes; None: not known yet, and not checked.
        num_processes: of this run; all of them must own devices of the mesh.

    Raises:
        ConfigError: names each wrong value by its flag, the rule, and the nearest valid value.

    Example:
        >>> check_config(Config(), num_devices=1)  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        ConfigError: the mesh pipeline.pp=4 x dp=1 x ep=2 needs 8 devices, found 1: to emulate them on the CPU, set ...
    """
    problems = list(_ranges(config))
    if not problems:  # the rules below divide by these values
        problems += _model(config.model)
        problems += _experts(config)
        problems += _schedule(config) or _batch(config.data, config.pipeline)  # which microbatches divide
        problems += _optimizer(config.optimizer, config.train.steps)
        problems += _devices(config.pipeline, num_devices, num_processes)
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError(f"{len(problems)} problems in the configuration:" + "".join(f"\n  - {p}" for p in problems))


def _ranges(config: Config) -> Iterator[str]:
    model, pipeline, data, train = config.model, config.pipeline, config.data, config.train
    yield from _at_least(1, "model", model, "d_model", "num_layers", "num_heads", "num_kv_heads", "d_ff")
    yield from _at_least(0, "model", model, "num_dense_layers")
    yield from _at_least(BYTE_VALUES, "model", model, "vocab_size")  # tokens are bytes
    yield from _at_least(1, "pipeline", pipeline, "pp", "dp", "ep", "num_microbatches")
    yield from _at_least(1, "data", data, "seq_len", "batch_size")
    yield from _at_least(0, "data", data, "seed")
    yield from _at_least(1, "train", train, "steps", "log_every")
    yield from _at_least(0, "train", train, "seed")
    yield from _at_least(0, "optimizer", config.optimizer, "warmup_steps")
    yield from _at_least(0, "checkpoint", config.checkpoint, "every")
    yield from _at_least(1, "checkpoint", config.checkpoint, "keep")
    if train.stop_at is not None and not 1 <= train.stop_at <= train.steps:
        nearest = min(max(train.stop_at, 1), train.steps)
        yield (
            f"train.stop_at={train.stop_at} must be in 1..{train.steps} (train.steps); "
            f"the nearest valid value is {nearest}"
        )


def _at_least(least: int, section: str, values: object, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(values, name)
        if value < least:
            yield f"{section}.{name}={value} must be at least {least}; the nearest valid value is {least}"


def nearest_multiples(value: int, factor: int) -> str:
    """The multiples of `factor` around `value`, in words.

    Example:
        >>> nearest_multiples(20, 16), nearest_multiples(3, 16)
        ('the nearest valid values are 16 and 32', 'the nearest valid value is 16')
    """
    below = value // factor * factor
    if not below:
        return f"the nearest valid value is {factor}"
    return f"the nearest valid values are {below} and {below + factor}"


def nearest_divisor(value: int, whole: int) -> int:
    """The divisor of `whole` that is nearest to `value`; of two, the smaller.

    Example:
        >>> nearest_divisor(3, 8), nearest_divisor(7, 8)
        (2, 8)
    """
    return min((d for d in range(1, whole + 1) if whole % d == 0), key=lambda d: (abs(d - value), d))


def _model(model: ModelConfig) -> Iterator[str]:
    yield from _grouped_attention(model) if model.mla is None else _latent_attention(model, model.mla)
    if model.num_dense_layers > model.num_layers:
        yield (
            f"model.num_dense_layers={model.num_dense_layers} is more than model.num_layers={model.num_layers}; "
            f"the nearest valid value is {model.num_layers}"
        )
    yield from _positive({"model.rope_theta": model.rope_theta, "model.norm_eps": model.norm_eps})
    if model.mtp_depth not in (0, 1):
        yield f"model.mtp_depth={model.mtp_depth} must be 0 or 1; the nearest valid value is {int(model.mtp_depth > 0)}"
    if not 0 <= model.mtp_loss_weight < math.inf:
        value = model.mtp_loss_weight
        yield f"model.mtp_loss_weight={value} must be finite and at least 0; the nearest valid value is 0"
    if model.rope_theta == 1.0:
        yield "model.rope_theta=1.0 gives all rotary pairs one frequency; a usual value is 10000.0"
    if model.yarn is not None:
        yield from _yarn(model.yarn)


def _grouped_attention(model: ModelConfig) -> Iterator[str]:
    heads, kv_heads, width = model.num_heads, model.num_kv_heads, model.d_model
    if model.head_dim is None and width % (2 * heads):  # rotary embedding turns pairs of dims
        yield (
            f"model.d_model={width} must be a multiple of 2 x model.num_heads={heads} (heads of equal, even width) "
            f"where model.head_dim is not given; {nearest_multiples(width, 2 * heads)}"
        )
    if model.head_dim is not None:
        yield from _even("model.head_dim", model.head_dim)
    if heads % kv_heads:
        yield (
            f"model.num_kv_heads={kv_heads} must divide model.num_heads={heads}; "
            f"the nearest valid value is {nearest_divisor(kv_heads, heads)}"
        )


def _latent_attention(model: ModelConfig, mla: LatentAttentionConfig) -> Iterator[str]:
    yield from _at_least(1, "model.mla", mla, "kv_lora_rank", "qk_nope_dim", "v_dim")
    if mla.q_lora_rank is not None:
        yield from _at_least(1, "model.mla", mla, "q_lora_rank")
    yield from _even("model.mla.qk_rope_dim", mla.qk_rope_dim)
    if model.head_dim is not None:
        yield f"model.head_dim={model.head_dim} is of grouped attention; with model.mla the valid value is none"
    if model.qk_norm:
        yield "model.qk_norm=True is of grouped attention; with model.mla the valid value is False"


def _even(name: str, value: int) -> Iterator[str]:
    if value < 2 or value % 2:
        yield f"{name}={value} must be even and at least 2 (rotary pairs); {nearest_multiples(max(value, 1), 2)}"


def _yarn(yarn: YarnConfig) -> Iterator[str]:
    yield from _at_least(1, "model.yarn", yarn, "original_length")
    yield from _positive({"model.yarn.beta_slow": yarn.beta_slow})
    if not 1 <= yarn.factor < math.inf:
        yield f"model.yarn.factor={yarn.factor} must be finite and at least 1; the nearest valid value is 1"
    if not yarn.beta_slow < yarn.beta_fast < math.inf:
        yield (
            f"model.yarn.beta_fast={yarn.beta_fast} must be finite and above beta_slow={yarn.beta_slow}; "
            "usual values are 32 and 1"
        )
    for name in ("mscale", "mscale_all_dim"):
        if not 0 <= getattr(yarn, name) < math.inf:
            value = getattr(yarn, name)
            yield f"model.yarn.{name}={value} must be finite and at least 0; the nearest valid value is 0"


def _schedule(config: Config) -> list[str]:
    p, num_layers = config.pipeline, config.model.num_layers
    try:
        stages = schedule.build(p.schedule, num_ranks=p.pp, num_microbatches=p.num_microbatches).placement.num_stages
    except ValueError as error:
        return [f"pipeline: {error}"]
    if num_layers >= stages:
        return []
    return [
        f"model.num_layers={num_layers} is fewer than the {stages} stages of pipeline.schedule={p.schedule} on "
        f"pipeline.pp={p.pp} ranks, and a stage cannot be empty; the nearest valid value is {stages}"
    ]


def _experts(config: Config) -> Iterator[str]:
    ep, moe = config.pipeline.ep, config.model.moe
    if moe is not None and moe.num_experts % ep:
        yield (
            f"pipeline.ep={ep} must divide model.moe.num_experts={moe.num_experts}; "
            f"the nearest valid value is {nearest_divisor(ep, moe.num_experts)}"
        )


def _batch(data: DataConfig, p: PipelineConfig) -> Iterator[str]:
    parts = p.num_microbatches * p.dp * p.ep
    if data.batch_size % parts:
        yield (
            f"data.batch_size={data.batch_size} must be a multiple of pipeline.num_microbatches x dp x ep = "
            f"{p.num_microbatches} x {p.dp} x {p.ep} = {parts}; {nearest_multiples(data.batch_size, parts)}"
        )


def _optimizer(o: OptimizerConfig, steps: int) -> Iterator[str]:
    yield from _positive(
        {"optimizer.learning_rate": o.learning_rate, "optimizer.eps": o.eps, "optimizer.clip_norm": o.clip_norm}
    )
    if o.learning_rate > 0 and not 0 <= o.min_learning_rate <= o.learning_rate:
        yield (
            f"optimizer.min_learning_rate={o.min_learning_rate} must be in 0..{o.learning_rate} "
            f"(optimizer.learning_rate); the nearest valid value is "
            f"{0.0 if o.min_learning_rate < 0 else o.learning_rate}"
        )
    if not (o.weight_decay >= 0 and math.isfinite(o.weight_decay)):
        yield f"optimizer.weight_decay={o.weight_decay} must be finite and at least 0; the nearest valid value is 0"
    for name, beta, usual in (("beta1", o.beta1, 0.9), ("beta2", o.beta2, 0.95)):
        if not 0 <= beta < 1:
            yield f"optimizer.{name}={beta} must be at least 0 and below 1; a usual value is {usual}"
    if o.warmup_steps > steps:
        yield (
            f"optimizer.warmup_steps={o.warmup_steps} is more than train.steps={steps}; "
            f"the nearest valid value is {steps}"
        )


def _positive(values: dict[str, float]) -> Iterable[str]:
    return [f"{name}={value} must be finite and above 0" for name, value in values.items() if not 0 < value < math.inf]


def _devices(p: PipelineConfig, found: int | None, num_processes: int) -> Iterator[str]:
    mesh = f"the mesh pipeline.pp={p.pp} x dp={p.dp} x ep={p.ep}"
    if p.num_devices % num_processes:
        yield (
            f"{mesh} has {p.num_devices} devices, which {num_processes} processes cannot share evenly; "
            f"the nearest valid number of processes is {nearest_divisor(num_processes, p.num_devices)}"
        )
    elif found is not None and found < p.num_devices:
        per_process = p.num_devices // num_processes
        yield (
            f"{mesh} needs {p.num_devices} devices, found {found}: "
            f"to emulate them on the CPU, set JAX_PLATFORMS=cpu and "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={per_process}; or choose pp, dp and ep "
            f"whose product is at most {found}, as --preset debug_one_device does"
        )
    elif found is not None and num_processes > 1 and found != p.num_devices:
        yield (
            f"{mesh} uses {p.num_devices} of the {found} devices that {num_processes} processes have, so that some "
            f"processes may have none: give each process {p.num_devices // num_processes} devices"
        )
