"""How long a rank looks for messages before it sleeps."""

from __future__ import annotations

import os
from pathlib import Path

from ds_ext.errors import TransportError

MOST_SPIN_US = 300.0
SPIN_VARIABLE = "DS_EXT_SPIN_US"


def spin_us(ranks_here: int) -> float:
    """Microseconds to look before a sleep, at most: none where ranks wait for a core."""
    given = os.environ.get(SPIN_VARIABLE)
    if given is not None:
        try:
            return max(0.0, float(given))
        except ValueError:
            raise TransportError(f"{SPIN_VARIABLE} must be a number of microseconds; got {given!r}") from None
    return MOST_SPIN_US if ranks_here <= usable_cores() else 0.0


def usable_cores() -> float:
    """Cores that this process may use, by its affinity and its control group's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores
