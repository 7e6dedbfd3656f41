"""A text to train on, and trainers that are compiled once."""

import pytest
import tiny_run

from dualpipe_jax import train as train_module


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    return tiny_run.write_text(tmp_path_factory.mktemp("text") / "letters.txt")


@pytest.fixture
def shared_trainers(monkeypatch):
    """Runs that compute the same share one compiled trainer."""
    monkeypatch.setattr(train_module, "Trainer", tiny_run.trainer_of)
