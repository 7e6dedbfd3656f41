"""The text: what comes with Python, or the user's files; everything wrong with them is said."""

import numpy as np
import pytest

from dualpipe_jax.data import text


def test_corpus_of_this_python():
    corpus = text.load_bytes()
    assert corpus.dtype == np.uint8
    assert 1_000_000 < corpus.size <= text.BUDGET_BYTES
    content = corpus.tobytes()
    assert content.startswith(b'The "assert" statement'), "help topics come first, in the order of their names"
    assert b"import argparse" in content, "then the library's sources"
    np.testing.assert_array_equal(corpus, text.load_bytes(), "the same each time")


def test_corpus_has_no_tests_and_no_other_packages():
    files = text._library_sources()
    assert len(files) > 100
    assert not [file for file in files if {"test", "tests", "site-packages", "encodings"} & set(file.parts)]


def test_corpus_without_the_help_topics(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)  # as if not installed
    assert text.load_bytes().size > 1_000_000


def test_files_and_folders_in_order(tmp_path):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text("second")
    (folder / "a.md").write_text("first é")
    (folder / "deep" / "c.py").write_text("third")
    (folder / "image.png").write_bytes(b"\0")
    (folder / "empty.txt").write_text(" \n")
    single = tmp_path / "any.suffix"
    single.write_text("last")
    assert text.load_bytes([str(folder), str(single)]).tobytes().decode() == "first é\n\nsecond\n\nthird\n\nlast"


def test_errors_name_the_path(tmp_path):
    with pytest.raises(ValueError, match=r"no file or folder .*missing"):
        text.load_bytes([str(tmp_path / "missing")])
    with pytest.raises(ValueError, match=r"folder .* has no file ending in .md, .py"):
        text.load_bytes([str(tmp_path)])
    blank, binary = tmp_path / "blank.txt", tmp_path / "binary.txt"
    blank.write_text("\n\n")
    binary.write_bytes(b"a\0b")
    with pytest.raises(ValueError, match=r"no text in .*blank.txt"):
        text.load_bytes([str(blank)])
    with pytest.raises(ValueError, match=r"binary.txt' has zero bytes"):
        text.load_bytes([str(binary)])


def test_unreadable_file(tmp_path, monkeypatch):
    file = tmp_path / "secret.txt"
    file.write_text("x")

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(file), "read_bytes", refuse)  # permissions do not bind root
    with pytest.raises(ValueError, match=r"cannot read .*secret.txt.*Permission denied"):
        text.load_bytes([str(file)])
