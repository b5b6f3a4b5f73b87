"""Fixtures of several files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.trace_folders import PRICED, write_traces


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of traces."""
    folder = tmp_path_factory.mktemp("traces")
    write_traces(folder, PRICED)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it that may be damaged."""
    return shutil.copytree(whole, tmp_path / "copy")
