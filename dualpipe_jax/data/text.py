"""Text as bytes: files that the user names, or what every Python installation has on its disk.

The corpus without paths is, in this order: the topics of Python's own help (`help("LOOPING")` and the like), by name,
and the standard library's sources, by path, up to `BUDGET_BYTES`. It depends on the Python release and on nothing else.
"""

from __future__ import annotations

import importlib
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

BUDGET_BYTES = 4 << 20
SUFFIXES = (".md", ".py", ".rst", ".txt")
# Not prose and no ordinary code: tables of characters, tests, generated files, third-party packages.
_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data", "test", "tests"}
)
_SEPARATOR = b"\n\n"


def load_bytes(paths: Sequence[str] = ()) -> UInt8[np.ndarray, " bytes"]:
    """The training text, one token a byte.

    Args:
        paths: text files, taken whole, and folders, of which all files with one of `SUFFIXES` are taken in the order
            of their paths; none: the corpus described above.

    Raises:
        ValueError: a path does not exist, a folder has no text file, a file cannot be read or is binary, or there is
            no text in all of them. Names the path.

    Example:
        >>> load_bytes().size > 1_000_000
        True
    """
    documents = [_read(file) for file in find_files(paths)] if paths else list(_python_documents())
    text = _SEPARATOR.join(document for document in documents if document.strip())
    if not text:
        raise ValueError(
            f"there is no text in {', '.join(paths) or 'this Python installation; name files with data.paths'}"
        )
    return np.frombuffer(text, np.uint8)


def find_files(paths: Sequence[str]) -> list[Path]:
    """The files that `paths` (files and folders) stand for, in order.

    Raises:
        ValueError: a path does not exist, or a folder has no text file in it.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_file():
            files.append(path)
            continue
        if not path.is_dir():
            raise ValueError(f"data.paths: there is no file or folder {str(path)!r}")
        found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not found:
            raise ValueError(f"data.paths: folder {str(path)!r} has no file ending in {', '.join(SUFFIXES)}")
        files.extend(found)
    return files


def _read(file: Path) -> bytes:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"data.paths: cannot read {str(file)!r}: {error.strerror}") from error
    if b"\0" in content:
        raise ValueError(f"data.paths: {str(file)!r} has zero bytes in it and seems to be no text")
    return content


def _python_documents() -> Iterator[bytes]:
    left = BUDGET_BYTES
    for document in _help_topics():
        left -= len(document)
        yield document
    for file in _library_sources():
        document = file.read_bytes()
        left -= len(document)
        if left < 0:
            return
        yield document


def _help_topics() -> Iterator[bytes]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions leave it out; the sources are there
        return
    for _, text in sorted(topics.items()):
        yield text.encode()


def _library_sources() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = (file.relative_to(root) for file in root.rglob("*.py"))
    return [root / file for file in sorted(files) if _SKIPPED.isdisjoint(file.parts)]
