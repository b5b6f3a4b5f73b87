"""Peak memory of a rank."""

from __future__ import annotations

import torch

from ds_ext.engine.deepspeed_api.device import peak_memory_bytes


def test_peak_memory_includes_freed_memory() -> None:
    before = peak_memory_bytes(torch.device("cpu"))
    block = torch.ones(64 << 20, dtype=torch.uint8)
    del block
    assert 10 << 20 < before <= peak_memory_bytes(torch.device("cpu")) < 1 << 40
