"""What all transports share: tags, addresses, the table of names."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ds_ext.comm.transport import check_address, create_transport, describe_tag, make_tag
from ds_ext.errors import TransportError


@pytest.mark.parametrize(("peer", "tag"), [(0, 0), (2, 0), (-1, 0), (1, -1), (1, 1 << 31)])
def test_impossible_addresses_are_refused(peer: int, tag: int) -> None:
    with pytest.raises(TransportError, match="rank 0"):
        check_address(0, 2, peer, tag)


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
