"""Pipeline schedules for DeepSpeed: BitPipe, dynamic pipelines and forward/backward disaggregation.

torch and DeepSpeed are imported on first use of `initialize`, `init_distributed`, `PipelineModule`,
`from_transformers`, `save_adapter` or `Metrics`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_ext.engine import PipelineModule, init_distributed, initialize
    from ds_ext.hf import from_transformers, save_adapter
    from ds_ext.observe.metrics import Metrics

__version__ = "0.1.0"
__all__ = [
    "Metrics",
    "PipelineModule",
    "__version__",
    "from_transformers",
    "init_distributed",
    "initialize",
    "save_adapter",
]


def __getattr__(name: str) -> Any:
    if name in ("PipelineModule", "init_distributed", "initialize"):
        from ds_ext import engine

        return getattr(engine, name)
    if name in ("from_transformers", "save_adapter"):
        from ds_ext import hf

        return getattr(hf, name)
    if name == "Metrics":
        from ds_ext.observe import metrics

        return metrics.Metrics
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
