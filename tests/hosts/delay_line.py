"""Switch between hosts with a delay, a rate and losses for each directed pair, in a separate process over TAP devices.

netem needs a kernel module that many machines lack; TAP devices need only /dev/net/tun.

A frame of b bytes from host a to host b arrives after

    max(0, end of the previous frame on that link - now) + 8 b / rate + delay

Each directed pair of hosts is a separate link, so messages to two hosts do not share a rate. The queue of a link is
unlimited: only losses drop frames. Frames of a link stay in order. A frame has at most 60,014 bytes, so most messages
of small models are one frame.

Accuracy on two cores, measured with echoes of 100 bytes over TCP: a delay is 0.04 to 0.3 ms too long in the median,
most of which is the time that idle processes need to wake up, and up to 2 ms too long where other processes occupy both
cores. A rate of 100 Mbit/s passes 95 Mbit/s of payload, 1 Gbit/s 740 Mbit/s. Without a limit, 2.5 Gbit/s pass.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.hosts.network import NoHosts, inside

MTU = 60_000
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x2, 0x1000
_BROADCAST_BIT = 1  # of the first byte of a MAC address
_SPIN_S = 100e-6


@dataclass(frozen=True)
class Link:
    """Properties of a directed link.

    Args:
        delay_ms: time that every frame takes.
        rate_mbit: megabits per second; 0: unlimited.
        loss: fraction of frames that are lost.
    """

    delay_ms: float = 0.0
    rate_mbit: float = 0.0
    loss: float = 0.0


def mac(network: int, host: int) -> str:
    """Return the MAC address of a host's interface."""
    return f"02:00:00:00:{network:02x}:{host:02x}"


def interface(network: int) -> str:
    """Return the name of the hosts' interface to a network."""
    return f"dsx{network}"


class DelayLine:
    """Switch in a separate process. All links start without delay, limit and losses.

    Args:
        namespaces: file of the network namespace of each host.
        networks: number of networks; every host has an interface to each.

    Raises:
        NoHosts: if TAP devices are missing or refused.
    """

    def __init__(self, namespaces: Sequence[str], networks: int = 1) -> None:
        self._count = len(namespaces)
        words = [sys.executable, "-m", "tests.hosts.delay_line", str(networks), *namespaces]
        self._process = subprocess.Popen(
            words,
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        if not self._process.stdout.readline():
            reason = self._process.stderr.read().strip().splitlines()
            self.close()
            raise NoHosts(f"TAP devices: {reason[-1] if reason else 'the switch ended'}")

    def set(self, network: int, source: int, target: int, link: Link) -> None:
        """Change the link from one host to another, from the next frame on."""
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"network": network, "source": source, "target": target, "link": asdict(link)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class _Switch:
    """Frames on their way between TAP devices.

    Args:
        taps: file descriptor of every (network, host).
    """

    def __init__(self, taps: dict[tuple[int, int], int]) -> None:
        self._taps = taps
        self._ports = {tap: port for port, tap in taps.items()}
        hosts = max(host for _, host in taps) + 1
        self._others = {
            (network, host): [other for other in range(hosts) if other != host] for network, host in taps
        }
        self._links: dict[tuple[int, int, int], Link] = {}
        self._free_at: dict[tuple[int, int, int], float] = {}
        self._queue: list[tuple[float, int, int, bytes]] = []
        self._number = 0
        self._chance = random.Random(0)

    def run(self) -> None:
        """Move frames until standard input ends."""
        print("ready", flush=True)
        while True:
            readable, _, _ = select.select([*self._ports, 0], [], [], self._pause())
            for file in readable:
                if file != 0:
                    self._read(file)
                elif not self._obey():
                    return
            self._write()

    def _pause(self) -> float | None:
        if not self._queue:
            return None
        pause = self._queue[0][0] - time.monotonic()
        return pause if pause > _SPIN_S else 0.0

    def _obey(self) -> bool:
        line = sys.stdin.readline()
        if not line:
            return False
        order = json.loads(line)
        self._links[order["network"], order["source"], order["target"]] = Link(**order["link"])
        print("done", flush=True)
        return True

    def _read(self, tap: int) -> None:
        network, source = self._ports[tap]
        try:
            while True:
                frame = os.read(tap, MTU + 64)
                now = time.monotonic()
                if frame[0] & _BROADCAST_BIT:
                    targets = self._others[network, source]
                else:
                    targets = [frame[5]] if frame[5] in self._others[network, source] else []
                for target in targets:
                    self._enqueue((network, source, target), frame, now)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.EBADFD:
                raise
            # The host is gone.
            del self._ports[tap]

    def _enqueue(self, key: tuple[int, int, int], frame: bytes, now: float) -> None:
        link = self._links.get(key, Link())
        if link.loss and self._chance.random() < link.loss:
            return
        start = max(now, self._free_at.get(key, 0.0))
        end = start + (8 * len(frame) / (1e6 * link.rate_mbit) if link.rate_mbit else 0.0)
        self._free_at[key] = end
        self._number += 1
        heapq.heappush(
            self._queue, (end + link.delay_ms / 1000, self._number, self._taps[key[0], key[2]], frame)
        )

    def _write(self) -> None:
        while self._queue and self._queue[0][0] <= time.monotonic():
            _, _, tap, frame = heapq.heappop(self._queue)
            # The interface may be down, or its host gone.
            with contextlib.suppress(OSError):
                os.write(tap, frame)


def _open_tap(namespace: str, name: str) -> int:
    """Create a TAP device in a network namespace and return its file descriptor."""
    with inside(namespace):
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def main() -> None:
    """Serve as the switch: delay_line NETWORKS NAMESPACE..."""
    networks, namespaces = int(sys.argv[1]), sys.argv[2:]
    try:
        taps = {
            (network, host): _open_tap(namespace, interface(network))
            for network in range(networks)
            for host, namespace in enumerate(namespaces)
        }
    except OSError as error:
        sys.exit(str(error))
    with contextlib.suppress(OSError):
        # Ranks that compute must not delay frames.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    gc.disable()
    _Switch(taps).run()


if __name__ == "__main__":
    main()
