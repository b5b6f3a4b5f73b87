"""Skip a test, or one case of it, where the device does not support its precision.

@needs("fp16")
def test_an_overflow() -> None: ...

@pytest.mark.parametrize("precision", [pytest.param(name, marks=needs(name)) for name in ("fp32", "fp16")])
def test_losses(precision: str) -> None: ...
"""

from __future__ import annotations

import pytest
from deepspeed.accelerator import get_accelerator


def is_supported(precision: str) -> bool:
    """Return whether DeepSpeed's accelerator supports fp32, bf16 or fp16."""
    accelerator = get_accelerator()
    checks = {
        "fp32": lambda: True,
        "bf16": accelerator.is_bf16_supported,
        "fp16": accelerator.is_fp16_supported,
    }
    return bool(checks[precision]())  # the CPU accelerator returns None for no


def needs(precision: str) -> pytest.MarkDecorator:
    """Return a mark that skips the test where the device does not support ``precision``."""
    device = get_accelerator().device_name()
    reason = f"the accelerator reports that {device} does not support {precision}"
    return pytest.mark.skipif(not is_supported(precision), reason=reason)
