"""Receives do not wait for queued computations, and their memory is kept until it has been used."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ext.comm.receive_stream import StreamReceives
from tests.late_device import LateDevice, LateStream

SHORT_S, LONG_S = 0.3, 10.0


class Transfer:
    """Receive of NCCL: it starts after the work of the current stream, and wait() makes the current stream wait."""

    def __init__(self, device: LateDevice, stream: LateStream, body: torch.Tensor, value: int) -> None:
        self._device, self._event = device, device.new_event(shared=False)
        device.follow(stream, device.current())
        raw = device._raw(body)
        stream.put(lambda: raw.fill(value))
        device.record(self._event, stream)

    def wait(self) -> None:
        self._device.wait(self._device.current(), self._event)


def receive(device: LateDevice, link: LateStream, value: int, num_bytes: int = 4096) -> tuple[Any, Any, Any]:
    """Post a receive; (receives, memory, transfer)."""
    receives = StreamReceives(device)
    body, work = receives.post(num_bytes, lambda body: Transfer(device, link, body, value))  # pyright: ignore[reportArgumentType]
    return receives, body, work


@pytest.mark.parametrize("skip", ["", "current is inward"], ids=["", "on the stream of the computations"])
def test_a_receive_does_not_wait_for_computations(tmp_path: Path, skip: str) -> None:
    device, link = LateDevice(tmp_path, 0, skip=skip), LateStream("link", 0, 0.0)
    computed, arrived = threading.Event(), threading.Event()
    device.current().put(lambda: computed.wait())
    receives, body, work = receive(device, link, 7)
    link.put(arrived.set)
    assert arrived.wait(SHORT_S if skip else LONG_S) is not bool(skip)
    computed.set()
    receives.hand_over(body, work, LONG_S)
    assert device.read(body)() == bytes([7]) * 4096


@pytest.mark.parametrize("skip", ["", "keep for main"], ids=["", "without record_stream"])
def test_memory_is_kept_until_the_computations_have_used_it(tmp_path: Path, skip: str) -> None:
    device, link = LateDevice(tmp_path, 0, skip=skip), LateStream("link", 0, 0.0)
    go_on, arrived = threading.Event(), threading.Event()
    receives, body, work = receive(device, link, 7)
    link.put(arrived.set)
    assert arrived.wait(LONG_S)
    receives.hand_over(body, work, LONG_S)
    device.current().put(lambda: go_on.wait())
    read = device.read(body)
    del body, work
    assert device.dropped.wait(LONG_S)  # another thread may still have had it
    reused = threading.Event()
    device.inward.put(reused.set)  # behind the next owner's work, if that did not wait
    assert reused.wait(SHORT_S if not skip else LONG_S) is bool(skip)
    go_on.set()
    assert (read() == bytes([7]) * 4096) is not bool(skip)
