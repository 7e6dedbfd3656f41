"""Compile fast rather than well: the programs of these tests run for milliseconds."""

import jax
import pytest
import tiny_run

from dualpipe_jax import train as train_module


@pytest.fixture(scope="module", autouse=True)
def fast_compilation():
    """A whole module, so that a program compiled in one test is found again in the next."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    return tiny_run.write_text(tmp_path_factory.mktemp("text") / "letters.txt")


@pytest.fixture
def shared_trainers(monkeypatch):
    """Runs that compute the same share one compiled trainer."""
    monkeypatch.setattr(train_module, "Trainer", tiny_run.trainer_of)
