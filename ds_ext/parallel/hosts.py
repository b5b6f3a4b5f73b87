"""Hosts of a job and the ranks on each. Pure arithmetic."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations
from pathlib import Path

from ..errors import ConfigError
from .layout import ParallelLayout

_MOST_HOSTS = 100_000


@dataclass(frozen=True)
class Hosts:
    """Hosts of a job. Ranks are numbered host by host, as ``deepspeed``, ``torchrun`` and Slurm number them.

    Args:
        slots: number of ranks on each host.
        names: name of each host; empty: ``host 0``, ``host 1``, ...
    """

    slots: tuple[int, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.slots or min(self.slots) < 1:
            raise ConfigError(f"hosts: every host needs at least 1 slot (got {self}). Remove empty hosts.")
        if not self.names:
            object.__setattr__(self, "names", tuple(f"host {index}" for index in range(len(self.slots))))
        if len(self.names) != len(self.slots):
            raise ConfigError(
                f"hosts: got {len(self.names)} names for {len(self.slots)} hosts. Name every host."
            )

    @property
    def world_size(self) -> int:
        return self._ends[-1]

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Rank after the last rank of each host."""
        return tuple(accumulate(self.slots))

    def host(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ConfigError(
                f"hosts: {self} has ranks 0 to {self.world_size - 1} (got rank {rank}). Add slots."
            )
        return bisect_right(self._ends, rank)

    def cross(self, ranks: Iterable[int]) -> bool:
        return len({self.host(rank) for rank in ranks}) > 1

    def __str__(self) -> str:
        if len(set(self.slots)) == 1:
            return f"{len(self.slots)}x{self.slots[0]}"
        return ",".join(map(str, self.slots))


def parse_hosts(text: str) -> Hosts:
    """Return the hosts in ``"4x8"`` (4 hosts with 8 ranks each), ``"8,8,4"`` (slots), or a hostfile's path.

    A hostfile has lines ``worker-0 slots=8``, as for ``deepspeed``.
    """
    if Path(text).is_file():
        return _read_hostfile(Path(text))
    if match := re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", text):
        count, slots = map(int, match.groups())
        if not 1 <= count <= _MOST_HOSTS:
            raise ConfigError(f"hosts: must be 1 to {_MOST_HOSTS:,} hosts (got {text!r}). Example: 4x8.")
        return Hosts((slots,) * count)
    if re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", text):
        return Hosts(tuple(map(int, text.split(","))))
    raise ConfigError(
        f"hosts: neither sizes nor an existing hostfile (got {text!r}). Use 4x8 (4 hosts, 8 ranks each), 8,8,4 (slots "
        "of each host), or the path of a hostfile."
    )


def hosts_in_rank_order(ranks: Iterable[tuple[str, Iterable[int]]]) -> Hosts | None:
    """Return the hosts with these (name, ranks); None if the ranks are not numbered host by host."""
    hosts = sorted((sorted(host_ranks), name) for name, host_ranks in ranks)
    order = [rank for host_ranks, _ in hosts for rank in host_ranks]
    if order != list(range(len(order))):
        return None
    return Hosts(tuple(len(host_ranks) for host_ranks, _ in hosts), tuple(name for _, name in hosts))


def _read_hostfile(path: Path) -> Hosts:
    slots: dict[str, int] = {}
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        words = line.strip()
        if not words or words.startswith("#"):
            continue
        match = re.match(r"(\S+)\s+slots=([0-9]{1,6})\b", words)
        if match is None or int(match.group(2)) < 1:
            raise ConfigError(
                f"{path}: line {number}: must be a name and slots=N with N at least 1 (got {words[:60]!r}). Example: "
                '"worker-0 slots=8".'
            )
        name, count = match.group(1), int(match.group(2))
        if name in slots:
            raise ConfigError(
                f"{path}: line {number}: host {name} is repeated. Add up its slots in one line."
            )
        slots[name] = count
    if not slots:
        raise ConfigError(f'{path}: no host. Add lines such as "worker-0 slots=8".')
    return Hosts(tuple(slots.values()), tuple(slots))


# --- second copies of snapshots ---------------------------------------------------------------------------------------


def copy_hosts(layout: ParallelLayout, hosts: Sequence[int]) -> list[int] | None:
    """Return the host that keeps the second copy of every rank's snapshot; None if all ranks are on one host.

    It is the host of the rank's mirror, which trains the same stages in BitPipe, if that is another host; else of the
    next data-parallel rank on another host; else the next host. ``hosts`` are the numbers of every rank's host.
    """
    order = sorted(set(hosts))
    if len(order) == 1:
        return None
    table = layout.groups()
    groups = {
        kind: {rank: group for group in table.get(kind, []) for rank in group} for kind in ("mirror", "data")
    }

    def copy_host(rank: int) -> int:
        for kind in ("mirror", "data"):
            group = groups[kind].get(rank, [rank])
            position = group.index(rank)
            for member in (*group[position + 1 :], *group[:position]):
                if hosts[member] != hosts[rank]:
                    return hosts[member]
        return order[(order.index(hosts[rank]) + 1) % len(order)]

    return [copy_host(rank) for rank in range(len(hosts))]


def fatal_pairs(hosts: Sequence[int], copies: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of hosts whose simultaneous loss takes both copies of a snapshot; see :func:`copy_hosts`."""
    both_copies = {frozenset(pair) for pair in zip(hosts, copies, strict=True)}
    return [pair for pair in combinations(sorted(set(hosts)), 2) if frozenset(pair) in both_copies]
