"""Parameters to a Hugging Face checkpoint, a file at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from dualpipe_jax.config import ModelConfig
from dualpipe_jax.hf.parts import Part, leaf_shapes, named_leaves, part_shape, parts
from dualpipe_jax.hf.tensors import INDEX, SINGLE, listed
from dualpipe_jax.hf.write_config import hf_config

PyTree = Any
Read = Callable[[str], np.ndarray]
SHARD_BYTES = 2 * 10**9  # of a file, unless one tensor is larger


def save_params(
    folder: str | Path,
    config: ModelConfig,
    params: PyTree | Read,
    *,
    max_length: int,
    dtype: Any = np.float32,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `config.json` and safetensors files (with an index, if more than one) that transformers reads.

    Args:
        params: a tree as `Model.init` makes it, or a function from a leaf's path to its array: then one leaf and the
            tensors of one file are in memory.
        max_length: tokens of context, for `config.json`.
        dtype: of the tensors.

    Raises:
        ValueError: the folder has safetensors files already; or the model or its router biases cannot be said in
            Hugging Face's terms.
    """
    folder = Path(folder)
    hf = hf_config(config, max_length=max_length, dtype=np.dtype(dtype).name)
    old = sorted(path.name for path in folder.glob("*.safetensors*"))
    if old:
        raise ValueError(f"{folder} has {old[0]} already; choose an empty folder")
    read = params if callable(params) else tree_reader(params)
    shapes, wanted = leaf_shapes(config), parts(config)
    _check_left_out(read, shapes.keys() - {part.leaf for part in wanted})
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(wanted, shapes, np.dtype(dtype).itemsize, shard_bytes)
    tensors = _tensors(wanted, read, dtype)
    for file, names in shards.items():
        content = dict(next(tensors) for _ in names)
        safetensors.numpy.save_file(content, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        _write_index(folder, shards, wanted, shapes, np.dtype(dtype).itemsize)
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")


def tree_reader(params: PyTree) -> Read:
    """From a leaf's path to its array."""
    leaves = named_leaves(params)
    return lambda name: np.asarray(leaves[name])


def to_tensors(config: ModelConfig, params: PyTree) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint by name, in the dtypes of `params`: also of gradients, which are of the same form."""
    return dict(_tensors(parts(config), tree_reader(params), None))


def _tensors(wanted: list[Part], read: Read, dtype: Any) -> Iterator[tuple[str, np.ndarray]]:
    leaf, name = np.empty(0), ""
    for part in wanted:
        if part.leaf != name:  # parts are in the order of leaves: each is read once
            leaf, name = read(part.leaf), part.leaf
        region = leaf[part.region]
        tensor = region.T if part.transposed else region
        yield part.name, np.array(tensor, dtype or tensor.dtype, order="C")


def _shards(
    wanted: list[Part], shapes: dict[str, tuple[int, ...]], itemsize: int, shard_bytes: int
) -> dict[str, list[str]]:
    """The names of each file's tensors, in order."""
    groups: list[list[str]] = [[]]
    filled = 0
    for part in wanted:
        size = _size(part, shapes) * itemsize
        if groups[-1] and filled + size > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(part.name)
        filled += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def _size(part: Part, shapes: dict[str, tuple[int, ...]]) -> int:
    return int(np.prod(part_shape(part, shapes[part.leaf]), dtype=np.int64))


def _write_index(
    folder: Path, shards: dict[str, list[str]], wanted: list[Part], shapes: dict[str, tuple[int, ...]], itemsize: int
) -> None:
    total = sum(_size(part, shapes) for part in wanted) * itemsize
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _check_left_out(read: Read, leaves: set[str]) -> None:
    """Leaves that the checkpoint has no place for (router biases) must be zero."""
    lost = [f"{name} is not zero" for name in sorted(leaves) if np.any(read(name))]
    if lost:
        raise ValueError("the model type has no router biases, and these would be lost:" + listed(lost))
