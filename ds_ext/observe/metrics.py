"""Metrics of a step: a progress line and a record in the metrics file."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import resource
import sys
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step, with the keys of ``--metrics-file`` (docs/architecture.md, "Metrics")."""

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    iter_time_s: float
    tokens_per_s: float
    consumed_samples: int
    schedule: str
    transport: str
    peak_memory_bytes: int
    bubble_measured: float | None
    bubble_simulated: float

    def line(self, train_iters: int) -> str:
        """Return the progress line."""
        norm = "-" if self.grad_norm is None else f"{self.grad_norm:.3f}"
        measured = "-" if self.bubble_measured is None else f"{self.bubble_measured:.0%}"
        return (
            f"step {self.step:>{len(str(train_iters))}}/{train_iters} | loss {self.loss:.4f} | "
            f"lr {self.lr:.2e} | grad norm {norm} | {self.tokens_per_s:,.0f} tokens/s | "
            f"bubble {measured} (ideal devices {self.bubble_simulated:.0%})"
        )


class MetricsFile:
    """File of one JSON object per line, opened for appending.

    Numbers that are not finite, such as a diverged loss, become null, because JSON has no NaN. A full disk does not
    stop the run: steps that cannot be written are missing, and a warning reports the first of them.

    Args:
        path: path of the file; None: write nothing.

    Raises:
        ConfigError: on entry, if the file cannot be opened.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._failing = False

    def __enter__(self) -> MetricsFile:
        if self._path is not None:
            try:
                Path(self._path).parent.mkdir(parents=True, exist_ok=True)
                self._file = FileIO(self._path, "a")
            except OSError as error:
                raise ConfigError(
                    f"--metrics-file: cannot be opened (got {self._path}: {error.strerror}). Use another path."
                ) from None
        return self

    def write(self, metrics: StepMetrics) -> None:
        """Append one record. A later crash does not lose it."""
        if self._file is None:
            return
        record = {key: _finite(value) for key, value in asdict(metrics).items()}
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) < len(line):
                os.ftruncate(self._file.fileno(), end)  # remove the partial line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "--metrics-file: cannot write step %d to %s (got %s). Training continues without a record of this "
                    "and later steps until a write succeeds.",
                    *(metrics.step, self._path, error.strerror),
                )
            self._failing = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: torch's allocations on CUDA, resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
