"""What forward and backward ranks share: pairs of ranks between the roles, and how a job tells what it lost."""

from __future__ import annotations

import re
from abc import abstractmethod
from datetime import timedelta
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor

from ...comm.transport import make_tag
from ...parallel.fbd import BACKWARD_ROLE, FORWARD_ROLE, DisaggregatedLayout
from ..engine import PipelineEngine
from .weights import WeightLink

_SHOWN = 16  # ranks of a role in an error


class RoleEngine(PipelineEngine):
    """The engine of a rank that has a role."""

    layout: DisaggregatedLayout

    def __init__(self, **kwargs: Any) -> None:
        self._learned: dict[str, float] = {}
        self._evaluation_group: Any = None
        super().__init__(**kwargs)
        self._stage, self._pipe = self.layout.stage_and_pipe(self.module.device_index)
        with self._during("setting up"):
            self._weights = self._make_weight_link()
            self.sync_weights()
            self._exchange()

    def _exchange(self) -> None:
        """Everybody learns what the backward ranks tell; all ranks call it together."""
        mine = torch.tensor(self._tell(), dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        self._learn(torch.stack(everyone))

    # --- checkpoints ---

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

    # --- between the roles ---

    @abstractmethod
    def sync_weights(self) -> None:
        """Give the forward ranks the weights that the backward ranks have now; all ranks call it together."""

    @abstractmethod
    def _make_weight_link(self) -> WeightLink | None:
        """What this rank's weights go or come through; None where it has none to give."""

    def _links(self) -> dict[tuple[int, int], int]:
        """Also credits, from backward to forward ranks, and weights."""
        found = dict(super()._links())
        groups, stages = self.layout.groups(), self.layout.placement.stages
        for forward, backward in groups["hand-over"]:
            found[backward, forward] = found[forward, backward] = stages + 1
        for forward, backward in groups["weights"]:
            found[backward, forward] = 2
        return found

    def _credit_tag(self, stage: int, micro_batch: int) -> int:
        return make_tag(stage, micro_batch)

    def _learn(self, told: Tensor) -> None:
        """What the first backward rank says of its optimizer."""
        names = ("lr", "grad_norm", "skipped_steps", "loss_scale")
        self._learned = dict(zip(names, told[self.first_in_checkpoints].tolist(), strict=True))

    # --- loss ---

    def _loss_copies(self) -> int:
        if self._running.program.timetable.trains:
            return super()._loss_copies()
        return self.layout.forward_tensor_parallel_size * self.layout.data_parallel_size

    def _aggregate_total_loss(self) -> Tensor:
        if not self._running.program.timetable.trains:
            self._await_evaluation()
        return super()._aggregate_total_loss()

    def _await_evaluation(self) -> None:
        """Backward ranks have nothing to do in an evaluation, and wait longer than for one message."""
        if self._evaluation_group is None:
            self._evaluation_group = dist.new_group(ranks=list(range(dist.get_world_size())))
        limit = timedelta(seconds=self._step_limit_s)
        torch.distributed.distributed_c10d._set_pg_timeout(limit, self._evaluation_group)
        dist.barrier(group=self._evaluation_group)

    @property
    def _step_limit_s(self) -> float:
        """How long a rank waits that has nothing to do in a step: every micro-batch may take its time."""
        return (
            self.module.settings.transport_options.timeout_s * self._running.program.timetable.micro_batches
        )

    # --- failures ---

    def _who(self, told: str) -> str:
        """The roles of the ranks that an error names; collectives name none: then those of all."""
        known = [rank for rank in _ranks_in(told) if rank < self.layout.world_size]
        roles = [f"rank {rank} is {self.describe(rank)}" for rank in known] or [
            f"{role} ranks {_shortly(self.layout.groups()[role][0])}"
            for role in (FORWARD_ROLE, BACKWARD_ROLE)
        ]
        return ", ".join(roles)

    def describe(self, rank: int) -> str:
        """``the forward rank of stage 0``, with what else tells it from the others."""
        device, group, tensor = self.layout.coordinates(rank)
        stage, pipe = self.layout.stage_and_pipe(device)
        more = [] if pipe is None or self.layout.placement.replicas == 1 else [f"pipeline {pipe}"]
        more += [f"group {group}"] if self.layout.data_parallel_size > 1 else []
        more += [f"tensor-parallel rank {tensor}"] if self.layout.tensor_ranks(device) > 1 else []
        return ", ".join([f"the {self.layout.role(rank)} rank of stage {stage}", *more])


def _ranks_in(text: str) -> list[int]:
    """The ranks that an error names, each once."""
    return [*dict.fromkeys(int(number) for number in re.findall(r"\brank (\d+)", text))]


def _shortly(ranks: list[int]) -> str:
    """``0 2 4 6``, and no more than the first ones."""
    return " ".join(map(str, sorted(ranks)[:_SHOWN])) + (" ..." if len(ranks) > _SHOWN else "")
