"""Peak memory of a rank."""

from __future__ import annotations

import torch

from ds_ext.engine.deepspeed_api.device import read_peak_memory


def test_peak_memory_includes_freed_memory() -> None:
    before = read_peak_memory(torch.device("cpu"))
    block = torch.ones(64 << 20, dtype=torch.uint8)
    del block
    assert 10 << 20 < before <= read_peak_memory(torch.device("cpu")) < 1 << 40
