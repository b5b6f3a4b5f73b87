"""Engines of a job whose forwards have ranks of their own (FBD).

A backward rank is DeepSpeed's engine with all it has: optimizer, ZeRO-1, clipping, loss scale. Its grid holds backward
ranks alone, so nothing of DeepSpeed knows of others. A forward rank is the same engine without an optimizer, in a world
of forward ranks, and computes without a graph. Between the two go outputs (forward to backward, bounded: every output
that a backward rank takes is credited to its sender), weights (backward to forward, after a step that changed them),
and with the loss the numbers that only an optimizer knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed import comm as dist

from ...config.deepspeed_json import precision
from ...parallel.fbd import FORWARD_ROLE, DisaggregatedLayout
from ..engine import PipelineEngine
from ..module import PipelineModule
from .backward import BackwardEngine
from .forward import ForwardEngine

_NOT_ON_FORWARD_RANKS = ("optimizer", "scheduler", "zero_optimization", "fp16", "bf16", "bfloat16")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_engine(
    model: PipelineModule, config: Mapping[str, Any], make_config: Any, **kwargs: Any
) -> PipelineEngine:
    """The engine of this rank's role.

    Args:
        config: DeepSpeed's JSON, complete.
        make_config: makes DeepSpeed's configuration of the dict that a role has.
        **kwargs: what else the engine takes.

    Raises:
        ConfigError: something in the JSON does not go with forward ranks.
    """
    layout = model.layout
    if not isinstance(layout, DisaggregatedLayout):
        return PipelineEngine(model=model, config=config, config_class=make_config(config), **kwargs)
    if layout.role(dist.get_rank()) != FORWARD_ROLE:
        return BackwardEngine(model=model, config=config, config_class=make_config(config), **kwargs)
    mine = {key: value for key, value in config.items() if key not in _NOT_ON_FORWARD_RANKS}
    mine["gradient_accumulation_steps"] *= layout.placement.replicas
    return ForwardEngine(
        dtype=_DTYPES[precision(config)],
        model=model,
        config=mine,
        config_class=make_config(mine),
        **{**kwargs, "optimizer": None, "model_parameters": None, "lr_scheduler": None},
    )
