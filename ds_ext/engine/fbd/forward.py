"""Role of a forward rank (FBD), which runs forwards without a graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from deepspeed.runtime.pipe import schedule as ds

from ...comm.channels import FBD_CREDITS, stage_channel
from ...comm.transport import Ticket, make_tag
from ...errors import ScheduleError
from ...parallel.fbd import DisaggregatedLayout
from ...pipe_schedules.bridge import SyncWeights, TimetableSchedule
from ...pipe_schedules.methods.fbd import most_ahead
from ..engine import PipelineEngine
from .role import DisaggregatedRole
from .weights import WeightLink, weights_in_order


class ForwardRole(DisaggregatedRole):
    """Role that runs the forwards of training and evaluation, without gradients or an optimizer."""

    in_checkpoints = has_gradients = False

    def __init__(self, layout: DisaggregatedLayout, timeout_s: float) -> None:
        super().__init__(layout, timeout_s)
        self.pipelines = layout.placement.replicas  # the backward pipelines
        self.handlers = {ds.SendActivation: self._send_activations, SyncWeights: self._end_forward_step}
        self._credits: dict[int, deque[Ticket]] = {}  # rank -> credits that it has not sent yet

    def start(self, engine: PipelineEngine) -> None:
        super().start(engine)
        for parameter in engine.module.parameters():
            parameter.requires_grad_(False)

    # --- weights ---

    def _make_link(self) -> WeightLink:
        engine, placement = self.engine, self.layout.placement
        peers = self.layout.peers(engine.global_rank, placement.pipes[0][self.stage])
        weights = weights_in_order(engine.module)
        return WeightLink(engine.transport, weights, peers, placement.merged, self.stage)

    def sync_weights(self) -> None:
        assert self.link is not None
        self.link.version = -1
        self._receive_weights()

    def _receive_weights(self) -> None:
        assert self.link is not None
        self.link.expect()
        self.link.settle()

    def buffers_averaged(self, differed: bool) -> None:
        self._receive_weights()

    def end_step(self) -> None:
        assert self.link is not None
        with self.engine.activity.during(self.engine.activity.name):
            self.link.settle()

    def _end_forward_step(self, stage: int, peer: int) -> None:
        """Wait until all outputs of the step are received, gather the losses, and post the receive of new weights."""
        assert self.link is not None
        for tickets in self._credits.values():
            while tickets:
                tickets.popleft().wait()
        engine = self.engine
        engine.gather_numbers()
        # The last stage computes nothing. It waits for a whole step, which may exceed the time limit of a message.
        limit_s = self.step_limit_s(engine.current_schedule) if stage == engine.last_stage else None
        self.link.expect(limit_s)
        if limit_s is not None:
            self.link.settle(limit_s)
        engine.global_steps += 1
        engine.global_samples += engine.train_batch_size()
        engine.micro_steps += engine.micro_batches

    # --- running ---

    @contextmanager
    def executing(self, schedule: TimetableSchedule) -> Iterator[None]:
        """Context without gradients. Raises ScheduleError without the weights of the last step."""
        engine = self.engine
        assert self.link is not None
        expected = engine.global_steps - engine.skipped_steps
        if self.link.version != expected:
            raise ScheduleError(
                f"rank {engine.global_rank}: step {engine.global_steps} needs version {expected} of the weights (got "
                f"{self.link.version})."
            )
        with torch.no_grad():
            yield

    def _send_activations(
        self, buffer_id: int, stage: int, micro_batch: int, peer: int, other_stage: int
    ) -> None:
        """Send outputs, once the backward device has received enough of the earlier ones."""
        engine = self.engine
        if peer in self.layout.placement.forward_devices:
            engine.executor.send_activations(buffer_id, stage, micro_batch, peer, other_stage)
            return
        limit = most_ahead(self.layout.placement.stages, stage)
        ranks = self.layout.peers(engine.global_rank, peer)
        for rank in ranks:
            tickets = self._credits.setdefault(rank, deque())
            while len(tickets) >= limit:
                tickets.popleft().wait()
        engine.executor.send_activations(buffer_id, stage, micro_batch, peer, other_stage)
        for rank in ranks:
            tag = make_tag(stage_channel(FBD_CREDITS, other_stage), micro_batch)
            self._credits[rank].append(engine.transport.recv(rank, tag))

    # --- values of the optimizer ---

    def optimizer_values(self) -> list[float]:
        return [0.0] * (4 + len(self.group_rates))

    def set_optimizer_values(self, rows: Sequence[Sequence[float]]) -> None:
        super().set_optimizer_values(rows)
        self.rates = self.group_rates
        self.engine.skipped_steps = int(self.backward_values["skipped_steps"])
        self.engine._global_grad_norm = self.backward_values["grad_norm"]
