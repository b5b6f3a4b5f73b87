"""DeepSpeed's bf16 optimizer prints the use of memory in every run, but not while an engine is built."""

from __future__ import annotations

import pytest
from deepspeed.runtime import bf16_optimizer

from ds_ext.engine.deepspeed_api.base import without_memory_lines


def test_no_line_is_printed_in_the_context_only(capfd: pytest.CaptureFixture[str]) -> None:
    with without_memory_lines():
        bf16_optimizer.see_memory_usage("begin", force=True)
    assert not capfd.readouterr().out
    bf16_optimizer.see_memory_usage("begin", force=True)
    assert "begin" in capfd.readouterr().out
