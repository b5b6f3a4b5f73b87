"""Whether ``fbd.forward_hosts`` are hosts of the job, as far as these are known before it starts. Pure.

For certain only the ranks know it, who ask their own systems (:func:`..engine.fbd.grid.on_hosts`). Before that
there are the names of DeepSpeed's launcher, or of its hostfile: names by which ssh finds hosts. They may be others than
those by which hosts call themselves, addresses for example; then nothing is refused here.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import ConfigError
from ..parallel.fbd import DisaggregatedLayout, host_key, is_address, place_by_hosts
from ..parallel.layout import ParallelLayout

HOSTFILE = Path("/job/hostfile")  # the default of DeepSpeed's launcher
_WORLD_INFO = "--world_info="


def check_forward_hosts(layout: ParallelLayout, forward_hosts: Sequence[str] | None, launched: bool) -> None:
    """Raise ConfigError for forward hosts that are none of the job's, or have too many or too few ranks.

    Args:
        layout: of the world; of any world when nothing is launched.
        forward_hosts: as in the JSON; None: not given.
        launched: whether a launcher has started the ranks, who then know their number.
    """
    if forward_hosts is None or not isinstance(layout, DisaggregatedLayout):
        return
    if launched:
        hosts = hosts_of_ranks(layout.world_size)
        if hosts is not None and comparable(dict.fromkeys(hosts), forward_hosts):
            place_by_hosts(layout, hosts, forward_hosts)
        return
    known = read_hostfile(HOSTFILE)
    if known is not None and comparable(known, forward_hosts):
        short = {host_key(host) for host in known}
        unknown = [host for host in forward_hosts if host_key(host) not in short]
        if unknown:
            raise ConfigError(
                f"fbd.forward_hosts names {unknown[0]!r}, which is not in {HOSTFILE}: its hosts are "
                f"{', '.join(sorted(short))}. Use one of them, or add it there with its slots."
            )


def hosts_of_ranks(world: int) -> list[str] | None:
    """The host of every rank, as it calls itself; None where that is not known before the ranks meet."""
    own = socket.gethostname()
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    if local == str(world):
        return [own] * world
    info = _world_info()
    if info is None or sum(map(len, info.values())) != world or not comparable(info, ()):
        return None
    return [host for host, slots in info.items() for _ in slots]


def comparable(hosts: Mapping[str, object], forward_hosts: Sequence[str]) -> bool:
    """Whether the launcher's names are those by which hosts call themselves, and no aliases or addresses.

    They are when this host, or one of ``forward_hosts``, is among them. An address in ``forward_hosts`` is compared
    with addresses only.
    """
    if any(map(is_address, forward_hosts)) and not any(map(is_address, hosts)):
        return False
    short = {host_key(host) for host in hosts}
    return any(host_key(name) in short for name in (socket.gethostname(), *forward_hosts))


def read_hostfile(path: Path) -> dict[str, int] | None:
    """Host -> slots of DeepSpeed's hostfile ("worker-0 slots=4" a line); None without one, or in another form."""
    try:
        lines = [line.split("#")[0].split() for line in path.read_text(errors="replace").splitlines()]
        return {words[0]: int(words[1].removeprefix("slots=")) for words in lines if words}
    except (OSError, ValueError, IndexError):
        return None  # the launcher says what is wrong with it


def _world_info() -> dict[str, list[int]] | None:
    """Host -> slots in use, which DeepSpeed's launcher on this node, this rank's parent, was started with."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace").split("\0")
        text = next(word.removeprefix(_WORLD_INFO) for word in words if word.startswith(_WORLD_INFO))
        found = json.loads(base64.urlsafe_b64decode(text))
    except (OSError, StopIteration, ValueError, binascii.Error):
        return None
    return found if isinstance(found, dict) else None
