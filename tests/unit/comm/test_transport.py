"""Common part of all transports: tags, addresses, the table of names."""

from __future__ import annotations

import sys
from typing import get_args, get_type_hints

import pytest
import torch

from ds_ext.comm.transport import TRANSPORTS, check_address, create_transport, describe_tag, make_tag
from ds_ext.config.job import DsExtConfig
from ds_ext.errors import TransportError


@pytest.mark.parametrize(("peer", "tag"), [(0, 0), (2, 0), (-1, 0), (1, -1), (1, 1 << 31)])
def test_invalid_addresses_are_refused(peer: int, tag: int) -> None:
    with pytest.raises(TransportError):
        check_address(0, 2, peer, tag)


def test_tags() -> None:
    assert make_tag(0, 65536 + 3) == 3 and make_tag(2, 1) == 0x20001
    assert make_tag((1 << 15) - 1, 0xFFFF) == (1 << 31) - 1
    assert describe_tag(0x20001) == "tag 131073 (channel 2, item 1)"
    with pytest.raises(TransportError, match=r"0\.\.32767 \(got 32768\)"):
        make_tag(1 << 15, 0)


def test_unknown_transport_lists_the_known_ones() -> None:
    with pytest.raises(TransportError, match=r"'pigeon'.* auto, shm, rdma, tcp, torch"):
        create_transport("pigeon", timeout_s=1, device=torch.device("cpu"))


def test_transport_without_a_process_group() -> None:
    with pytest.raises(TransportError, match="init_distributed"):
        create_transport("auto", timeout_s=1, device=torch.device("cpu"))


def test_the_json_accepts_every_transport() -> None:
    accepted = get_args(get_type_hints(DsExtConfig)["transport"])
    assert sorted(accepted) == sorted(TRANSPORTS)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_missing_native_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if module.startswith("ds_ext.comm.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr("ds_ext.comm._native")
    monkeypatch.setitem(sys.modules, "ds_ext.comm._native", None)
    with pytest.raises(TransportError, match="pip install"):
        create_transport(name, timeout_s=1, device=torch.device("cpu"))
