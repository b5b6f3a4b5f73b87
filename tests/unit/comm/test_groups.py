"""Time limits and backends of process groups."""

from __future__ import annotations

import pytest

from ds_ext.comm.gloo_cuda import needs_copy
from ds_ext.comm.groups import backend_limit, first_step_limit_s, watchdog_s


@pytest.mark.parametrize("timeout_s", [0.5, 120.0, 3600.0])
def test_the_watchdog_of_nccl_is_later_than_every_limit_of_ours(timeout_s: float) -> None:
    assert timeout_s < first_step_limit_s(timeout_s) < watchdog_s(timeout_s)
    assert backend_limit("cpu:gloo,cuda:nccl", timeout_s).total_seconds() == watchdog_s(timeout_s)
    assert backend_limit("nccl", timeout_s).total_seconds() == watchdog_s(timeout_s)
    assert backend_limit("gloo", timeout_s).total_seconds() == timeout_s


@pytest.mark.parametrize(
    ("backend", "device", "operation", "expected"),
    [
        ("gloo", "cuda", "send", True),
        ("gloo", "cuda", "recv_", True),
        ("gloo", "cuda", "reduce_scatter_", True),
        ("gloo", "cuda", "allgather_coalesced_", True),
        ("gloo", "cuda", "allreduce_", False),
        ("gloo", "cuda", "_allgather_base_", False),
        ("gloo", "cpu", "send", False),
        ("nccl", "cuda", "send", False),
        ("nccl", "cuda", "reduce_scatter_", False),
    ],
)
def test_what_gloo_cannot_send_is_copied(backend: str, device: str, operation: str, expected: bool) -> None:
    assert needs_copy(backend, device, operation) is expected
