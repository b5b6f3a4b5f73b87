"""``bench transport``: time of a message between two ranks on this host, by transport, gloo and memcpy."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ds_ext.errors import ConfigError, TransportTimeout

from .command import Report, add_device_flag, add_number, check_at_least, count_gpus, json_item, table
from .ranks import Job, take_turns

SUMMARY = "time of a message between two ranks on this host, by transport, gloo and memcpy"
SIZES = (4, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
METHODS = {  # by device; on GPUs, tcp stages contents in host memory
    "cpu": ("shm", "tcp", "torch", "gloo", "memcpy"),
    "cuda": ("ipc", "staged", "torch", "memcpy"),
}
_TRANSPORT = {
    "ipc": "shm",
    "staged": "tcp",
}  # method on GPUs -> transport; others have their transport's name
IDLE = {"idle_shm": "shm", "idle_tcp": "tcp"}
PEERS = 8  # of the rank that calls ready()
_LIMIT_S = 120.0
_TURN_BYTES = 96 << 20  # moved in a measurement, within the limits of turns
_MIN_TURNS, _MAX_TURNS = 4, 200

Times = dict[tuple[str, int], list[float]]  # (method, bytes) -> seconds one way; other figures have 0 bytes


@dataclass(frozen=True)
class ExchangeJob(Job):
    """Sizes of the messages in bytes, methods to measure, and seconds to wait for a message that never comes."""

    sizes: tuple[int, ...] = SIZES
    methods: tuple[str, ...] = METHODS["cpu"]
    idle_s: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the benchmark."""
    sizes = ",".join(map(str, SIZES))
    parser.add_argument("--sizes", default=sizes, metavar="A,B", help="bytes of the messages (%(default)s)")
    add_device_flag(parser)
    add_number(parser, "--repeats", 5, "K", "measurements, after one warm-up")
    add_number(parser, "--idle", 0.0, "S", "seconds to wait for a message that never comes")


def measure(args: argparse.Namespace) -> Report:
    """Measure messages over every transport.

    Raises:
        ConfigError: a flag is wrong.
        RankFailure: a rank failed.
    """
    check_at_least("--repeats", args.repeats, 1)
    if not 0 <= args.idle < _LIMIT_S / 4:
        raise ConfigError(f"--idle: must be 0 to {_LIMIT_S / 4:g} seconds (got {args.idle:g}).")
    sizes = _sizes(args.sizes)
    methods = _methods(args.device, count_gpus(args.device))
    job = ExchangeJob(build, 2, _LIMIT_S, device=args.device, sizes=sizes, methods=methods, idle_s=args.idle)
    times: Times = defaultdict(list)
    for answers in take_turns(["transport"], job, 1 + args.repeats)["transport"].rounds[1:]:
        for key, seconds in answers[0].items():
            times[key] += seconds
    title = "2 ranks; us one way, median (best)"
    return Report(_items(times, args.device), title, _text(times, sizes, methods))


def _methods(device: str, gpus: int) -> tuple[str, ...]:
    """Return the methods to measure. nccl needs a GPU for each rank."""
    return tuple(name for name in METHODS[device] if name != "torch" or device == "cpu" or gpus > 1)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"--sizes: must be numbers of bytes (got {text!r}). Example: 4,65536.")
    return sizes


def _items(times: Times, device: str) -> list[dict[str, Any]]:
    items = []
    for (name, size), seconds in times.items():
        params: dict[str, Any] = {"peers": PEERS} if name == "ready" else {}
        if name in METHODS[device]:
            params = {"bytes": size, "gb_per_s": size / statistics.median(seconds) / 1e9, "device": device}
        unit, scale = ("% of a core", 100) if name in IDLE else ("us", 1e6)
        items.append(json_item(name, params, [scale * value for value in seconds], unit))
    return items


def _text(times: Times, sizes: tuple[int, ...], methods: tuple[str, ...]) -> str:
    head = [("", *map(_size, sizes))]
    rows = [(name, *(_median_and_best(times.get((name, size))) for size in sizes)) for name in methods]
    lines = [table(head + rows), f"ready   {_median_and_best(times['ready', 0])}"]
    for name, kind in IDLE.items():
        if shares := times.get((name, 0)):
            lines.append(f"idle    {100 * max(shares):.2f} % of a core at most, over {kind}")
    return "\n".join(lines)


def _median_and_best(seconds: list[float] | None) -> str:
    if not seconds:
        return "-"
    return f"{1e6 * statistics.median(seconds):.1f} ({1e6 * min(seconds):.1f})"


def _size(num_bytes: int) -> str:
    units = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
    return next(f"{num_bytes // unit} {name}" for unit, name in units if num_bytes >= unit)


# --- on a rank ---


class Exchange:
    """Two ranks that send each other messages over each transport in turn."""

    timetable = None

    def __init__(self, job: ExchangeJob) -> None:
        import torch
        import torch.distributed as dist

        from ds_ext.comm.transport import create_transport

        self._device = job.torch_device()
        transports = {
            name: create_transport(_TRANSPORT.get(name, name), timeout_s=job.timeout_s, device=self._device)
            for name in job.methods
            if name not in ("gloo", "memcpy")
        }
        self._rank, self._peer = dist.get_rank(), 1 - dist.get_rank()
        # All transports send the same warm memory.
        self._sources = {size: torch.ones(size, dtype=torch.uint8, device=self._device) for size in job.sizes}
        self._methods: dict[str, Callable[[Any], float]] = {
            name: partial(self._through, transport) for name, transport in transports.items()
        }
        if "gloo" in job.methods:
            self._methods["gloo"] = self._through_gloo
        self._ipc = transports.get("ipc")
        kinds = {_TRANSPORT.get(name, name): transport for name, transport in transports.items()}
        self._waiting = {name: kinds[kind] for name, kind in IDLE.items()} if job.idle_s else {}
        self._idle_s = job.idle_s
        self._with_peers = _linked_with_itself(PEERS, job.timeout_s)

    def run(self) -> Times:
        """Return the time of each turn in seconds, by method and size, as measured on this rank.

        One turn before them warms up: it allocates the memory. Sizes whose contents did not use CUDA IPC have no time
        for it.
        """
        import torch.distributed as dist

        times: Times = {}
        if self._ipc is not None:  # the first messages set the size of its slots
            for _ in range(_MIN_TURNS):
                self._through(self._ipc, self._sources[max(self._sources)])
        for size, tensor in self._sources.items():
            turns = max(_MIN_TURNS, min(_MAX_TURNS, _TURN_BYTES // size))
            for name, measure in self._methods.items():
                measure(tensor)
                dist.barrier()
                staged = self._staged()
                seconds = [measure(tensor) for _ in range(turns)]
                if name != "ipc" or 2 * (self._staged() - staged) < turns:
                    times[name, size] = seconds
            dist.barrier()
            if self._rank == 0:
                target = tensor.clone()

                def copy(target: Any = target, tensor: Any = tensor) -> None:
                    target.copy_(tensor)
                    self._finish()

                times["memcpy", size] = [_seconds(copy) for _ in range(1 + turns)][1:]
        for name, transport in self._waiting.items():
            times[name, 0] = [self._idle(transport)]
        if self._rank == 0:
            times["ready", 0] = [_seconds(self._with_peers.ready) for _ in range(_MAX_TURNS)]
        return times

    def _idle(self, transport: Any) -> float:
        """Return the busiest thread's share of a core while this rank waits for a message."""
        import torch
        import torch.distributed as dist

        from ds_ext.comm.transport import make_tag

        tag = make_tag(1, 0)
        ticket = transport.recv(self._peer, tag)
        dist.barrier()
        before = _thread_seconds()
        with contextlib.suppress(TransportTimeout):
            transport.wait_any([ticket], self._idle_s)
        used = [seconds - before.get(thread, 0.0) for thread, seconds in _thread_seconds().items()]
        dist.barrier()
        transport.send([torch.tensor(0)], self._peer, tag)
        ticket.wait()
        return max(used) / self._idle_s

    def _through(self, transport: Any, tensor: Any) -> float:
        return self._one_way(
            lambda: transport.send([tensor], self._peer, 0), lambda: transport.recv(self._peer, 0).wait()
        )

    def _staged(self) -> int:
        """Return how many messages of this rank the method ``ipc`` staged in host memory."""
        from ds_ext.comm.cuda.header import Route

        return getattr(self._ipc, "counts", {}).get(Route.STAGED, 0)

    def _finish(self) -> None:
        """Wait until the work queued on a GPU is finished."""
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _through_gloo(self, tensor: Any) -> float:
        import torch
        import torch.distributed as dist

        into = torch.empty_like(tensor)
        return self._one_way(lambda: dist.send(tensor, self._peer), lambda: dist.recv(into, self._peer))

    def _one_way(self, send: Callable[[], Any], receive: Callable[[], Any]) -> float:
        """Return half the seconds of a round trip."""
        first, second = (send, receive) if self._rank == 0 else (receive, send)
        start = time.perf_counter()
        first()
        self._finish()  # rank 1 has received
        second()
        self._finish()
        return (time.perf_counter() - start) / 2


def build(name: str, job: ExchangeJob) -> Exchange:
    """Build this rank's transports."""
    return Exchange(job)


def _seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _thread_seconds() -> dict[str, float]:
    """Return the CPU time of each thread of this process since its start."""
    seconds = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            seconds[thread] = int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9
    return seconds


def _linked_with_itself(peers: int, timeout_s: float) -> Any:
    """Return the transport of a rank whose peers are all in this process."""
    from ds_ext.comm import _native
    from ds_ext.comm.endpoints import Endpoints
    from ds_ext.comm.native_transport import NativeTransport

    job, port = bytes(16), _native.Port()
    endpoints = Endpoints()
    for peer in range(1, peers + 1):
        link = endpoints.incoming[peer] = _native.ShmIncoming(peer, 0, job)
        files = os.dup(link.fileno()), os.dup(port.fileno())
        endpoints.outgoing[peer] = _native.ShmOutgoing(*files, peer, 0, job, 1 << 20)
        link.connect(os.dup(port.fileno()))
        port.add(link)
    max_held = dict.fromkeys(endpoints.incoming, 1)
    return NativeTransport(port, endpoints, max_held, "shm", 0, peers + 1, timeout_s)
