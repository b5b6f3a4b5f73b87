"""Stages of a rank, by kind: what the executor calls.

A kind of stage is a :class:`~ds_ext.pipe_schedules.stage_kinds.StageKind` in the table of a placement, and a class with
the methods of :class:`.Stage`, which :func:`register_stage` registers for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import torch

from ...pipe_schedules.placement import Placement
from ...pipe_schedules.stage_kinds import BODY, HEAD_LOSS, HEAD_PART, StageKind
from ...tensor_parallel import HeadPart as HeadLayer
from ..losses.local import LocalLosses
from ..module import PipelineModule
from .body import Body, Forward, LastBody
from .head import BodyBeforeHead, HeadLoss, HeadPart
from .stage import Stage


@dataclass(frozen=True)
class RankStages:
    """Parts that the stages of a rank are built from. ``stages`` has those already built, in ascending order."""

    module: PipelineModule
    compute: Forward
    losses: LocalLosses
    device: torch.device
    stages: dict[int, Stage] = field(default_factory=dict)

    @property
    def placement(self) -> Placement:
        return self.module.layout.placement


Make = Callable[[int, RankStages], Stage]
_MAKE: dict[StageKind, Make] = {}


def register_stage(kind: StageKind, make: Make) -> None:
    """Let ``make(stage, rank)`` return the stages of a kind."""
    _MAKE[kind] = make


def stages_of(
    module: PipelineModule, compute: Forward, losses: LocalLosses, device: torch.device
) -> dict[int, Stage]:
    rank = RankStages(module, compute, losses, device)
    for stage in (*module.stages, *_without_weights(module)):
        rank.stages[stage] = _MAKE[rank.placement.table[stage].kind](stage, rank)
    return rank.stages


def _without_weights(module: PipelineModule) -> Iterator[int]:
    placement, device = module.layout.placement, module.device_index
    for stage in range(placement.stages, placement.op_stages):
        devices = {devices[stage - placement.stages] for devices in placement.further_devices}
        if device in devices and not placement.has_weights(stage):
            yield stage


def _body(stage: int, rank: RankStages) -> Body:
    kind: type[Body] = Body
    if stage == rank.placement.stages - 1:
        kind = LastBody if stage == rank.placement.loss_stage else BodyBeforeHead
    return kind(stage, rank.compute, rank.losses, rank.device)


def _head_part(stage: int, rank: RankStages) -> HeadPart:
    (layer,) = rank.module.stage_modules(stage).values()
    return HeadPart(cast(HeadLayer, layer))


def _head_loss(stage: int, rank: RankStages) -> HeadLoss:
    before = rank.stages[rank.placement.stages - 1]
    part = next(stage for stage in rank.stages.values() if isinstance(stage, HeadPart))
    assert isinstance(before, BodyBeforeHead), "the loss is on the device of the last stage of layers"
    return HeadLoss(before, part.layer, rank.losses)


register_stage(BODY, _body)
register_stage(HEAD_PART, _head_part)
register_stage(HEAD_LOSS, _head_loss)
