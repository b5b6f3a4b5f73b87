"""Process that ``doctor --hostfile`` starts on every host: ``python -m ds_ext.cli.hosts.agent``.

It reads one JSON object per line from standard input, ``{"do": name, ...}``, and answers each with one marked line,
``{"value": ...}`` or ``{"error": text}``. It ends with its input, or after 3 minutes without a request.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...comm.rdma.devices import ACTIVE, choose_port, device_ports
from ...comm.tcp.address import own_address
from ...environment import file_system_of, proc_text
from ...errors import DsExtError
from ...launch.job_facts import checksum, code_facts
from .. import doctor
from . import probe
from .rdma import RdmaProbe
from .ssh import MARK

_IDLE_S = 180
_RESOLVE_S = 5.0


class Agent:
    """Answers to requests, by the name of the method, and RDMA probes between requests."""

    def __init__(self) -> None:
        self._rdma: dict[str, RdmaProbe] = {}

    def facts(self) -> dict[str, Any]:
        return {
            "hostname": socket.gethostname(),
            "findings": [asdict(finding) for finding in doctor.examine()],
            "versions": _versions(),
            "listed_addresses": _listed_addresses(),
            "addresses": [str(address) for _, address in doctor.addresses()],
            "interfaces": {name: str(address) for name, address in reversed(doctor.addresses())},
            "gloo_interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
            "port_range": proc_text("sys/net/ipv4/ip_local_port_range").split(),
            "rdma": any(port.state == ACTIVE for port in device_ports()),
        }

    def resolve(self, names: list[str]) -> dict[str, list[str]]:
        """Return the addresses of host names; empty for a name that is unknown after 5 s."""
        addresses: dict[str, list[str]] = {name: [] for name in names}

        def look_up(name: str) -> None:
            with contextlib.suppress(OSError):
                entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
                addresses[name] = list(dict.fromkeys(str(entry[4][0]) for entry in entries))

        threads = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in names]
        deadline = time.monotonic() + _RESOLVE_S
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return dict(addresses)

    def own_address(self, master: str, rank: int, world_size: int, node_ips: list[str] | None) -> str:
        os.environ.update(MASTER_ADDR=master, WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE="1")
        return own_address(rank, world_size, node_ips)

    def rdma_open(self, key: str, address: str, sends: bool, job: str) -> dict[str, str]:
        """Open one side of a link. Return its port and the data that the other side needs."""
        choice = choose_port(device_ports(), address)
        opened = self._rdma[key] = RdmaProbe(choice, sends)
        greeting = opened.greeting(bytes.fromhex(job)).hex()
        return {"name": choice.name, "network": choice.link_layer, "greeting": greeting}

    def rdma_connect(self, key: str, greeting: str, job: str) -> None:
        self._rdma[key].connect(bytes.fromhex(greeting), bytes.fromhex(job))

    def rdma_send(self, key: str) -> None:
        self._rdma[key].send()

    def rdma_receive(self, key: str) -> float:
        return self._rdma[key].receive()

    def rdma_close(self, key: str) -> None:
        if key in self._rdma:
            self._rdma.pop(key).close()

    def path(self, name: str) -> dict[str, Any]:
        path = Path(name)
        return {
            "is": "folder" if path.is_dir() else "file" if path.is_file() else "missing",
            "bytes": path.stat().st_size if path.is_file() else 0,
            "writable": path.is_dir() and os.access(path, os.W_OK | os.X_OK),
            "file_system": file_system_of(path),
        }

    def create(self, name: str) -> None:
        Path(name).touch(exist_ok=False)


def _listed_addresses() -> list[str]:
    """Return the addresses in the order of ``hostname -I``. DeepSpeed takes the first one of the first host."""
    try:
        done = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split()


def _versions() -> dict[str, str]:
    """Return the versions that ranks compare in the roll call, without the script, and the native code."""
    facts = dict(code_facts())
    facts.pop(f"source of {Path(__file__).name}", None)
    native = "missing"
    with contextlib.suppress(ImportError):
        from ...comm import _native

        native = checksum([Path(str(_native.__file__)).read_bytes()])
    return {"python": platform.python_version(), **facts, "native code": native}


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries that print must not disturb the answers
    agent = Agent()
    actions: dict[str, Callable[..., Any]] = {
        **{name: getattr(agent, name) for name in vars(Agent) if not name.startswith("_")},
        **{"clock": time.time, "exists": os.path.exists, "remove": os.remove},
        **{"listen": probe.listen, "reach": probe.reach, "measure": probe.measure},
    }
    answers.write(f"{MARK}{json.dumps({'value': 'ready'})}\n")
    while True:
        signal.alarm(_IDLE_S)
        line = sys.stdin.readline()
        if not line:
            return 0
        request = json.loads(line)
        try:
            answer = {"value": actions[request.pop("do")](**request)}
        except DsExtError as error:
            answer = {"error": str(error)}
        except OSError as error:
            answer = {"error": error.strerror or str(error)}
        answers.write(f"{MARK}{json.dumps(answer)}\n")


if __name__ == "__main__":
    sys.exit(main())
