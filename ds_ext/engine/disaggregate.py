"""Engines of a job whose forwards have ranks of their own (FBD).

A backward rank is DeepSpeed's engine with all it has: optimizer, ZeRO-1, clipping, loss scale. Its grid holds backward
ranks alone, so nothing of DeepSpeed knows of others. A forward rank is the same engine without an optimizer, in a world
of forward ranks, and computes without a graph. Between the two go outputs (forward to backward, bounded: every output
that a backward rank takes is credited to its sender), weights (backward to forward, after a step that changed them),
and with the loss the numbers that only an optimizer knows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe import schedule as ds
from torch import Tensor

from ..comm.transport import Ticket, make_tag
from ..deepspeed_sections import precision
from ..errors import ConfigError, ScheduleError
from ..fbd_layout import FORWARD_ROLE, DisaggregatedLayout
from ..pipe_schedules import Program
from ..pipe_schedules.bridge import SyncWeights, TimetableSchedule
from ..pipe_schedules.check import check
from ..pipe_schedules.fbd import most_ahead
from .batches import Batches, IteratorBatches
from .disaggregate_weights import WeightLink, parameters_in_order
from .engine import PipelineEngine
from .module import PipelineModule

_NOT_ON_FORWARD_RANKS = ("optimizer", "scheduler", "zero_optimization", "fp16", "bf16", "bfloat16")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class _RoleEngine(PipelineEngine):
    """What both roles share."""

    layout: DisaggregatedLayout

    def __init__(self, **kwargs: Any) -> None:
        self._learned: dict[str, float] = {}
        super().__init__(**kwargs)
        self._device = self.module.device_index
        self._stage, self._pipe = self.layout.stage_and_pipe(self._device)
        self._weights = self._make_weight_link()
        self.sync_weights()
        self._exchange()

    def _exchange(self) -> None:
        """Everybody learns what the backward ranks tell; all ranks call it together."""
        mine = torch.tensor(self._tell(), dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        self._learn(torch.stack(everyone))

    @property
    def in_checkpoints(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Backward ranks alone write and read checkpoints."""
        return self.module.role != FORWARD_ROLE

    @property
    def first_in_checkpoints(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The first backward rank."""
        return min(self.layout.groups()["backward"][0])

    def weights_loaded(self) -> None:
        """Forward ranks get what the backward ranks have read."""
        self.sync_weights()
        self._exchange()

    @abstractmethod
    def sync_weights(self) -> None:
        """Give the forward ranks the weights that the backward ranks have now; all ranks call it together."""

    @abstractmethod
    def _make_weight_link(self) -> WeightLink | None:
        """What this rank's weights go or come through; None where it has none to give."""

    def _bridge(self, program: Program) -> TimetableSchedule:
        """Proven for links that hold no more than the forward ranks may be ahead."""
        if program.timetable.trains:
            stages = self.layout.placement.stages
            check(program, link_slots=min(most_ahead(stages, stage) for stage in range(stages - 1)))
        return super()._bridge(program)

    def _links(self) -> dict[tuple[int, int], int]:
        """Also credits, from backward to forward ranks, and weights."""
        found = dict(super()._links())
        groups, stages = self.layout.groups(), self.layout.placement.stages
        for forward, backward in groups["hand-over"]:
            found[backward, forward] = found[forward, backward] = stages + 1
        for forward, backward in groups["weights"]:
            found[backward, forward] = 2
        return found

    def _loss_copies(self) -> int:
        if self._running.program.timetable.trains:
            return super()._loss_copies()
        return self.layout.forward_tensor_parallel_size * self.layout.data_parallel_size

    def _learn(self, told: Tensor) -> None:
        """What the first backward rank says of its optimizer."""
        first = self.first_in_checkpoints
        names = ("lr", "grad_norm", "skipped_steps", "loss_scale")
        self._learned = dict(zip(names, told[first].tolist(), strict=True))

    def _credit_tag(self, stage: int, micro_batch: int) -> int:
        return make_tag(stage, micro_batch)


class BackwardEngine(_RoleEngine):
    """Trains: repeats the forwards of its stage with their graphs, goes backward, steps, and gives the weights away."""

    def _make_weight_link(self) -> WeightLink | None:
        if self._pipe != 0:
            return None  # the replicas have the same weights
        assert self.layout.placement.forward is not None
        peers = self.layout.peers(self.global_rank, self.layout.placement.forward.devices[self._stage])
        return WeightLink(self.transport, parameters_in_order(self.module), peers, 1, self._stage)

    def sync_weights(self) -> None:
        """Send the weights, whatever was sent before."""
        if self._weights is not None:
            self._weights.version = -1
            self._weights.send(self._version)

    @property
    def _version(self) -> int:
        return self.global_steps - self.skipped_steps

    def _exec_sync_weights(self, stage: int, peer: int) -> None:
        assert self._weights is not None
        self._weights.send(self._version)

    def _exec_recv_activations(self, buffer_id: int, stage: int, micro_batch: int, peer: int) -> None:
        super()._exec_recv_activations(buffer_id, stage, micro_batch, peer)
        (rank,) = self.layout.peers(self.global_rank, peer)
        credit = torch.zeros(1, dtype=torch.uint8, device=self.device)
        self.transport.send([credit], rank, self._credit_tag(stage, micro_batch))

    def _tell(self) -> list[float]:
        norm = self.get_global_grad_norm()
        rates = self.get_lr()
        return [
            float(rates[0]) if rates else 0.0,
            float("nan") if norm is None else float(norm),
            float(self.skipped_steps),
            float(self._get_optimizer_loss_scale() or 0.0),
        ]

    _INSTRUCTION_MAP: ClassVar[dict[type[ds.PipeInstruction], Any]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        ds.RecvActivation: _exec_recv_activations,
        SyncWeights: _exec_sync_weights,
    }


class ForwardEngine(_RoleEngine):
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
        forward = self.layout.placement.forward
        assert forward is not None
        peers = self.layout.peers(self.global_rank, self.layout.placement.pipes[0][self._stage])
        return WeightLink(
            self.transport, parameters_in_order(self.module), peers, forward.merged, self._stage
        )

    def sync_weights(self) -> None:
        """Take the weights that the backward ranks send."""
        assert self._weights is not None
        self._weights.version = -1
        self._weights.expect()
        self._weights.settle()

    def _exec_sync_weights(self, stage: int, peer: int) -> None:
        """The step is over: all outputs are taken, new weights are under way."""
        assert self._weights is not None
        for tickets in self._outstanding.values():
            while tickets:
                tickets.popleft().wait()
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self.micro_steps += self.micro_batches
        self._weights.expect()

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """As PipelineEngine's. The weights travel while the loss does; this stage's are in place when it returns."""
        loss = super().train_batch(data_iter)
        assert self._weights is not None
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
        """To a backward device only when it has taken enough of the outputs that it was sent before."""
        assert self.layout.placement.forward is not None
        if peer in self.layout.placement.forward.devices:
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

    def _make_schedule(self, gradient_accumulation_steps: int) -> tuple[TimetableSchedule, float]:
        return super()._make_schedule(gradient_accumulation_steps // self.layout.placement.replicas)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """As that of the backward ranks."""
        super().set_train_batch_size(train_batch_size)
        self.micro_batches = self.gradient_accumulation_steps() // self.layout.placement.replicas

    def _make_eager(self) -> None:
        return None  # there is no gradient

    def _as_batches(self, source: Any, micro_batches: int) -> Batches | None:
        if source is None or isinstance(source, Batches):
            return source
        # An iterator yields what all backward pipelines of the group take, one pipeline after the other.
        count = micro_batches * self.layout.placement.replicas
        return IteratorBatches(source, self.mpu.get_data_parallel_rank(), count)

    # --- what only an optimizer knows ---

    def _tell(self) -> list[float]:
        return [0.0] * 4

    def _learn(self, told: Tensor) -> None:
        super()._learn(told)
        self.skipped_steps = int(self._learned["skipped_steps"])
        self._global_grad_norm = self._learned["grad_norm"]

    def get_lr(self) -> list[float]:
        """Of the first parameter group of the backward ranks, as they told it last."""
        return [self._learned.get("lr", 0.0)]

    _INSTRUCTION_MAP: ClassVar[dict[type[ds.PipeInstruction], Any]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        ds.SendActivation: _exec_send_activations,
        SyncWeights: _exec_sync_weights,
    }


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
    assert layout.placement.forward is not None
    if layout.placement.forward.merged > 1 and model.settings.sequence_parallel:
        raise ConfigError(
            '"sequence_parallel": true and merged forward ranks exclude each other: the ranks of a tensor-parallel '
            "group take slices of the tokens, and a merged rank has all of them. Leave one of the two out."
        )
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
