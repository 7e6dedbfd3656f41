"""A folder of safetensors files, read one tensor at a time.

Files are mapped, not loaded: a tensor costs memory only while it is used. (The safetensors package does not read 8-bit
floats into numpy; the format is a length, a JSON header and the bytes: https://github.com/huggingface/safetensors.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class Entry(NamedTuple):
    """Where a tensor is. Attributes: offset: of its first byte in the file."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


class Tensors(Mapping[str, np.ndarray]):
    """All tensors of a folder by name, as read-only arrays over the mapped files.

    Args:
        folder: with `model.safetensors`, or with `model.safetensors.index.json` and the files that it names.

    Raises:
        ValueError: there are neither or both, a file is cut short or no safetensors file, a name is twice, or the index
            and the files do not agree.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.entries: dict[str, Entry] = {}
        index = self._index()
        for file in [SINGLE] if index is None else index:
            for name, entry in _header(self.folder / file).items():
                if name in self.entries:
                    raise ValueError(f"{name} is in {self.entries[name].file.name} and in {file}")
                self.entries[name] = entry
        if index is not None:
            self._check_index(index)

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self.entries[name]
        if 0 in entry.shape:
            return np.zeros(entry.shape, entry.dtype)
        return np.memmap(entry.file, entry.dtype, "r", entry.offset, entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def _index(self) -> dict[str, set[str]] | None:
        """The names of the tensors in each file, as the index has them."""
        path = self.folder / INDEX
        single = (self.folder / SINGLE).is_file()
        if single == path.is_file():
            both = f"both {SINGLE} and {INDEX}; keep the one that is meant" if single else f"no {SINGLE} and no {INDEX}"
            raise ValueError(f"{self.folder} has {both}")
        if single:
            return None
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no index of safetensors files: {error!r}") from None
        files: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            files.setdefault(file, set()).add(name)
        return files

    def _check_index(self, index: dict[str, set[str]]) -> None:
        found = {(entry.file.name, name) for name, entry in self.entries.items()}
        wanted = {(file, name) for file, names in index.items() for name in names}
        problems = [f"{file} lacks {name}" for file, name in sorted(wanted - found)]
        problems += [f"{file} has {name}, which the index lacks" for file, name in sorted(found - wanted)]
        if problems:
            raise ValueError(f"{self.folder / INDEX} does not fit its files:" + listed(problems))


def _header(file: Path) -> dict[str, Entry]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError(f"{file} is no safetensors file, or cut short: its header should have {length} bytes")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no safetensors file: {error}") from None
    header.pop("__metadata__", None)
    return {name: _entry(file, size, 8 + length, name, info) for name, info in header.items()}


def _entry(file: Path, size: int, start: int, name: str, info: dict[str, Any]) -> Entry:
    if info["dtype"] not in _DTYPES:
        raise ValueError(f"{name} in {file} is {info['dtype']}; known are {', '.join(_DTYPES)}")
    entry = Entry(file, np.dtype(_DTYPES[info["dtype"]]), tuple(info["shape"]), start + info["data_offsets"][0])
    end = entry.offset + int(np.prod(entry.shape, dtype=np.int64)) * entry.dtype.itemsize
    if end != start + info["data_offsets"][1] or end > size:
        raise ValueError(f"{file} is cut short or damaged: {name} should end at byte {end}, the file has {size}")
    return entry


def listed(problems: list[str], most: int = 40) -> str:
    """A line for each problem, and how many more there are."""
    rest = [f"... and {len(problems) - most} more"] if len(problems) > most else []
    return "".join(f"\n  - {problem}" for problem in problems[:most] + rest)
