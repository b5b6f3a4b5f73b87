"""Numbers of a step: what the ranks gather in it, and the report of a training step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..planner.job_plan import JobPlan
from .batches import StepData, require_data, require_same_samples
from .deepspeed_api.device import peak_memory_bytes
from .losses.step import StepLoss, StepLosses
from .together import rows_of_ranks
from .tracing.clock import BusyClock

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gathered:
    """Numbers of all ranks in a step or an evaluation.

    Attributes:
        bubble: share of the time so far in which an average rank did not compute.
        peak_memory_of_ranks: peak memory of every rank so far, in bytes.
        stop_causes: cause of every rank's request to end the run; 0 without one. See :mod:`..launch.stop`.
        num_changed: number of parameters that the script froze or unfroze before the step.
    """

    losses: StepLoss
    bubble: float
    peak_memory_of_ranks: tuple[int, ...]
    stop_causes: tuple[int, ...]
    num_changed: int


@dataclass(frozen=True)
class StepReport:
    """Measurements of a training step.

    Attributes:
        seconds: duration on this rank.
        lr: learning rate of the first parameter group.
        snapshot_s: seconds for this rank's snapshot of the step before, and for waiting for copies; None without one.
        recovered_from: in the first step after a recovery, the step from which it continued; else None.
    """

    seconds: float
    lr: float
    of_ranks: Gathered
    snapshot_s: float | None
    recovered_from: int | None

    def monitor_events(
        self, grad_norm: Any, additional_losses: Mapping[str, torch.Tensor] | None, samples: int
    ) -> list[tuple[str, float, int]]:
        """Return (name, value, samples) of what DeepSpeed does not write to its monitors.

        ``samples`` so far are the position on the monitors' axis. ``grad_norm`` None: not measured.
        """
        values = {"grad_norm": grad_norm, "bubble": self.of_ranks.bubble, **(additional_losses or {})}
        return [
            (f"Train/Samples/{key}", float(value), samples)
            for key, value in values.items()
            if value is not None
        ]


def _of_report(read: Callable[[StepReport], Any], before_the_first: Any = None) -> property:
    """Return a property of an engine that reads the report of its last training step."""
    return property(lambda engine: before_the_first if engine.report is None else read(engine.report))


class Measured:
    """Measurements of an engine: values of its last report, None before the first step, and of its simulation."""

    report: StepReport | None
    plan: JobPlan
    step_s = _of_report(lambda report: report.seconds)
    step_lr = _of_report(lambda report: report.lr)
    bubble_measured = _of_report(lambda report: report.of_ranks.bubble)
    peak_memory_of_ranks = _of_report(lambda report: report.of_ranks.peak_memory_of_ranks, ())
    peak_memory_bytes = _of_report(lambda report: max(report.of_ranks.peak_memory_of_ranks))

    @property
    def bubble_simulated(self) -> float:
        """Share of the simulated step in which an average device does not compute."""
        return self.plan.simulation.bubble


def gather_step(
    data: StepData,
    losses: StepLosses,
    busy: BusyClock,
    weights_set: int,
    num_changed: int,
    step: int,
    device: torch.device,
    stop_cause: int,
) -> Gathered:
    """Gather losses and measurements of all ranks, compare their samples, and warn of weights that the script set.

    In training, this comes before the optimizer step, so that a step with other samples changes no weight. All ranks
    call it together.

    Args:
        weights_set: number of elements of the weights that the script set before the step.
        num_changed: number of parameters of this rank that the script froze or unfroze before the step.
        step: number of the step, from 1, for this warning.
        stop_cause: cause of this rank's request to end the run; 0 without one.
    """
    changes = float(weights_set), float(num_changed)
    measured = [*busy.read(), float(peak_memory_bytes(device)), *changes, float(stop_cause)]
    measured += map(float, data.ended)
    samples = data.checksums()
    rows = rows_of_ranks([*measured, *samples, *losses.numbers()], device)
    first_loss = len(measured) + len(samples)
    require_data(data, [row[len(measured) - 2 : len(measured)] for row in rows])
    require_same_samples([row[len(measured) : first_loss] for row in rows])
    seconds, spans, peaks, weights, changed, causes, *_ = zip(*rows, strict=True)
    if torch.distributed.get_rank() == 0 and any(weights):
        text = "step %d: the script set %d elements of the weights; the fp32 master weights have their values"
        logger.warning(text, step, int(sum(weights)))
    bubble = 1 - sum(seconds) / len(seconds) / max(*spans, 1e-9)
    result = losses.result([row[first_loss:] for row in rows])
    return Gathered(result, bubble, tuple(map(int, peaks)), tuple(map(int, causes)), int(sum(changed)))
