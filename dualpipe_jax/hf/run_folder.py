"""Between a Hugging Face checkpoint and a run folder of the trainer.

Imported, a checkpoint is step 0 of a run that has not begun: parameters, fresh optimizer state, the data's start. The
source's other files (tokenizer, generation settings, its `config.json`) wait in the run folder's `hf` and go out again
with an export, byte for byte.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from dualpipe_jax.checkpoint import Checkpointer, CheckpointError
from dualpipe_jax.config import Config, ModelConfig, from_json, to_json
from dualpipe_jax.data.pipeline import Batches
from dualpipe_jax.data.text import load_bytes
from dualpipe_jax.hf.load import load_params, read_hf_config
from dualpipe_jax.hf.read_config import model_config
from dualpipe_jax.hf.save import SHARD_BYTES, save_params
from dualpipe_jax.hf.write_config import hf_config
from dualpipe_jax.optimizer import make_optimizer
from dualpipe_jax.train_step import TrainState

SOURCE_FILES = "hf"
DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def import_run(source: str | Path, config: Config, *, skip_mtp: bool = False) -> Config:
    """Make the run folder `config.train.run_dir` from a checkpoint folder; memory is that of the parameters, twice.

    Args:
        config: of the run; its model is replaced by the checkpoint's, the rest is what training will use.
        skip_mtp: see `load_params`.

    Returns:
        The run's configuration, as its `config.json` has it.

    Raises:
        ValueError: no run folder is named, or it has checkpoints; the source does not fit, see `load_params`; or the
            text is too short.
        CheckpointError: the checkpoint cannot be written.
    """
    if config.train.run_dir is None:
        raise ValueError("say where to: --train.run-dir")
    run_dir, hf = Path(config.train.run_dir), read_hf_config(source)
    model = model_config(hf)
    config = dataclasses.replace(config, model=dataclasses.replace(model, mtp_depth=0) if skip_mtp else model)
    if (run_dir / "checkpoints").exists():
        raise ValueError(f"{run_dir} has checkpoints already; choose another train.run_dir")
    data = config.data
    batches = Batches(load_bytes(data.paths), seq_len=data.seq_len, batch_size=data.batch_size, seed=data.seed)
    params = load_params(source, config.model, skip_mtp=skip_mtp)
    with Checkpointer(run_dir / "checkpoints", keep=config.checkpoint.keep) as checkpoints:
        checkpoints.save(0, _first_state(params, config), {"data": batches.get_state()})
    (run_dir / "config.json").write_text(to_json(config), encoding="utf-8")
    _copy_others(Path(source), run_dir / SOURCE_FILES)
    return config


def export_run(
    run_dir: str | Path,
    target: str | Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write a run's parameters as a checkpoint folder; a leaf and the tensors of one file are in memory at a time.

    Args:
        step: of the checkpoint; default the newest.
        dtype: float32, bfloat16 or float16; default that of the source, for an imported run, or else float32.

    Returns:
        The step that was written.

    Raises:
        ValueError: there is no such run or step, or see `save_params`.
    """
    run_dir, target = Path(run_dir), Path(target)
    config = _run_config(run_dir)
    step = _complete_step(run_dir, step)
    source = run_dir / SOURCE_FILES
    hf = read_hf_config(source) if (source / "config.json").is_file() else {}
    dtype = dtype or hf.get("dtype") or hf.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ValueError(f"{dtype=} must be one of {', '.join(DTYPES)}")
    length = hf.get("max_position_embeddings", config.data.seq_len)
    read = _leaf_reader(run_dir / "checkpoints" / str(step) / "arrays")
    save_params(target, config.model, read, max_length=length, dtype=DTYPES[dtype], shard_bytes=shard_bytes)
    if source.is_dir():
        _copy_others(source, target, ("config.json",))
        if hf and _same_model(hf, config.model):
            _write_config(source, target, hf, config.model.mtp_depth, dtype)
    return step


def _first_state(params: Any, config: Config) -> TrainState:
    """A state by layer, as the trainer saves it, before the first step."""
    shapes = jax.eval_shape(make_optimizer(config.optimizer, config.train.steps).init, params)
    moments = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)  # AdamW's, and counts: all start at zero
    key: Any = np.asarray(jax.random.key_data(jax.random.key(config.train.seed)))
    step: Any = np.asarray(0, np.int32)
    return TrainState(step, params, moments, key)


def _run_config(run_dir: Path) -> Config:
    try:
        return from_json((run_dir / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{run_dir} is no run folder: config.json: {error.strerror}") from None


def _complete_step(run_dir: Path, step: int | None) -> int:
    folder = run_dir / "checkpoints"
    steps = sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else []
    if not steps:
        raise ValueError(f"{run_dir} has no complete checkpoint")
    if step is not None and step not in steps:
        nearest = min(steps, key=lambda s: abs(s - step))
        raise ValueError(f"{run_dir} has no checkpoint of {step=}; the nearest valid value is {nearest}")
    return steps[-1] if step is None else step


def _leaf_reader(arrays: Path) -> Callable[[str], np.ndarray]:
    """From a parameter's path to its array, read when asked for."""
    checkpointer = ocp.PyTreeCheckpointer()

    def read(name: str) -> np.ndarray:
        path = f"params.{name}"
        args = ocp.args.PyTreeRestore(
            item={path: 0},
            restore_args={path: ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        try:
            return checkpointer.restore(arrays, args=args)[path]
        except Exception as error:
            raise CheckpointError(f"cannot read {path} of {arrays}: {type(error).__name__}: {error}") from error

    return read


def _copy_others(source: Path, target: Path, without: tuple[str, ...] = ()) -> None:
    """Copy the files of a checkpoint folder that are not tensors."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and ".safetensors" not in path.name and path.name not in without:
            shutil.copyfile(path, target / path.name)


def _same_model(hf: dict[str, Any], model: ModelConfig) -> bool:
    """Whether the source's `config.json` still tells the model, multi-token prediction aside."""
    before = dataclasses.replace(model_config(hf), mtp_depth=model.mtp_depth)
    return hf_config(before, max_length=1) == hf_config(model, max_length=1)


def _write_config(source: Path, target: Path, hf: dict[str, Any], mtp_depth: int, dtype: str) -> None:
    """The source's `config.json`: as it is, or with what the export changed."""
    changed = {key: value for key, value in hf.items() if key != "quantization_config"}
    if changed.get("num_nextn_predict_layers"):
        changed["num_nextn_predict_layers"] = mtp_depth
    for key in ("dtype", "torch_dtype"):
        if key in hf:
            changed[key] = dtype
    if changed == hf:
        shutil.copyfile(source / "config.json", target / "config.json")
    else:
        (target / "config.json").write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
