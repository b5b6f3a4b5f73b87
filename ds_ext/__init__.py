"""Pipeline schedules for DeepSpeed: BitPipe, dynamic pipelines and forward/backward disaggregation.

torch and DeepSpeed are imported on first use of `initialize`, `init_distributed` or `PipelineModule`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_ext.engine import PipelineModule, init_distributed, initialize

__version__ = "0.1.0"
__all__ = ["PipelineModule", "__version__", "init_distributed", "initialize"]


def __getattr__(name: str) -> Any:
    if name in ("PipelineModule", "init_distributed", "initialize"):
        from ds_ext import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
