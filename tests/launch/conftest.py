"""Data and a configuration for the launches, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.jobs import find_free_port, prepare_bert_corpus, prepare_corpus, tiny_config, write_json


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder of a small text."""
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def bert_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder of small sentences."""
    return prepare_bert_corpus(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> Path:
    """BitPipe on two ranks."""
    return write_json(tmp_path / "bitpipe.json", tiny_config(corpus))


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Return the function that finds a free port."""
    return find_free_port
