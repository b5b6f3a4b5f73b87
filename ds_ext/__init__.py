"""Pipeline schedules for DeepSpeed: BitPipe, dynamic pipelines and forward/backward disaggregation.

    import ds_ext

    ds_ext.init_distributed()
    model = ds_ext.PipelineModule(layers, config, loss_fn=loss_fn)
    engine, *_ = ds_ext.initialize(model=model, config=config, training_data=dataset)
    loss = engine.train_batch()

torch and DeepSpeed are imported on first use of one of the names, which ``dir(ds_ext)`` lists.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    from ds_ext.engine import PipelineModule, init_distributed, initialize
    from ds_ext.hf import from_transformers, save_adapter
    from ds_ext.observe.metrics import Metrics

__version__ = "0.1.0"
__all__ = [
    "LayerSpec",
    "Metrics",
    "PipelineModule",
    "TiedLayerSpec",
    "__version__",
    "from_transformers",
    "init_distributed",
    "initialize",
    "save_adapter",
]
_MODULES = {"Metrics": "observe.metrics", "from_transformers": "hf", "save_adapter": "hf"}  # others: engine


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'engine')}"), name)


def __dir__() -> list[str]:
    return __all__
