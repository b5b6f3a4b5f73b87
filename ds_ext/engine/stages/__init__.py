"""Stages of a rank, by kind: what the executor calls."""

from __future__ import annotations

from typing import cast

import torch

from ...tensor_parallel import HeadPart as HeadLayer
from ..module import PipelineModule
from .body import Body, Forward, LastBody, Losses
from .head import BodyBeforeHead, HeadLoss, HeadPart
from .stage import Stage


def stages_of(
    module: PipelineModule, compute: Forward, losses: Losses, device: torch.device
) -> dict[int, Stage]:
    """Return the stages of this rank by number."""
    placement = module.layout.placement
    last = placement.stages - 1
    stages: dict[int, Stage] = {}
    for stage in module.stages:
        if placement.is_head_part(stage):
            (layer,) = module.stage_modules(stage).values()
            stages[stage] = HeadPart(cast(HeadLayer, layer))
        else:
            end = BodyBeforeHead if placement.head_parts else LastBody
            kind = end if stage == last else Body
            stages[stage] = kind(stage, compute, losses, device)
    before = stages.get(last)
    if isinstance(before, BodyBeforeHead):
        part = next(stage for stage in stages.values() if isinstance(stage, HeadPart))
        stages[placement.loss_stage] = HeadLoss(before, part.layer, losses)
    return stages
