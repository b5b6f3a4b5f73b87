"""Snapshots of GPU tensors through page-locked memory, and audits of steps on one GPU."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ds_ext.engine.recovery.keeper import Keeper
from ds_ext.engine.recovery.slots import Slots, pack_state, unpack_state
from tests.distributed.test_audit import losses
from tests.gpu.ranks import gpu_ranks, needs_gpu, use_gpu
from tests.ranks import RankPool

pytestmark = needs_gpu


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with gpu_ranks(2) as pool:
        yield pool


def test_a_snapshot_of_gpu_tensors_is_read_back() -> None:
    launcher = subprocess.Popen(["sleep", "600"])
    try:
        keeper = Keeper(launcher.pid)
        keeper.start(0, 0)
        slots = Slots(keeper, 0)
        for step, size in ((1, 1 << 20), (2, 1 << 20), (3, 1 << 20), (4, 1 << 18)):
            tensors = {
                "weight": torch.full((size,), float(step), device="cuda"),
                "half": torch.full((7,), step, dtype=torch.bfloat16, device="cuda"),
                "host": torch.full((3,), step),
            }
            slots.write(step, tensors, pack_state({"step": step}))
            assert all(view.is_pinned() for slot in slots._slots.values() for view in slot.views.values())
            read, state = slots.read(step)
            assert unpack_state(state) == {"step": step}
            assert all(torch.equal(read[name], tensor.cpu()) for name, tensor in tensors.items())
    finally:
        launcher.kill()
        launcher.wait()


def audited(rank: int, schedule: str, interval: int) -> Any:
    use_gpu()
    return losses(rank, schedule, 2, 1, interval, False, 10)


@pytest.mark.parametrize("schedule", ["1f1b", "bitpipe", "bitpipe_zb"])
def test_audits_raise_no_alarm(ranks: RankPool, schedule: str) -> None:
    plain = ranks.run(audited, schedule, 0, timeout_s=120)
    found = ranks.run(audited, schedule, 1, timeout_s=120)
    assert [result[:2] for result in found] == [result[:2] for result in plain]
    assert {result[2] for result in found} == {(10, 10)}
