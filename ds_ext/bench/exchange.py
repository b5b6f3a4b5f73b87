"""A rank of ``bench transport``: two ranks that send each other messages back and forth, in every way in turn."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..comm import _native
from ..comm.endpoints import Endpoints
from ..comm.links import Links
from ..comm.native_transport import NativeTransport
from ..comm.transport import Transport, create_transport, make_tag
from ..errors import TransportTimeout
from .ranks import Job
from .transport import PEERS, ExchangeJob, Times

_TURNS_BYTES = 96 << 20  # what a measurement moves, with at least _FEWEST and at most _MOST turns
_FEWEST, _MOST = 4, 200


class Exchange:
    """Two ranks, their transports, and the seconds that a message takes one way."""

    timetable = None

    def __init__(self, sizes: Sequence[int], timeout_s: float, idle_s: float) -> None:
        # The same warm memory for every way.
        self.sources = {size: torch.ones(size, dtype=torch.uint8) for size in sizes}
        self.rank, self.peer = dist.get_rank(), 1 - dist.get_rank()
        cpu = torch.device("cpu")
        shm = create_transport("shm", timeout_s=timeout_s, device=cpu)
        assert isinstance(shm, NativeTransport)
        tcp = create_transport("tcp", timeout_s=timeout_s, device=cpu)
        assert isinstance(tcp, NativeTransport)
        frames = create_transport("torch", timeout_s=timeout_s, device=cpu)
        self._waiting = {"idle_shm": shm, "idle_tcp": tcp} if idle_s else {}
        self._idle_s = idle_s
        self.ways: dict[str, Callable[[int], float]] = {
            "shm": self._through(shm),
            "tcp": self._through(tcp),
            "torch": self._through(frames),
            "gloo": self._gloo,
        }
        self._polled = _linked_with_itself(PEERS, timeout_s)

    def run(self) -> Times:
        """One measurement of every way and size; the seconds of each turn, seen from rank 0.

        A turn before them warms up: it takes the memory.
        """
        found: Times = {}
        for num_bytes in self.sources:
            turns = max(_FEWEST, min(_MOST, _TURNS_BYTES // num_bytes))
            for name, measure in self.ways.items():
                measure(num_bytes)
                dist.barrier()
                found[name, num_bytes] = [measure(num_bytes) for _ in range(turns)]
            dist.barrier()
            if self.rank == 0:
                found["memcpy", num_bytes] = _copies(self.sources[num_bytes], turns)
        for name, transport in self._waiting.items():
            found[name, 0] = [self._idle(transport)]
        if self.rank == 0:
            found["ready", PEERS] = [_elapsed(self._polled.ready) for _ in range(_MOST)]
        return found

    def _idle(self, transport: NativeTransport) -> float:
        """Of a core, what the busiest thread of this rank takes while it waits for a message."""
        tag = make_tag(1, 0)
        ticket = transport.recv(self.peer, tag)
        dist.barrier()
        before = _thread_seconds()
        with contextlib.suppress(TransportTimeout):
            transport.wait_any([ticket], self._idle_s)
        taken = {thread: seconds - before.get(thread, 0.0) for thread, seconds in _thread_seconds().items()}
        dist.barrier()
        transport.send([torch.tensor(0)], self.peer, tag)
        ticket.wait()
        return max(taken.values()) / self._idle_s

    def _through(self, transport: Transport) -> Callable[[int], float]:
        def measure(num_bytes: int) -> float:
            tensor = self.sources[num_bytes]

            def send() -> None:
                transport.send([tensor], self.peer, 0)

            return self._turn(send, lambda: transport.recv(self.peer, 0).wait())

        return measure

    def _gloo(self, num_bytes: int) -> float:
        tensor = self.sources[num_bytes]
        into = torch.empty_like(tensor)
        return self._turn(lambda: dist.send(tensor, self.peer), lambda: dist.recv(into, self.peer))

    def _turn(self, send: Callable[[], Any], receive: Callable[[], Any]) -> float:
        """Seconds one way: half of the way there and back."""
        steps = (send, receive) if self.rank == 0 else (receive, send)
        start = time.perf_counter()
        for step in steps:
            step()
        return (time.perf_counter() - start) / 2


def _copies(source: torch.Tensor, turns: int) -> list[float]:
    target = source.clone()
    return [_elapsed(lambda: target.copy_(source)) for _ in range(1 + turns)][1:]


def _elapsed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _thread_seconds() -> dict[str, float]:
    """What each thread of this process has computed, ever."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            found[thread] = int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9
    return found


def _linked_with_itself(peers: int, timeout_s: float) -> NativeTransport:
    """The transport of a rank with so many peers, all of them in this process."""
    job, port = bytes(16), _native.Port()
    endpoints = Endpoints()
    for peer in range(1, peers + 1):
        link = endpoints.incoming[peer] = _native.ShmIncoming(peer, 0, job)
        files = os.dup(link.fileno()), os.dup(port.fileno())
        endpoints.outgoing[peer] = _native.ShmOutgoing(*files, peer, 0, job, 1 << 20)
        link.connect(os.dup(port.fileno()))
        port.add(link)
    links = Links(port, endpoints, dict.fromkeys(endpoints.incoming, 1))
    return NativeTransport(links, "shm", 0, peers + 1, timeout_s)


def build(name: str, job: Job) -> Exchange:
    """What :mod:`.ranks` runs."""
    assert isinstance(job, ExchangeJob)
    return Exchange(job.sizes, job.timeout_s, job.idle_s)
