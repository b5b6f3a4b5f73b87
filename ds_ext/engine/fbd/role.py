"""Engine of a job with separate forward and backward ranks (FBD): the part that both roles share.

A backward rank is DeepSpeed's engine with all it has: optimizer, ZeRO-1, clipping, loss scale. Its grid holds backward
ranks alone, so no part of DeepSpeed sees others. A forward rank is the same engine without an optimizer, in a world of
forward ranks, and computes without a graph. Between the two go outputs (forward to backward, bounded: a backward rank
credits every output that it takes), weights (backward to forward, after a step that changed them), and with the loss
the numbers of the optimizer.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from datetime import timedelta
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ...comm.transport import make_tag
from ...parallel.fbd import BACKWARD_ROLE, FORWARD_ROLE, DisaggregatedLayout
from ..engine import PipelineEngine
from .weights import WeightLink

_SHOWN = 16  # ranks of a role in an error


class RoleEngine(PipelineEngine):
    """Engine of a rank that has a role."""

    layout: DisaggregatedLayout

    def __init__(self, **kwargs: Any) -> None:
        self._optimizer_numbers: dict[str, float] = {}  # of the backward ranks
        self._evaluation_group: ProcessGroup | None = None
        super().__init__(**kwargs)
        self._stage, self._pipe = self.layout.stage_and_pipe(self.module.device_index)
        with self._in_activity("setting up"):
            self._weights = self._make_weight_link()
            self.sync_weights()
            self._exchange()

    def _exchange(self) -> None:
        """Share the optimizer's numbers among all ranks; a collective call."""
        row = torch.tensor(self._shared_numbers(), dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        self._take_shared_numbers(torch.stack(rows))

    # --- checkpoints ---

    @property
    def in_checkpoints(self) -> bool:
        """True on backward ranks; they alone write and read checkpoints."""
        return self.module.role != FORWARD_ROLE

    @property
    def first_in_checkpoints(self) -> int:
        """The first backward rank."""
        return min(self.layout.groups()["backward"][0])

    def weights_loaded(self) -> None:
        """Send the loaded weights to the forward ranks."""
        self.sync_weights()
        self._exchange()

    # --- between the roles ---

    @abstractmethod
    def sync_weights(self) -> None:
        """Send the backward ranks' present weights to the forward ranks; a collective call."""

    @abstractmethod
    def _make_weight_link(self) -> WeightLink | None:
        """Return this rank's end of the link for weights; None for a backward rank without a forward rank."""

    def _links(self) -> dict[tuple[int, int], int]:
        """Add the links for credits, from backward to forward ranks, and for weights."""
        found = super()._links()
        groups, stages = self.layout.groups(), self.layout.placement.stages
        for forward, backward in groups["hand-over"]:
            found[backward, forward] = found[forward, backward] = stages + 1
        for forward, backward in groups["weights"]:
            found[backward, forward] = 2
        return found

    def _credit_tag(self, stage: int, micro_batch: int) -> int:
        return make_tag(stage, micro_batch)

    def _take_shared_numbers(self, rows: Tensor) -> None:
        """Keep the optimizer's numbers on the first backward rank."""
        names = ("lr", "grad_norm", "skipped_steps", "loss_scale")
        self._optimizer_numbers = dict(zip(names, rows[self.first_in_checkpoints].tolist(), strict=True))

    # --- loss ---

    def _loss_copies(self) -> int:
        if self.running.program.timetable.trains:
            return super()._loss_copies()
        return self.layout.forward_tensor_parallel_size * self.layout.data_parallel_size

    def _aggregate_total_loss(self) -> Tensor:
        if not self.running.program.timetable.trains:
            self._await_evaluation()
        return super()._aggregate_total_loss()

    def _await_evaluation(self) -> None:
        """Wait for all ranks; longer than for one message, as backward ranks do nothing in an evaluation."""
        if self._evaluation_group is None:
            self._evaluation_group = dist.new_group(ranks=list(range(dist.get_world_size())))
        limit = timedelta(seconds=self._step_limit_s)
        torch.distributed.distributed_c10d._set_pg_timeout(limit, self._evaluation_group)
        dist.barrier(group=self._evaluation_group)

    @property
    def _step_limit_s(self) -> float:
        """Longest wait of a rank without work in a step, in seconds: the limit of a message per micro-batch."""
        return self.plan.settings.transport_options.timeout_s * self.running.program.timetable.micro_batches

    # --- failures ---

    def _describe_ranks(self, text: str) -> str:
        """Return the roles of the ranks that an error names; of all ranks for a collective, which names none."""
        known = [rank for rank in _ranks_in(text) if rank < self.layout.world_size]
        roles = [f"rank {rank} is {self.describe(rank)}" for rank in known] or [
            f"{role} ranks {_shortly(self.layout.groups()[role][0])}"
            for role in (FORWARD_ROLE, BACKWARD_ROLE)
        ]
        return ", ".join(roles)

    def describe(self, rank: int) -> str:
        """Return ``the forward rank of stage 0``, with pipeline, group and tensor-parallel rank as needed."""
        device, group, tensor = self.layout.coordinates(rank)
        stage, pipe = self.layout.stage_and_pipe(device)
        more = [] if pipe is None or self.layout.placement.replicas == 1 else [f"pipeline {pipe}"]
        more += [f"group {group}"] if self.layout.data_parallel_size > 1 else []
        more += [f"tensor-parallel rank {tensor}"] if self.layout.tensor_ranks(device) > 1 else []
        return ", ".join([f"the {self.layout.role(rank)} rank of stage {stage}", *more])


def _ranks_in(text: str) -> list[int]:
    """Return the ranks that an error names, each once."""
    return [*dict.fromkeys(int(number) for number in re.findall(r"\brank (\d+)", text))]


def _shortly(ranks: list[int]) -> str:
    """Return ``0 2 4 6``: the first ranks."""
    return " ".join(map(str, sorted(ranks)[:_SHOWN])) + (" ..." if len(ranks) > _SHOWN else "")
