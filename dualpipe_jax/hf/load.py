"""Parameters from a Hugging Face checkpoint, one tensor at a time."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from dualpipe_jax.config import ModelConfig
from dualpipe_jax.hf.parts import Part, leaf_shapes, named_leaves, part_shape, parts
from dualpipe_jax.hf.read_config import model_config
from dualpipe_jax.hf.tensors import Tensors, listed
from dualpipe_jax.model.model import Model

PyTree = Any
Allocate = Callable[[str, tuple[int, ...], np.dtype], np.ndarray]
SCALE = "_scale_inv"  # the suffix of the name of an 8-bit weight's scales
BLOCK = 128  # a scale for each block of 128 x 128 weights (DeepSeek-V3 report, section 3.3.2)
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")  # follows from the configuration


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The folder's `config.json`.

    Raises:
        ValueError: there is none, it is no JSON object, or its 8-bit weights are not in blocks of 128 x 128.
    """
    path = Path(folder) / "config.json"
    try:
        hf = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(hf, dict):
        raise ValueError(f"{path} must be an object, got {type(hf).__name__}")
    quantized = hf.get("quantization_config")
    if quantized and (quantized.get("quant_method") != "fp8" or quantized.get("weight_block_size") != [BLOCK, BLOCK]):
        raise ValueError(f"{path} has quantization_config={quantized}; known is fp8 with weight_block_size [128, 128]")
    return hf


def load_config(folder: str | Path) -> ModelConfig:
    """The model of a checkpoint folder; see `model_config`."""
    return model_config(read_hf_config(folder))


def load_params(
    folder: str | Path,
    config: ModelConfig | None = None,
    *,
    dtype: Any = np.float32,
    allocate: Allocate | None = None,
    skip_mtp: bool = False,
) -> PyTree:
    """The parameter tree of `Model.init`, as numpy arrays, from a folder of safetensors files.

    Tensors are cast to `dtype`; 8-bit weights are multiplied by their blocks' scales before. Memory is that of the
    result and one tensor.

    Args:
        config: the model; default that of the folder's `config.json`.
        dtype: of the result.
        allocate: (leaf's path, shape, dtype) -> the array to fill; default in memory.
        skip_mtp: leave out the tensors of multi-token prediction, which are layers behind the last.

    Raises:
        ValueError: tensors are missing, too many or of another shape: lists them; the files cannot be read; or what
            multi-token prediction shares with the model is not the same there.
    """
    config = load_config(folder) if config is None else config
    if skip_mtp:
        config = dataclasses.replace(config, mtp_depth=0)
    tensors, shapes, wanted = Tensors(folder), leaf_shapes(config), parts(config)
    check_tensors(tensors, wanted, shapes, config.num_layers if skip_mtp else None)
    make = allocate or (lambda _, shape, dtype: np.empty(shape, dtype))
    leaves = {name: make(name, shape, np.dtype(dtype)) for name, shape in shapes.items()}
    for part in wanted:
        tensor = dequantized(tensors, part.name)
        value = (tensor.T if part.transposed else tensor).astype(dtype)
        if part.copy and not np.array_equal(value, leaves[part.leaf][part.region]):
            raise ValueError(f"{part.name} of {folder} must be equal to the tensor that it is a copy of")
        leaves[part.leaf][part.region] = value
    for name in leaves.keys() - {part.leaf for part in wanted}:
        leaves[name][...] = 0  # a router's bias, of models that have none
    tree = jax.eval_shape(Model(config, num_sequences=1, seq_len=1).init, jax.random.key(0))
    return jax.tree.unflatten(jax.tree.structure(tree), [leaves[name] for name in named_leaves(tree)])


def dequantized(tensors: Tensors, name: str) -> np.ndarray:
    """A tensor as it is; an 8-bit one as float32: each block of 128 x 128 times its scale."""
    tensor = tensors[name]
    if tensors.entries[name].dtype != ml_dtypes.float8_e4m3fn:
        return tensor
    scale = np.repeat(np.repeat(tensors[name + SCALE], BLOCK, axis=0), BLOCK, axis=1)
    return tensor.astype(np.float32) * scale[: tensor.shape[0], : tensor.shape[1]]


def check_tensors(
    tensors: Tensors, wanted: Iterable[Part], shapes: dict[str, tuple[int, ...]], mtp_from: int | None = None
) -> None:
    """Refuse a checkpoint that has other tensors than those wanted.

    Args:
        shapes: of our leaves. mtp_from: layers from this one on may be there and are not looked at.

    Raises:
        ValueError: lists what is missing, too many, or of another shape or kind.
    """
    names = {part.name: part_shape(part, shapes[part.leaf]) for part in wanted}
    problems = [f"missing: {name} {list(shape)}" for name, shape in names.items() if name not in tensors]
    scales: dict[str, tuple[int, ...]] = {}
    for name, shape in names.items():
        if name not in tensors:
            continue
        entry = tensors.entries[name]
        if entry.shape != shape:
            problems.append(f"different: {name} is {list(entry.shape)}, not {list(shape)}")
        if entry.dtype == ml_dtypes.float8_e4m3fn and len(shape) == 2:
            scales[name + SCALE] = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
        elif not jax.numpy.issubdtype(entry.dtype, np.floating) or entry.dtype.itemsize < 2:
            problems.append(f"different: {name} is {entry.dtype}, not a float of 16 bits or more, or float8_e4m3fn")
    for name, shape in scales.items():
        got = tensors.entries[name].shape if name in tensors else None
        if got != shape:
            problems.append(f"missing: {name} {list(shape)}" if got is None else f"different: {name} is {list(got)}")
    extra = [name for name in tensors if name not in names and name not in scales and not _DERIVED.fullmatch(name)]
    if mtp_from is not None:
        extra = [name for name in extra if (_layer_number(name) or 0) < mtp_from]
    problems += [f"not known: {name} {list(tensors.entries[name].shape)}" for name in extra]
    if problems:
        raise ValueError(f"the checkpoint {tensors.folder} does not fit its model:" + listed(problems))


def _layer_number(name: str) -> int | None:
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found.group(1)) if found else None
