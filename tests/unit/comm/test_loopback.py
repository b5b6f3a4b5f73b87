"""The in-process transport and what all transports share: tags, addresses, the table of names."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from ds_ext.comm.loopback import LoopbackHub
from ds_ext.comm.transport import Transport, create_transport, describe_tag, make_tag
from ds_ext.errors import TransportError


def pair(timeout_s: float = 30.0) -> tuple[Transport, Transport]:
    hub = LoopbackHub(2, timeout_s)
    return hub.endpoint(0), hub.endpoint(1)


def test_messages_arrive_in_order_and_are_copies() -> None:
    left, right = pair()
    value = torch.arange(6.0).reshape(2, 3).t()
    left.send([value, torch.tensor(True)], 1, make_tag(3, 0))
    value.zero_()
    left.send([value], 1, make_tag(3, 1))
    second, first = right.recv(0, make_tag(3, 0)), right.recv(0, make_tag(3, 1))
    assert second.done() and first.done()
    assert first.wait()[0].tolist() == [[0.0, 0.0]] * 3
    assert [t.tolist() for t in second.wait()] == [[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], True]


def test_channels_are_independent() -> None:
    left, right = pair()
    left.send([torch.tensor(1)], 1, make_tag(1, 0))
    left.send([torch.tensor(2)], 1, make_tag(2, 0))
    assert right.recv(0, make_tag(2, 0)).wait()[0].item() == 2
    assert right.ready() == [(0, make_tag(1, 0))]
    assert right.recv(0, make_tag(1, 0)).wait()[0].item() == 1
    assert right.ready() == []


def test_other_order_on_a_channel_is_an_error() -> None:
    left, right = pair()
    left.send([torch.tensor(1)], 1, make_tag(1, 0))
    with pytest.raises(
        TransportError, match=r"expected tag 65537 \(channel 1, item 1\) from rank 0, got tag 65536"
    ):
        right.recv(0, make_tag(1, 1)).wait()


def test_wait_ends_at_its_limit_and_names_the_message() -> None:
    _, right = pair()
    with pytest.raises(TransportError, match=r"rank 1: recv from rank 0 of tag 65538 .* limit of 0\.05 s"):
        right.recv(0, make_tag(1, 2)).wait(timeout_s=0.05)


def test_wait_in_a_thread_is_woken_by_the_send() -> None:
    left, right = pair()
    got: list[float] = []
    ticket = right.recv(0, 5)
    thread = threading.Thread(target=lambda: got.append(ticket.wait()[0].item()))
    thread.start()
    left.send([torch.tensor(4.0)], 1, 5)
    thread.join(60)
    assert got == [4.0]


@pytest.mark.parametrize(("peer", "tag"), [(0, 0), (2, 0), (-1, 0), (1, -1), (1, 1 << 31)])
def test_impossible_addresses_are_refused(peer: int, tag: int) -> None:
    left, _ = pair()
    with pytest.raises(TransportError, match="rank 0"):
        left.send([torch.zeros(1)], peer, tag)


def test_closed_transport_refuses_use() -> None:
    left, _ = pair()
    left.close()
    with pytest.raises(TransportError, match="closed"):
        left.recv(1, 0)


def test_tags() -> None:
    assert make_tag(0, 65536 + 3) == 3 and make_tag(2, 1) == 0x20001
    assert make_tag((1 << 15) - 1, 0xFFFF) == (1 << 31) - 1
    assert describe_tag(0x20001) == "tag 131073 (channel 2, item 1)"
    with pytest.raises(TransportError, match=r"channel 32768 is not in 0\.\.32767"):
        make_tag(1 << 15, 0)


def test_unknown_transport_lists_the_known_ones() -> None:
    with pytest.raises(
        TransportError, match='transport "pigeon" unknown; known: auto, shm, rdma, tcp, torch'
    ):
        create_transport("pigeon", timeout_s=1, device=torch.device("cpu"))


def test_transport_without_a_world_says_what_to_do() -> None:
    with pytest.raises(TransportError, match="init_distributed"):
        create_transport("auto", timeout_s=1, device=torch.device("cpu"))


def test_without_the_compiled_part_the_error_says_how_to_build_it() -> None:
    script = (
        "import sys; sys.modules['ds_ext.comm._native'] = None\n"
        "import torch\n"
        "from ds_ext.comm.transport import create_transport\n"
        "create_transport('torch', timeout_s=1, device=torch.device('cpu'))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "TransportError" in result.stderr and "pip install -e ." in result.stderr
