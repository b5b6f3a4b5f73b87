"""Spin time: how long a rank polls for messages before it sleeps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ..environment import control_groups
from ..errors import TransportError

MAX_SPIN_US, _MAX_SETTING_US = 300.0, 1e9
SPIN_VARIABLE = "DS_EXT_SPIN_US"
# Files with the quota and the period of a control group, for cgroup versions 1 and 2.
_QUOTA_FILES_1, _QUOTA_FILES_2 = ("cpu.cfs_quota_us", "cpu.cfs_period_us"), ("cpu.max",)


def spin_us(ranks_here: int) -> float:
    """Return the maximum spin time in microseconds: 300, or 0 if the ranks on this host outnumber its usable cores.

    ``DS_EXT_SPIN_US`` replaces it.
    """
    setting = os.environ.get(SPIN_VARIABLE)
    if setting is not None:
        with contextlib.suppress(ValueError):
            if (setting_us := float(setting)) <= _MAX_SETTING_US:  # False for NaN
                return max(0.0, setting_us)
        raise TransportError(
            f"{SPIN_VARIABLE}: must be microseconds up to {_MAX_SETTING_US:g} (got {setting!r})."
        )
    return MAX_SPIN_US if ranks_here <= usable_cores() else 0.0


def usable_cores() -> float:
    """Return the number of cores that this process may use, from its affinity and the quotas of its control groups."""
    cores = float(len(os.sched_getaffinity(0)))
    return min([cores, *cpu_quotas(control_groups(), Path("/sys/fs/cgroup"))])


def cpu_quotas(groups: str, root: Path) -> Iterator[float]:
    """Yield the CPU quotas, in cores, of control groups and all groups above them.

    Args:
        groups: lines of :func:`ds_ext.environment.control_groups`; versions 1 and 2.
        root: mount point. Missing folders are skipped, because a container may see only the end of a path.
    """
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base, files = (root / "cpu", _QUOTA_FILES_1) if controllers else (root, _QUOTA_FILES_2)
        folder = PurePosixPath(path)
        for group in (folder, *folder.parents):
            try:
                words = " ".join((base / group.relative_to("/") / file).read_text() for file in files)
                quota, period = map(int, words.split())
            except (OSError, ValueError):  # "max" means no quota
                continue
            if quota > 0:
                yield quota / period
