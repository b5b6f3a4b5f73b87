"""Variables of launchers, and processes and files of this host as /proc shows them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ds_ext import environment

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK", "CROSS_RANK")
NAMES += ("GROUP_WORLD_SIZE", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_MAX_RESTARTS")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_a_process_without_a_launcher_is_the_only_rank() -> None:
    assert (environment.rank(), environment.world_size(), environment.local_rank()) == (0, 1, 0)
    assert (environment.local_world_size(), environment.num_hosts(), environment.spans_hosts()) == (
        1,
        1,
        False,
    )
    assert environment.store_address() is None and environment.max_restarts() is None


@pytest.mark.parametrize("local", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
def test_hosts_follow_from_the_ranks_on_this_host(monkeypatch: pytest.MonkeyPatch, local: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (environment.local_world_size(), environment.spans_hosts()) == (8, False)
    monkeypatch.setenv(local, "2")
    assert (environment.local_world_size(), environment.num_hosts()) == (2, 4)
    assert environment.spans_hosts() and environment.host_number(5, 8) == 2
    monkeypatch.setenv("CROSS_SIZE", "3")  # hosts with different numbers of ranks
    monkeypatch.setenv("CROSS_RANK", "1")
    assert environment.num_hosts() == 3 and environment.host_number(5, 8) == 1


def test_variables_that_are_no_numbers_count_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    monkeypatch.setenv("LOCAL_SIZE", "4")
    monkeypatch.setenv("MASTER_PORT", "no")
    assert environment.local_world_size() == 4 and environment.master_port() is None


def test_processes() -> None:
    before_s = time.time()
    command = [sys.executable, "-c", "input()", "a word"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={"MARK": "1"}) as child:
        assert environment.is_running(child.pid) and environment.parent_of(child.pid) == os.getpid()
        assert environment.children_of(os.getpid()).count(child.pid) == 1
        assert child.pid in environment.processes()
        assert environment.start_ticks(child.pid) >= environment.start_ticks(os.getpid())
        while environment.words_of(child.pid) != command:  # until it has replaced this program
            time.sleep(0.01)
        assert environment.variables_of(child.pid) == ["MARK=1"]
        child.kill()
    assert not environment.is_running(child.pid) and environment.words_of(child.pid) == []
    assert environment.started_s() < before_s


def test_threads_and_files(tmp_path: Path) -> None:
    assert environment.thread_states()[threading.get_native_id()] == "R"
    path = tmp_path / "file"
    path.write_text("text")
    with path.open() as file:
        assert file.fileno() in environment.open_files()
        assert environment.path_of(file.fileno()).read_text() == "text"
    assert file.closed and environment.proc_text("no such file") == ""


def test_host() -> None:
    assert environment.has_proc() and environment.file_system_of(Path("/proc/self")) == "proc"
    assert 1 << 20 < environment.available_bytes() < 1 << 50
    assert environment.namespace("pid").startswith("pid:[")
    assert isinstance(environment.has_capability(0), bool)
    addresses = environment.interface_addresses()
    assert {name for name, _ in addresses} <= {name for _, name in socket.if_nameindex()}
    versions = [address.version for _, address in addresses]
    assert 4 in versions and versions == sorted(versions)


def test_versions_of_packages() -> None:
    assert (environment.package_version("pytest") or "")[0].isdecimal()
    assert environment.package_version("no-such-package") is None
