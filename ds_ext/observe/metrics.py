"""One record per step: a line for people, a JSON object for programs."""

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
    """The keys of ``--metrics-file`` (docs/architecture.md, "Metrics")."""

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
        """The progress line."""
        norm = "-" if self.grad_norm is None else f"{self.grad_norm:.3f}"
        measured = "-" if self.bubble_measured is None else f"{self.bubble_measured:.0%}"
        return (
            f"step {self.step:>{len(str(train_iters))}}/{train_iters} | loss {self.loss:.4f} | "
            f"lr {self.lr:.2e} | grad norm {norm} | {self.tokens_per_s:,.0f} tokens/s | "
            f"bubble {measured} (ideal devices {self.bubble_simulated:.0%})"
        )


class MetricsFile:
    """Appends one JSON object a line; nothing is written when ``path`` is None.

    A number that is not finite (a loss that has diverged) is written as null: NaN is not JSON. A full disk must not
    end a run: a step that cannot be written is missing in the file, and a warning names the first one.
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
                    f"--metrics-file: cannot open {self._path} (got {error.strerror}). Give another path."
                ) from None
        return self

    def write(self, metrics: StepMetrics) -> None:
        """Append one record; a crash later loses none of it."""
        if self._file is None:
            return
        record = {key: _finite(value) for key, value in asdict(metrics).items()}
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) < len(line):
                os.ftruncate(self._file.fileno(), end)  # no half lines
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "--metrics-file: cannot write step %d to %s (got %s). Training continues; steps are missing in "
                    "the file until writing succeeds.",
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
    """Most memory that this process has held: of the device's allocator on CUDA, resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
