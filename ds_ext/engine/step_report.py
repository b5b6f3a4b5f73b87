"""Numbers of a step: what the ranks gather in it, and the report of a training step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch

from .all_ranks import gather_rows
from .losses.local import LocalLosses, StepMeans
from .step_data import StepData, require_data, require_same_samples

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankNumbers:
    """Numbers of one rank that all ranks gather in a step or an evaluation.

    Attributes:
        busy_s: seconds of computations.
        span_s: seconds from the start of the step to the end of the last computation.
        peak_memory_bytes: peak memory so far.
        weights_set: elements of the weights that the script set before the step.
        num_changed: parameters that the script froze or unfroze before the step.
        stop_cause: cause of a request to end the run; 0 without one. See :mod:`..launch.stop`.
        batches_read, batches_needed: :attr:`.step_data.StepData.ended`.
        dynamic_scale: whether the optimizer skips steps to find its loss scale; forward ranks (FBD) have none.
        expert_load, num_idle_experts, num_experts: :class:`..experts.Loads` of this rank's layers and micro-batches.
    """

    busy_s: float
    span_s: float
    peak_memory_bytes: float
    weights_set: float
    num_changed: float
    stop_cause: float
    batches_read: float
    batches_needed: float
    dynamic_scale: float
    expert_load: float
    num_idle_experts: float
    num_experts: float


@dataclass(frozen=True)
class Gathered:
    """Losses of a step or an evaluation, and the numbers of all ranks."""

    losses: StepMeans
    ranks: tuple[RankNumbers, ...]

    @property
    def bubble(self) -> float:
        """Share of the time until the last computation in which an average rank did not compute."""
        span_s = max(rank.span_s for rank in self.ranks)
        return 1 - sum(rank.busy_s for rank in self.ranks) / len(self.ranks) / max(span_s, 1e-9)

    @property
    def expert_load(self) -> float | None:
        """Most tokens of an expert relative to the mean of its layer, on one rank; None without experts."""
        return max(rank.expert_load for rank in self.ranks) or None

    @property
    def idle_expert_share(self) -> float | None:
        """Share of the experts that got no token of a rank; None without experts."""
        if self.expert_load is None:
            return None
        return sum(rank.num_idle_experts for rank in self.ranks) / sum(
            rank.num_experts for rank in self.ranks
        )

    @property
    def peak_memory_of_ranks(self) -> tuple[int, ...]:
        return tuple(int(rank.peak_memory_bytes) for rank in self.ranks)


@dataclass(frozen=True)
class StepReport:
    """Measurements of a training step.

    Attributes:
        seconds: duration on this rank.
        lr: learning rate of the first parameter group.
        grad_norm: norm of the gradients, over all ranks; None: not measured.
        snapshot_s: seconds for this rank's snapshot of the step before, and for waiting for copies; None without one.
        recovered_from: in the first step after a recovery, the step from which it continued; else None.
    """

    seconds: float
    lr: float
    grad_norm: float | None
    gathered: Gathered
    snapshot_s: float | None
    recovered_from: int | None

    def monitor_events(self, samples: int) -> list[tuple[str, float, int]]:
        """Return (name, value, samples) of what DeepSpeed does not write to its monitors.

        ``samples`` so far are the position on the monitors' axis.
        """
        additional_losses = self.gathered.losses.by_name or {}
        values = {"grad_norm": self.grad_norm, "bubble": self.gathered.bubble, **additional_losses}
        return [
            (f"Train/Samples/{key}", float(value), samples)
            for key, value in values.items()
            if value is not None
        ]


def report_property(read: Callable[[StepReport], Any], before_the_first: Any = None) -> Any:
    """Return a property of an engine that reads the report of its last training step."""
    return property(lambda engine: before_the_first if engine.report is None else read(engine.report))


def gather_step(
    own: RankNumbers, data: StepData, losses: LocalLosses, step_number: int, device: torch.device
) -> Gathered:
    """Gather losses and numbers of all ranks, compare their samples, and warn of weights that the script set.

    In training, this comes before the optimizer step, so that a step with other samples changes no weight. All ranks
    call it together. ``step_number``, from 1, is for this warning.
    """
    numbers, samples = astuple(own), data.checksums()
    rows = gather_rows([*numbers, *samples, *losses.numbers()], device)
    first_loss = len(numbers) + len(samples)
    ranks = tuple([RankNumbers(*row[: len(numbers)]) for row in rows])
    require_data(data, [(rank.batches_read, rank.batches_needed) for rank in ranks])
    require_same_samples([row[len(numbers) : first_loss] for row in rows])
    weights_set = sum(rank.weights_set for rank in ranks)
    if torch.distributed.get_rank() == 0 and weights_set:
        text = "step %d: the script set %d elements of the weights; the fp32 master weights have their values"
        logger.warning(text, step_number, int(weights_set))
    return Gathered(losses.result([row[first_loss:] for row in rows]), ranks)
