"""Cores that a rank may use: affinity, quotas of control groups, and other ranks of the host."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ds_ext.comm import spin
from ds_ext.comm.spin import cpu_quotas, usable_cores
from ds_ext.engine.start import threads_of_rank


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_quotas_of_all_groups_up_to_the_root(tmp_path: Path) -> None:
    write(tmp_path / "jobs" / "cpu.max", "150000 100000\n")
    write(tmp_path / "jobs" / "mine" / "cpu.max", "max 100000\n")
    assert list(cpu_quotas("0::/jobs/mine\n", tmp_path)) == [1.5]
    assert list(cpu_quotas("0::/other\n", tmp_path)) == []


def test_quotas_of_version_1(tmp_path: Path) -> None:
    groups = "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n"
    write(tmp_path / "cpu" / "cpu.cfs_quota_us", "50000\n")  # the root is the container's group
    write(tmp_path / "cpu" / "cpu.cfs_period_us", "100000\n")
    assert list(cpu_quotas(groups, tmp_path)) == [0.5]
    write(tmp_path / "cpu" / "cpu.cfs_quota_us", "-1\n")
    assert list(cpu_quotas(groups, tmp_path)) == []


def test_affinity_limits_the_cores() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(before)])
    try:
        assert 0 < usable_cores() <= 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("own", "of_launcher", "ranks", "quotas", "threads"),
    [
        (range(8), range(8), 2, [], 4),
        (range(8), range(8), 16, [], 1),
        (range(8), range(8), 2, [3.0], 1),
        (range(4, 8), range(8), 2, [], 4),  # pinned by the launcher or a wrapper
    ],
)
def test_threads_of_a_rank(
    monkeypatch: pytest.MonkeyPatch,
    own: range,
    of_launcher: range,
    ranks: int,
    quotas: list[float],
    threads: int,
) -> None:
    wrapper, launcher = -1, -2
    monkeypatch.setattr(sys.modules[threads_of_rank.__module__], "find_launcher", lambda: (wrapper, launcher))
    affinity = {0: set(own), launcher: set(of_launcher)}
    monkeypatch.setattr(os, "sched_getaffinity", affinity.__getitem__)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(spin, "cpu_quotas", lambda groups, root: iter(quotas))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert threads_of_rank() == threads
