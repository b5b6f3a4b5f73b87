"""Hosts for the tests of this folder, which run in `make test-hosts` only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hosts.cluster import Cluster, cluster
from tests.hosts.network import NoHosts
from tests.launch.jobs import prepare_corpus

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder outside `make test-hosts`."""
    if os.environ.get("DS_EXT_TEST_HOSTS") != "1":
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(
                    pytest.mark.skip(reason="starts hosts with sshd for minutes: run `make test-hosts`")
                )


@pytest.fixture
def hosts() -> Iterator[Callable[..., Cluster]]:
    """Start a cluster: hosts(count, networks=1). Skips the test where that is refused."""
    with contextlib.ExitStack() as stack:

        def start(count: int, networks: int = 1) -> Cluster:
            try:
                return stack.enter_context(cluster(count, networks))
            except NoHosts as error:
                pytest.skip(f"no hosts: {error}")

        yield start


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a small text."""
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder in which the launchers start; it has the variables that DeepSpeed's launcher takes to all hosts."""
    (tmp_path / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\nDS_EXT_LOG_LEVEL=info\n")
    return tmp_path
