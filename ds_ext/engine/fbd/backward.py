"""Engine of a backward rank (FBD), which also sends weights and credits to forward ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from deepspeed.runtime.pipe import schedule as ds

from ...comm.channels import FBD_CREDITS, of_stage
from ...comm.transport import make_tag
from ...pipe_schedules.bridge import SyncWeights
from ...pipe_schedules.ops import FORWARD
from ..engine import PipelineEngine
from .role import RoleEngine
from .weights import WeightLink, weights_in_order


class BackwardEngine(RoleEngine):
    """Engine that repeats the forwards with graphs, runs the backwards and the optimizer, and sends the weights."""

    def _make_weight_link(self) -> WeightLink | None:
        if self._pipe != 0:
            return None  # pipe 0 sends the weights
        peers = self.layout.peers(self.global_rank, self.layout.placement.device(FORWARD, self._stage, 0))
        return WeightLink(self.transport, weights_in_order(self.module), peers, 1, self._stage)

    def sync_weights(self) -> None:
        """Send the weights, even if this version has already been sent."""
        if self._weights is not None:
            self._weights.version = -1
            self._weights.send(self._version)

    def average_buffers(self) -> bool:
        """Give all replicas the same buffers, and send them to the forward ranks if they differed."""
        differed = super().average_buffers()
        if differed:
            self.sync_weights()
        elif self._weights is not None:
            self._weights.send(self._version)
        return differed

    @property
    def _version(self) -> int:
        return self.global_steps - self.skipped_steps

    def _exec_sync_weights(self, stage: int, peer: int) -> None:
        assert self._weights is not None
        self._weights.send(self._version)

    def _receive_activations(self, buffer_id: int, stage: int, micro_batch: int, peer: int) -> None:
        self.executor.receive_activations(buffer_id, stage, micro_batch, peer)
        (rank,) = self.layout.peers(self.global_rank, peer)
        credit = torch.zeros(1, dtype=torch.uint8, device=self.device)
        self.transport.send([credit], rank, make_tag(of_stage(FBD_CREDITS, stage), micro_batch))

    def _shared_numbers(self) -> list[float]:
        norm = self.get_global_grad_norm()
        rates = self.get_lr()
        return [
            float(rates[0]) if rates else 0.0,
            float("nan") if norm is None else float(norm),
            float(self.skipped_steps),
            float(self._get_optimizer_loss_scale() or 0.0),
        ]

    _INSTRUCTION_MAP: ClassVar[dict[type[ds.PipeInstruction], Callable[..., None]]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        ds.RecvActivation: _receive_activations,
        SyncWeights: _exec_sync_weights,
    }
