"""Data and a configuration for the launches, made once a session."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.jobs import prepare_corpus, tiny_config, write_json


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder of a small text."""
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> Path:
    """BitPipe on two ranks."""
    return write_json(tmp_path / "bitpipe.json", tiny_config(corpus))


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Return a free port below the ephemeral range, from which the system takes ports of other connections."""
    try:
        first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        first_ephemeral = 32768
    ports = range(10_000, first_ephemeral) if first_ephemeral > 11_000 else range(60_000, 65_000)

    def find() -> int:
        while True:
            with socket.socket() as probe, contextlib.suppress(OSError):
                port = random.SystemRandom().choice(ports)
                probe.bind(("", port))
                return port

    return find
