"""Role of a backward rank (FBD), which sends weights and credits to forward ranks."""

from __future__ import annotations

import torch
from deepspeed.runtime.pipe import schedule as ds

from ...comm.channels import FBD_CREDITS, stage_channel
from ...comm.transport import make_tag
from ...parallel.fbd import DisaggregatedLayout
from ...pipe_schedules.bridge import SyncWeights
from ...pipe_schedules.ops import FORWARD
from .role import DisaggregatedRole
from .weights import WeightLink, weights_in_order


class BackwardRole(DisaggregatedRole):
    """Role that repeats forwards with graphs, runs backwards and the optimizer, and sends the weights."""

    def __init__(self, layout: DisaggregatedLayout, timeout_s: float) -> None:
        super().__init__(layout, timeout_s)
        self.handlers = {ds.RecvActivation: self._receive_activations, SyncWeights: self._sync_weights}

    def _make_link(self) -> WeightLink | None:
        if self.pipe != 0:
            return None  # pipe 0 sends the weights
        engine = self.engine
        peers = self.layout.peers(engine.global_rank, self.layout.placement.device(FORWARD, self.stage, 0))
        return WeightLink(engine.transport, weights_in_order(engine.module), peers, 1, self.stage)

    def sync_weights(self) -> None:
        """Send the weights, even if this version has already been sent."""
        if self.link is not None:
            self.link.version = -1
        self.send_weights()

    def send_weights(self) -> None:
        """Send the weights, or only their version if it has already been sent."""
        if self.link is not None:
            self.link.send(self.engine.global_steps - self.engine.skipped_steps)

    def buffers_averaged(self, differed: bool) -> None:
        if differed:
            self.sync_weights()
        else:
            self.send_weights()

    def optimizer_values(self) -> list[float]:
        engine = self.engine
        norm, rates = engine.get_global_grad_norm(), [float(rate) for rate in engine.get_lr()]
        size = len(self.group_rates)
        return [
            float(len(rates)),
            float("nan") if norm is None else float(norm),
            float(engine.skipped_steps),
            float(engine._get_optimizer_loss_scale() or 0.0),
            *(rates + [0.0] * size)[:size],
        ]

    def _sync_weights(self, stage: int, peer: int) -> None:
        self.send_weights()

    def _receive_activations(
        self, buffer_id: int, stage: int, micro_batch: int, peer: int, other_stage: int
    ) -> None:
        engine = self.engine
        engine.executor.receive_activations(buffer_id, stage, micro_batch, peer, other_stage)
        (rank,) = self.layout.peers(engine.global_rank, peer)
        credit = torch.zeros(1, dtype=torch.uint8, device=engine.device)
        engine.transport.send([credit], rank, make_tag(stage_channel(FBD_CREDITS, stage), micro_batch))
