"""Engine of a forward rank (FBD), which runs forwards without a graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from deepspeed.runtime.pipe import schedule as ds
from torch import Tensor

from ...comm.channels import FBD_CREDITS, of_stage
from ...comm.transport import Ticket, make_tag
from ...errors import ScheduleError
from ...pipe_schedules.bridge import SyncWeights, TimetableSchedule
from ...pipe_schedules.methods.fbd import most_ahead
from ...planner.job_plan import JobPlan
from ..batches import Batches, IteratorBatches
from ..engine import PipelineEngine
from ..evaluation import Evaluation
from .role import RoleEngine
from .weights import WeightLink, weights_in_order


class ForwardEngine(RoleEngine):
    """Engine without gradients or an optimizer. It runs the forwards of training and evaluation.

    Args:
        half: dtype of the weights in half precision; None: they keep their own.
        **kwargs: arguments of :class:`PipelineEngine`.
    """

    def __init__(self, *, half: torch.dtype | None, **kwargs: Any) -> None:
        for parameter in kwargs["model"].parameters():  # not buffers, as in DeepSpeed on backward ranks
            if half is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(half)
        self._credits: dict[int, deque[Ticket]] = {}  # rank -> credits that it has not sent yet
        super().__init__(**kwargs)
        # DeepSpeed counts the micro-batches of a forward pipeline. All other code counts those of a backward pipeline.
        self.micro_batches //= self.layout.placement.replicas
        for parameter in self.module.parameters():
            parameter.requires_grad_(False)

    # --- weights ---

    def _make_weight_link(self) -> WeightLink | None:
        peers = self.layout.peers(self.global_rank, self.layout.placement.pipes[0][self._stage])
        return WeightLink(
            self.transport, weights_in_order(self.module), peers, self.layout.placement.merged, self._stage
        )

    def sync_weights(self) -> None:
        """Receive the weights from the backward ranks."""
        assert self._weights is not None
        self._weights.version = -1
        self._weights.expect()
        self._weights.settle()

    def average_buffers(self) -> bool:
        """Receive the buffers of the backward ranks, if they differed."""
        differed = super().average_buffers()
        assert self._weights is not None
        self._weights.expect()
        self._weights.settle()
        return differed

    def _exec_sync_weights(self, stage: int, peer: int) -> None:
        """End the step: wait until backward ranks have received all outputs, and post the receive of new weights."""
        assert self._weights is not None
        for tickets in self._credits.values():
            while tickets:
                tickets.popleft().wait()
        self._step_loss = self._gather_losses()
        # The last stage computes nothing. It waits for a whole step, which may exceed the time limit of a message.
        idle = stage == self.last_stage
        self._weights.expect(self._step_limit_s if idle else None)
        if idle:
            self._weights.settle(self._step_limit_s)
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self.micro_steps += self.micro_batches

    def train_batch(self, data_iter: Iterator[Any] | Batches | None = None) -> Tensor:
        """Run a step as PipelineEngine does. On return, the new weights have been received."""
        loss = super().train_batch(data_iter)
        assert self._weights is not None
        with self._in_activity(self.activity):
            self._weights.settle()
        return loss

    # --- running ---

    def _exec_schedule(self, pipe_schedule: TimetableSchedule, evaluation: Evaluation | None = None) -> None:
        assert self._weights is not None
        expected = self.global_steps - self.skipped_steps
        if self._weights.version != expected:
            raise ScheduleError(
                f"rank {self.global_rank}: step {self.global_steps} needs version {expected} of the weights (got "
                f"{self._weights.version})."
            )
        with torch.no_grad():
            super()._exec_schedule(pipe_schedule, evaluation)

    def _send_activations(self, buffer_id: int, stage: int, micro_batch: int, peer: int) -> None:
        """Send outputs, once the backward device has received enough of the earlier ones."""
        if peer in self.layout.placement.forward_devices:
            self.executor.send_activations(buffer_id, stage, micro_batch, peer)
            return
        limit = most_ahead(self.layout.placement.stages, stage)
        ranks = self.layout.peers(self.global_rank, peer)
        for rank in ranks:
            tickets = self._credits.setdefault(rank, deque())
            while len(tickets) >= limit:
                tickets.popleft().wait()
        self.executor.send_activations(buffer_id, stage, micro_batch, peer)
        for rank in ranks:
            tag = make_tag(of_stage(FBD_CREDITS, stage + 1), micro_batch)
            self._credits[rank].append(self.transport.recv(rank, tag))

    def _resized_plan(self, gradient_accumulation_steps: int) -> JobPlan:
        return super()._resized_plan(gradient_accumulation_steps // self.layout.placement.replicas)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the batch size. Raises ValueError if the backward ranks do not support it."""
        per_step = self.micro_batch_size * self.dp_world_size * self.layout.placement.replicas
        if train_batch_size % per_step:
            raise ValueError(
                f"train_batch_size: must be a multiple of {per_step}, one micro-batch per backward pipeline (got "
                f"{train_batch_size})."
            )
        super().set_train_batch_size(train_batch_size)
        self.micro_batches = self.gradient_accumulation_steps() // self.layout.placement.replicas
        if isinstance(self.batches, IteratorBatches):
            self.batches = self._as_batches(self.batches.iterator, self.micro_batches)

    def _reduces_eagerly(self) -> bool:
        return False  # no gradients

    def _as_batches(self, source: Iterator[Any] | Batches | None, micro_batches: int) -> Batches | None:
        # An iterator yields the micro-batches of all backward pipelines of the group, one pipeline after the other.
        return super()._as_batches(source, micro_batches * self.layout.placement.replicas)

    # --- values of the optimizer ---

    def _shared_numbers(self) -> list[float]:
        return [0.0] * 4

    def _take_shared_numbers(self, rows: Sequence[Sequence[float]]) -> None:
        super()._take_shared_numbers(rows)
        self.skipped_steps = int(self._optimizer_values["skipped_steps"])
        self._global_grad_norm = self._optimizer_values["grad_norm"]

    def get_lr(self) -> list[float]:
        """Return the learning rate of the backward ranks' first parameter group in the last step."""
        return [self._optimizer_values.get("lr", 0.0)]

    _INSTRUCTION_MAP: ClassVar[dict[type[ds.PipeInstruction], Callable[..., None]]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        ds.SendActivation: _send_activations,
        SyncWeights: _exec_sync_weights,
    }
