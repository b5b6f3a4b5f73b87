"""Roll calls of two ranks in one process."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from ds_ext.errors import ConfigError, TransportError
from ds_ext.launch.roll_call import REFUSED, RollCall, make_early_roll_call
from tests.launch.jobs import find_free_port

VERDICT = "ds_ext/roll_call/1/verdict"
LIMIT_S = 60.0


def test_the_error_of_a_rank_comes_before_a_comparison_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 decides as soon as the failed rank has arrived."""
    store = HashStore()
    rank_0, rank_1 = (RollCall(store, rank, 2) for rank in (0, 1))
    publish = rank_1._publish_answer

    def publish_and_wait(*facts: Any) -> None:
        publish(*facts)
        deadline = time.monotonic() + LIMIT_S
        while not store.check([VERDICT]):
            assert time.monotonic() < deadline

    monkeypatch.setattr(rank_1, "_publish_answer", publish_and_wait)
    with ThreadPoolExecutor(1) as pool:
        compared = pool.submit(rank_0.require_same, {"lr": "0.1"}, LIMIT_S)
        with pytest.raises(ConfigError, match="data: missing"):
            assert rank_1.fail("data: missing", REFUSED, LIMIT_S)
            compared.result()


def test_a_rank_without_rank_0_waits_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch's store would try twice, and print a stack for each attempt."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TransportError, match=r"within 0\.2 s"):
        make_early_roll_call(1, 2, 0.2)
    assert capfd.readouterr() == ("", "")
