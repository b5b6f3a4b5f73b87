"""Transport between GPUs: the parts that need no GPU and no other ranks."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from ds_ext.cli import doctor
from ds_ext.comm import _native
from ds_ext.comm.cuda.direct import DirectReceiver, DirectSender
from ds_ext.comm.endpoints import both_ways
from tests.late_device import InlineDevice


def test_a_slot_has_one_message_until_its_tensors_are_dropped(tmp_path: Path) -> None:
    device, sender_device = InlineDevice(tmp_path, 0), InlineDevice(tmp_path, 1)
    sender, receiver = DirectSender(sender_device, max_held=1), DirectReceiver(device)
    body = torch.arange(1000).view(torch.uint8)
    assert sender.send(body) is None  # no slab yet
    request = sender.request(len(body))
    assert request is not None and sender.request(len(body)) is None
    sender.on_answer(receiver.grant(request))
    sent = [sender.send(body + number) for number in range(3)]
    assert sent == [0, 1, 2] and sender.send(body) is None  # one held message and two spare slots
    held = [receiver.take(number, len(body)) for number in (0, 1, 2)]
    assert all(torch.equal(memory, body + number) for number, memory in enumerate(held))
    assert receiver.freed() is None
    with pytest.raises(_native.LinkError):
        receiver.take(1, len(body))
    del held[1]
    gc.collect()
    assert receiver.freed() == {"freed": [1]}
    sender.on_freed([1])
    with pytest.raises(_native.LinkError):
        sender.on_freed([1])
    assert sender.send(torch.zeros(1 << 16, dtype=torch.uint8)) is None  # larger than a slot
    assert sender.send(body[:7]) == 1 and torch.equal(held[0], body)


def test_links_of_gpus_have_both_directions() -> None:
    assert both_ways({(0, 1): 4, (1, 2): 3, (2, 1): 2}) == {(0, 1): 4, (1, 0): 1, (1, 2): 3, (2, 1): 2}


def test_findings_of_the_doctor() -> None:
    subjects = {finding.subject for finding in doctor._cuda()}
    assert subjects >= ({"GPU 0"} if torch.cuda.is_available() else {"CUDA"})
