"""Data and a configuration for the launches, made once a session."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.jobs import ROOT, environment, tiny_config, write_json


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder of a small text."""
    folder = tmp_path_factory.mktemp("corpus")
    text = folder / "text"
    text.mkdir()
    words = [
        "the",
        "pipe",
        "takes",
        "a",
        "batch",
        "and",
        "hands",
        "it",
        "on",
        "until",
        "all",
        "is",
        "through",
    ]
    for number in range(40):
        order = [words[(number * 7 + i * (1 + number % 5)) % len(words)] for i in range(400)]
        (text / f"{number:02}.txt").write_text(" ".join(order) + "\n")
    made = folder / "data"
    verb = [
        sys.executable,
        "-m",
        "ds_ext",
        "prepare",
        "--source",
        str(text),
        "--output",
        str(made),
        "--vocab-size",
        "300",
    ]
    subprocess.run(verb, cwd=ROOT, env=environment(), check=True, capture_output=True, text=True)
    return made


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> Path:
    """BitPipe on two ranks."""
    return write_json(tmp_path / "bitpipe.json", tiny_config(corpus))


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A port that nobody listens on."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    return find
