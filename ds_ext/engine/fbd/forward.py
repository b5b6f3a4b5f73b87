"""Engine of a forward rank (FBD): forwards without a graph, for backward ranks and in evaluations."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from deepspeed.runtime.pipe import schedule as ds
from torch import Tensor

from ...comm.transport import Ticket
from ...errors import ScheduleError
from ...pipe_schedules.bridge import SyncWeights, TimetableSchedule
from ...pipe_schedules.methods.fbd import most_ahead
from ...planner.job_plan import JobPlan
from ..batches import Batches, IteratorBatches
from ..engine import PipelineEngine
from .role import RoleEngine
from .weights import WeightLink, weights_in_order


class ForwardEngine(RoleEngine):
    """Computes forwards for the backward ranks, and evaluations; has neither gradients nor an optimizer."""

    def __init__(self, *, dtype: torch.dtype, **kwargs: Any) -> None:
        kwargs["model"].to(dtype)
        self._outstanding: dict[int, deque[Ticket]] = {}
        super().__init__(**kwargs)
        # DeepSpeed counts the micro-batches of the whole forward pipeline; everything else those of a backward one.
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
        """Take the weights that the backward ranks send."""
        assert self._weights is not None
        self._weights.version = -1
        self._weights.expect()
        self._weights.settle()

    def _exec_sync_weights(self, stage: int, peer: int) -> None:
        """End the step: wait until all outputs are taken, and ask for the new weights."""
        assert self._weights is not None
        for tickets in self._outstanding.values():
            while tickets:
                tickets.popleft().wait()
        # The last stage has computed nothing: it waits for the whole step, which may take longer than a message.
        idle = stage == self.last_stage
        self._weights.expect(self._step_limit_s if idle else None)
        if idle:
            self._weights.settle(self._step_limit_s)
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self.micro_steps += self.micro_batches

    def train_batch(self, data_iter: Iterator[Any] | Batches | None = None) -> Tensor:
        """Take a step as PipelineEngine does. The weights travel beside the loss and are in place on return."""
        loss = super().train_batch(data_iter)
        assert self._weights is not None
        with self._in_activity(self.activity):
            self._weights.settle()
        return loss

    # --- running ---

    def _exec_schedule(self, pipe_schedule: TimetableSchedule) -> None:
        assert self._weights is not None
        expected = self.global_steps - self.skipped_steps
        if self._weights.version != expected:
            raise ScheduleError(
                f"rank {self.global_rank} would compute step {self.global_steps} with version "
                f"{self._weights.version} of its weights instead of {expected}."
            )
        with torch.no_grad():
            super()._exec_schedule(pipe_schedule)

    def _exec_send_activations(self, buffer_id: int, stage: int, micro_batch: int, peer: int) -> None:
        """Send outputs; to a backward device only after it has taken enough of the earlier ones."""
        if peer in self.layout.placement.forward_devices:
            super()._exec_send_activations(buffer_id, stage, micro_batch, peer)
            return
        room = most_ahead(self.layout.placement.stages, stage)
        ranks = self.layout.peers(self.global_rank, peer)
        for rank in ranks:
            tickets = self._outstanding.setdefault(rank, deque())
            while len(tickets) >= room:
                tickets.popleft().wait()
        super()._exec_send_activations(buffer_id, stage, micro_batch, peer)
        for rank in ranks:
            tag = self._credit_tag(stage + 1, micro_batch)
            self._outstanding[rank].append(self.transport.recv(rank, tag))

    def _resized_plan(self, gradient_accumulation_steps: int) -> JobPlan:
        return super()._resized_plan(gradient_accumulation_steps // self.layout.placement.replicas)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the batch size as the backward ranks do. Raises ValueError where they refuse."""
        per_step = self.micro_batch_size * self.dp_world_size * self.layout.placement.replicas
        if train_batch_size % per_step:
            raise ValueError(
                f"the train batch size must be a multiple of {per_step}, a micro-batch for each of all backward "
                f"pipelines; got {train_batch_size}."
            )
        super().set_train_batch_size(train_batch_size)
        self.micro_batches = self.gradient_accumulation_steps() // self.layout.placement.replicas
        if isinstance(self.batches, IteratorBatches):
            self.batches = self._as_batches(self.batches.iterator, self.micro_batches)

    def _reduces_eagerly(self) -> bool:
        return False  # there is no gradient

    def _as_batches(self, source: Iterator[Any] | Batches | None, micro_batches: int) -> Batches | None:
        if source is None or isinstance(source, Batches):
            return source
        # An iterator yields what all backward pipelines of the group take, one pipeline after the other.
        count = micro_batches * self.layout.placement.replicas
        return IteratorBatches(source, self.mpu.get_data_parallel_rank(), count)

    # --- numbers of the optimizer ---

    def _shared_numbers(self) -> list[float]:
        return [0.0] * 4

    def _take_shared_numbers(self, rows: Tensor) -> None:
        super()._take_shared_numbers(rows)
        self.skipped_steps = int(self._optimizer_numbers["skipped_steps"])
        self._global_grad_norm = self._optimizer_numbers["grad_norm"]

    def get_lr(self) -> list[float]:
        """Return the learning rate of the backward ranks' first parameter group in their last step."""
        return [self._optimizer_numbers.get("lr", 0.0)]

    _INSTRUCTION_MAP: ClassVar[dict[type[ds.PipeInstruction], Callable[..., None]]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        ds.SendActivation: _exec_send_activations,
        SyncWeights: _exec_sync_weights,
    }
