"""Trial of this host's GPUs: one process uses memory and events of another, as the transport does.

The other process runs ``python -m ds_ext.comm.cuda.trial MODULE:FUNCTION TEXT``, where FUNCTION(TEXT) returns its
Device. The two processes exchange lines of JSON.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ds_ext.comm.cuda.device import Device
from ds_ext.comm.cuda.slabs import DirectReceiver, DirectSender
from ds_ext.errors import TransportError

TRIAL_BYTES = 4 << 20
TRIAL_LIMIT_S = 90.0  # includes the import of torch by the other process
_STEP_S = 0.001


def make_device(maker: str, text: str) -> Device:
    """Return FUNCTION(text) for ``maker`` MODULE:FUNCTION."""
    module, function = maker.split(":")
    return getattr(importlib.import_module(module), function)(text)


def torch_cuda(index: str) -> Device:
    """Return the Device for the GPU with this index."""
    return Device(torch.device("cuda", int(index)))


def try_direct(maker: str, text: str) -> int:
    """Receive a message from another process over the direct route. Returns its bytes.

    Raises:
        TransportError: the direct route does not work.
    """
    command = [sys.executable, "-m", "ds_ext.comm.cuda.trial", maker, text]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as other:
        limit = threading.Timer(TRIAL_LIMIT_S, other.kill)
        limit.start()
        try:
            _receive(make_device(maker, text), other)
        finally:
            limit.cancel()
            other.kill()
    return TRIAL_BYTES


def _receive(device: Device, other: subprocess.Popen[str]) -> None:
    receiver = DirectReceiver(device)
    granted = dict(receiver.grant(_read_line(other)))
    if "refused" in granted:
        raise TransportError(granted["refused"])
    assert other.stdin is not None
    print(json.dumps(granted), file=other.stdin, flush=True)
    sent = _read_line(other)
    if "refused" in sent:
        raise TransportError(sent["refused"])
    slab, place, event = sent["place"]
    body = receiver.take(slab, place, event, TRIAL_BYTES)
    found = device.pinned(TRIAL_BYTES)
    device.copy(found, body, device.current())
    _finish(device)
    if not torch.equal(found, _pattern()):
        raise TransportError("wrong contents of a message from another process")


def _send(device: Device) -> None:
    """Send the message, in the other process."""
    sender = DirectSender(device, 1)
    print(json.dumps(sender.request_slab(TRIAL_BYTES)), flush=True)
    sender.on_answer(json.loads(input()))
    if sender.refused:
        print(json.dumps({"refused": sender.refused}), flush=True)
        return
    body, source = device.empty(TRIAL_BYTES, device.current()), device.pinned(TRIAL_BYTES)
    source.copy_(_pattern())
    device.copy(body, source, device.current())
    print(json.dumps({"place": sender.send(body)}), flush=True)
    sys.stdin.read()  # keep the memory until the receiver ends this process


def _pattern() -> Tensor:
    return torch.arange(TRIAL_BYTES, dtype=torch.int64).mul(167).remainder(251).to(torch.uint8)


def _finish(device: Device) -> None:
    event = device.new_event(shared=False)
    device.record(event, device.current())
    deadline = time.monotonic() + TRIAL_LIMIT_S
    while not device.done(event):
        if time.monotonic() > deadline:
            raise TransportError(f"the copy was not finished within {TRIAL_LIMIT_S:g} s")
        time.sleep(_STEP_S)


def _read_line(other: subprocess.Popen[str]) -> dict[str, Any]:
    assert other.stdout is not None and other.stderr is not None
    line = other.stdout.readline()
    if not line:
        last = (other.stderr.read().strip().splitlines() or [f"no answer within {TRIAL_LIMIT_S:g} s"])[-1]
        raise TransportError(f"the other process failed: {last}")
    return json.loads(line)


def findings() -> Iterator[tuple[str, str, str]]:
    """Yield (subject, finding, fix or "") for each GPU and pair of GPUs."""
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        yield f"GPU {index}", f"{properties.name}, {properties.total_memory >> 30} GiB", ""
    without = [
        f"{a}-{b}"
        for a in range(count)
        for b in range(a + 1, count)
        if not torch.cuda.can_device_access_peer(a, b)
    ]
    if without:
        yield (
            "GPU peer access",
            f"not between {', '.join(without)}",
            "shm messages between these are staged in host memory; nccl may be faster",
        )
    if count:
        try:
            done = try_direct("ds_ext.comm.cuda.trial:torch_cuda", "0")
            yield "GPU memory", f"{done >> 20} MiB written by another process, in order", ""
        except (TransportError, RuntimeError, OSError) as error:
            yield (
                "GPU memory",
                f"cannot be written by another process: {error}",
                "shm messages are staged in host memory; start containers with --ipc=host",
            )


if __name__ == "__main__":
    _send(make_device(*sys.argv[1:3]))
