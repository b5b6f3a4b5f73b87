"""A lock that a killed build of a torch extension leaves is named before torch waits for it."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from ds_ext.engine.deepspeed_api.device import announce_locks

# A module of Python without torch's headers, which compiles in a second.
SOURCE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "NAME"};
PyMODINIT_FUNC PyInit_NAME(void) { return PyModule_Create(&module); }
"""
WAIT_S = 30


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return the function that builds an extension of a name, or loads it if it is built."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(FileBaton, "wait", FileBaton.wait)  # restored after the test

    def build(name: str) -> Any:
        source = tmp_path / "tiny.cpp"
        source.write_text(SOURCE.replace("NAME", name))
        return cpp_extension.load(name, [str(source)])

    return build


@pytest.mark.skipif(
    not hasattr(cpp_extension, "FileBaton"), reason="from torch 2.14 on, a lock ends with its process"
)
@pytest.mark.parametrize(
    ("age_s", "local_rank", "is_named"), [(3600, 1, True), (3600, 0, True), (0, 0, True), (0, 1, False)]
)
def test_a_lock_is_named_before_the_wait(
    build: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    age_s: int,
    local_rank: int,
    is_named: bool,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    announce_locks()
    announce_locks()
    name = f"tiny_{age_s}_{local_rank}"  # torch renames an extension that it has loaded from another source
    assert build(name).__name__ == name and not caplog.records
    lock = tmp_path / "extensions" / name / "lock"
    lock.touch()
    created = time.time() - age_s
    os.utime(lock, (created, created))
    with caplog.at_level(logging.WARNING, "ds_ext"):
        waiting = threading.Thread(target=build, args=(name,), daemon=True)
        waiting.start()
        limit = time.monotonic() + WAIT_S
        while is_named and not caplog.records and time.monotonic() < limit:
            time.sleep(0.01)
        waiting.join(0.5)
        assert waiting.is_alive() and lock.exists()  # the lock of another process stays
        lock.unlink()
        waiting.join(WAIT_S)
    assert not waiting.is_alive()
    named = [re.findall(r"\S+/lock\b", record.getMessage()) for record in caplog.records]
    assert named == ([[str(lock)]] if is_named else [])
