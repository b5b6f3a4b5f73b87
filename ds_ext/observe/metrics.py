"""Metrics of a training loop: a progress line and a record in the metrics file."""

from __future__ import annotations

import errno
import logging
import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import ConfigError
from ..gpus import peak_tflops as peak_of_name
from .progress import (
    additional_losses_text,
    cell,
    duration_text,
    memory_text,
    print_line,
    progress_line,
    rate_text,
)
from .run_record import RunRecord
from .step_metrics import StepMetrics

if TYPE_CHECKING:
    from ..engine.engine import PipelineEngine
    from ..engine.step_report import StepReport

logger = logging.getLogger(__name__)


class Metrics:
    """Progress line and metrics file of a training loop. Call :meth:`log` on every rank after each step.

    Rank 0 prints a line for the first step, every ``log_interval`` steps and the last step, with means over the steps
    since the line before, and a line for every validation loss. If standard output is a terminal, the steps between
    are shown in place. Call :meth:`print_summary` at the end. With ``file``, rank 0 appends one JSON object per step,
    and writes a record of the run beside it; ``python -m ds_ext report FOLDER`` makes a page of both.

    Args:
        engine: from :func:`ds_ext.initialize`.
        total_steps: last step, if known.
        file: path of the metrics file; None: none.
        tokens_per_sample: tokens of a sample, for tokens per second; None: unknown.
        flops_per_sample: model FLOPs of forward and backward of a sample, for TFLOP/s per device; None: unknown.
        peak_tflops: peak TFLOP/s of a device, for the MFU; None: from the name of the GPU, if known.
        log_interval: steps between printed lines; 0: print nothing.
        model: sizes of the model by name, for the record of the run.
        samples_per_epoch: samples of the data, for the number of epochs; None: print none.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(
        self,
        engine: PipelineEngine,
        *,
        total_steps: int | None = None,
        file: str | os.PathLike[str] | None = None,
        tokens_per_sample: int | None = None,
        flops_per_sample: float | None = None,
        peak_tflops: float | None = None,
        log_interval: int = 10,
        model: Mapping[str, Any] | None = None,
        samples_per_epoch: int | None = None,
    ) -> None:
        self._engine = engine
        self._total_steps = total_steps
        self._log_interval = log_interval
        self._tokens_per_sample = tokens_per_sample
        self._flops_per_sample = flops_per_sample
        self._samples_per_epoch = samples_per_epoch
        if peak_tflops is None and engine.device.type == "cuda":
            peak_tflops = peak_of_name(torch.cuda.get_device_name(engine.device))
        self._peak_tflops = peak_tflops
        self._file: MetricsFile | None = None
        self._record: RunRecord | None = None
        if file is not None and engine.global_rank == 0:
            self._file = MetricsFile(file)
            facts = {"total_steps": total_steps, "model": dict(model or {}), **engine.run_facts}
            self._record = RunRecord(Path(file), facts, engine.checkpoint_events.all)
            engine.checkpoint_events.on_event = self._record.write
        self._omitted = 0  # columns that do not fit into a line
        self._memory = "GPU" if engine.device.type == "cuda" else "RSS"
        self._since_line: list[StepMetrics] = []
        self._began_s = time.monotonic()
        self._first_logged_s = self._last_logged_s = self._first_step_s = 0.0
        self._steps, self._seconds, self._samples, self._bubbles = 0, 0.0, 0, 0.0

    def log(
        self,
        loss: torch.Tensor | float,
        *,
        validation_loss: torch.Tensor | float | None = None,
        validation_losses: Mapping[str, torch.Tensor | float] | None = None,
        validation_note: str = "",
    ) -> StepMetrics:
        """Report the engine's last step and return its metrics. Raises ConfigError before the first step.

        Args:
            loss: result of ``engine.train_batch()``.
            validation_loss: result of ``engine.eval_batch()``, if the loop evaluated after this step.
            validation_losses: additional validation losses, such as ``engine.eval_additional_losses``.
            validation_note: text that follows the validation losses in their line.
        """
        report = self._engine.report
        if report is None:
            raise ConfigError("Metrics.log: no step to report (got a call before engine.train_batch()).")
        metrics = self._measure(report, float(loss), validation_loss, validation_losses)
        if self._file is not None:
            self._file.write(metrics)
        if self._record is not None:
            self._record.note_memory(report.gathered.peak_memory_of_ranks)
        is_first, total = self._steps == 0, self._total_steps
        left_s = self._count(metrics)
        if self._engine.global_rank != 0 or self._log_interval <= 0:
            return metrics
        self._since_line.append(metrics)
        is_last = total is not None and metrics.step >= total
        is_due = metrics.step % self._log_interval == 0 or validation_loss is not None
        left_s = None if is_last else left_s
        line, self._omitted = progress_line(
            self._since_line, total, left_s, self._memory, self._between_s(), self._omitted
        )
        print_line(line, keep=is_first or is_last or is_due)
        if is_first or is_last or is_due:
            self._since_line.clear()
        if metrics.validation_loss is not None:
            losses = f"{metrics.validation_loss:.4f}{additional_losses_text(metrics.validation_losses)}"
            print_line(f"step {metrics.step}: validation loss {losses}{validation_note}")
        return metrics

    def _count(self, metrics: StepMetrics) -> float | None:
        """Count a step. Return the seconds until the last step, from the time since the first; None if unknown."""
        now, before = time.monotonic(), self._steps
        if not before:
            self._first_logged_s, self._first_step_s = now, metrics.iter_time_s
        self._last_logged_s = now
        self._steps += 1
        self._seconds += metrics.iter_time_s
        self._samples += self._engine.train_batch_size()
        self._bubbles += metrics.bubble_measured or 0.0
        if not before or self._total_steps is None:
            return None
        return (now - self._first_logged_s) / before * max(0, self._total_steps - metrics.step)

    def _between_s(self) -> float:
        """Return the mean time between two steps, for evaluations, checkpoints and the caller's code."""
        elapsed_s = self._last_logged_s - self._first_logged_s
        return max(0.0, elapsed_s - (self._seconds - self._first_step_s)) / max(1, self._steps - 1)

    def print_summary(self) -> None:
        """Print steps, time, rates, memory and the last checkpoint of this start, on rank 0. Call it on every rank."""
        report = self._engine.report
        if self._engine.global_rank != 0 or self._log_interval <= 0 or report is None or not self._steps:
            return
        peaks = report.gathered.peak_memory_of_ranks
        rate = self._samples / self._seconds
        tflops = self._tflops(rate)
        figures = [f"{self._samples:,} samples", rate_text(rate, "samples/s")]
        if (tokens := self._tokens_per_sample) is not None:
            figures[1:] = [f"{self._samples * tokens:,} tokens", rate_text(rate * tokens, "tokens/s")]
        figures += [cell("", tflops, ".3g", " TFLOP/s per device"), cell("MFU ", self._mfu(tflops), ".1%")]
        elapsed, in_steps = (duration_text(s) for s in (time.monotonic() - self._began_s, self._seconds))
        simulation = self._engine.plan.simulation
        is_even = simulation.costs == type(simulation.costs)()
        costs = "equal stages, free messages" if is_even else "costs of the plan"
        mean = f"mean {self._seconds / self._steps:.3g} s/step"
        steps = f"{self._steps:,} step{'s' * (self._steps != 1)}"
        lines = [
            f"trained   {steps} in {elapsed}, {in_steps} of it in steps ({mean})",
            f"          {', '.join(filter(None, figures))}",
            f"memory    {memory_text(self._memory, max(peaks))} at the peak, on rank {peaks.index(max(peaks))}",
            f"bubble    {self._bubbles / self._steps:.0%} (mean); simulated: {simulation.bubble:.0%} ({costs})",
        ]
        if self._engine.plan.overlaps_steps:
            lines.append("overlap   weights gathered beside the next step (overlap_across_steps)")
        saved = [event["path"] for event in self._engine.checkpoint_events.all if event["event"] == "saved"]
        lines += [f"saved     {path}" for path in saved[-1:]]
        if self._file is not None:
            words = ["python", "-m", "ds_ext", "report", str(self._file.path), "-o", "report.html"]
            lines.append(f"report    {shlex.join(words)}")
        print_line("\n".join(lines))

    def _tflops(self, samples_per_s: float) -> float | None:
        if self._flops_per_sample is None:
            return None
        return samples_per_s * self._flops_per_sample / dist.get_world_size() / 1e12

    def _mfu(self, tflops: float | None) -> float | None:
        return None if tflops is None or self._peak_tflops is None else tflops / self._peak_tflops

    def _measure(
        self,
        report: StepReport,
        loss: float,
        validation_loss: torch.Tensor | float | None,
        validation_losses: Mapping[str, torch.Tensor | float] | None,
    ) -> StepMetrics:
        engine = self._engine
        samples_per_s = engine.train_batch_size() / report.seconds
        tokens = self._tokens_per_sample
        tflops = self._tflops(samples_per_s)
        return StepMetrics(
            step=engine.global_steps,
            loss=loss,
            grad_norm=report.grad_norm,
            lr=report.lr,
            iter_time_s=report.seconds,
            samples_per_s=samples_per_s,
            tokens_per_s=None if tokens is None else samples_per_s * tokens,
            tflops_per_device=tflops,
            mfu=self._mfu(tflops),
            consumed_samples=engine.global_samples,
            schedule=engine.plan.timetable.schedule,
            transport=engine.transport.name,
            peak_memory_bytes=max(report.gathered.peak_memory_of_ranks),
            bubble_measured=report.gathered.bubble,
            bubble_simulated=engine.plan.simulation.bubble,
            losses=_floats(report.gathered.losses.by_name),
            validation_loss=None if validation_loss is None else float(validation_loss),
            validation_losses=_floats(validation_losses),
            snapshot_s=report.snapshot_s,
            recovered_from_step=report.recovered_from,
            tokens=report.gathered.losses.tokens,
            expert_load=report.gathered.expert_load,
            idle_experts=report.gathered.idle_expert_share,
            epoch=engine.global_samples / self._samples_per_epoch if self._samples_per_epoch else None,
        )


class MetricsFile:
    """File of one JSON object per line, which each write opens for appending.

    A full disk does not stop the run: steps that cannot be written are missing, and a warning reports the first of
    them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._failing = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("ab").close()
        except OSError as error:
            raise ConfigError(
                f"metrics file: cannot be opened (got {self.path}: {error.strerror}). Use another path."
            ) from None

    def write(self, metrics: StepMetrics) -> None:
        """Append one record or nothing, which survives a later crash. Log the first of several failures."""
        line = f"{metrics.as_json()}\n".encode()
        try:
            with self.path.open("ab", buffering=0) as file:
                end = os.fstat(file.fileno()).st_size
                if (file.write(line) or 0) < len(line):
                    os.ftruncate(file.fileno(), end)  # remove the partial line
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "metrics file: cannot write step %d to %s (got %s). Training continues without a record of this "
                    "and later steps until a write succeeds.",
                    *(metrics.step, self.path, error.strerror),
                )
            self._failing = True


def _floats(values: Mapping[str, torch.Tensor | float] | None) -> dict[str, float]:
    return {name: float(value) for name, value in (values or {}).items()}
