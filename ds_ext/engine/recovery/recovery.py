"""Snapshots after every step, and their loading when the launcher has restarted the ranks.

A step is complete when all ranks have written their snapshots of it: each rank writes its own before the losses are
gathered, and the gathering is the vote. So a step whose loss was reported is never repeated, and a rank that dies in
the optimizer step never leaves ranks one step apart: they load the newest reported step.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...config.sections import RecoveryOptions
from ...errors import CheckpointError, ConfigError
from ..checkpoint.states import Checkpointed
from ..together import together
from .keeper import Keeper, KeeperError
from .slots import Slots, packed, unpacked
from .state import load, require_position, require_same_job, tensors_of, values_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovered:
    """Result of a recovery.

    Attributes:
        step: number of completed steps.
        restart: number of the restart, from 1.
        lost_steps: completed steps that will run again.
        down_s: seconds from the end of the last completed step to the start of this process.
        set_up_s: seconds from the start of this process to the recovery.
        load_s: seconds for finding and loading the snapshots.
    """

    step: int
    restart: int
    lost_steps: int
    down_s: float
    set_up_s: float
    load_s: float

    def __str__(self) -> str:
        lost = f"{self.lost_steps} step{'s' * (self.lost_steps != 1)} lost"
        parts = f"down {self.down_s:.1f} s, set-up {self.set_up_s:.1f} s, loading {self.load_s:.1f} s"
        return f"recovered at step {self.step} from host memory (restart {self.restart}): {lost}; {parts}"


def restarts() -> int:
    """Return how often the launcher has restarted the ranks. All ranks must call this together.

    The launcher of a new host has not restarted its ranks, so the largest number counts.
    """
    return max(together(lambda: int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))))


class Recovery:
    """Snapshots of this rank. All methods must be called by all ranks together.

    Args:
        engine: engine whose state is saved.
        options: section "recovery" of the JSON.

    Raises:
        ConfigError: on all ranks, if the keeper of a host fails.
    """

    def __init__(self, engine: Checkpointed, options: RecoveryOptions) -> None:
        self._engine, self._options = engine, options
        self._rank = dist.get_rank()
        self._recovered_from: int | None = None
        self.restart = restarts()
        self.pending = self.restart > 0

        def start() -> Slots:
            keeper = Keeper(os.getppid())
            try:
                keeper.start()
                return Slots(keeper, self._rank)
            except KeeperError as error:
                raise ConfigError(
                    f"ds_ext.recovery: the process that keeps the snapshots on host {socket.gethostname()} failed (got "
                    f"{error}). Remove the section to train without snapshots."
                ) from None

        own: list[Slots] = []
        together(lambda: own.append(start()))
        self._slots = own[0]

    def snapshot(self) -> float | None:
        """Write this rank's snapshot of the step that it has completed, if it is due. The caller then gathers losses.

        Returns the seconds taken; None if it is not due.

        Raises:
            ConfigError: the position in the data cannot be saved, or the script did not call ``engine.recover()``.
        """
        step, begin = self._engine.global_steps, time.perf_counter()
        if self.pending:
            raise ConfigError(
                "ds_ext.recovery: the launcher has restarted the ranks, and the script trains from the beginning (got "
                "no call of engine.recover()). Call it before the first step, and train from engine.global_steps."
            )
        if step % self._options.every:
            return None
        require_position(self._engine)
        try:
            self._slots.write(step, tensors_of(self._engine), packed(values_of(self._engine)))
        except KeeperError as error:
            raise ConfigError(
                f"ds_ext.recovery: no snapshot of step {step} on host {socket.gethostname()} (got {error}). Use fewer "
                f"ranks per host, or remove the section."
            ) from None
        return time.perf_counter() - begin

    def completed(self) -> int | None:
        """Record that all ranks have completed the step. Returns the step of a recovery just before it, else None."""
        self._slots.completed(self._engine.global_steps)
        recovered_from, self._recovered_from = self._recovered_from, None
        return recovered_from

    def recover(self) -> Recovered | None:
        """Load the newest reported step that all ranks have. Returns None for a first start, or if there is none."""
        self.pending = False
        if self.restart == 0:
            return None
        begin = time.time()
        found = together(lambda: (self._slots.steps(), self._slots.progress))
        common = set.intersection(*(set(steps) for steps, _ in found))
        # Rank 0 reports the steps. One that it has not completed may have snapshots on all ranks, and runs again, so
        # that it is reported.
        last, last_s = found[0][1]
        for step in sorted((step for step in common if step <= last), reverse=True):
            parts = self._read(step)
            if parts is None:
                continue
            load(self._engine, *parts)
            self._slots.forget_after(step)
            self._recovered_from = step
            dist.barrier()  # no rank may write a later step while another still has an older one of that number
            return Recovered(
                step,
                self.restart,
                lost_steps=last - step,
                down_s=max(0.0, _started_s() - last_s),
                set_up_s=begin - _started_s(),
                load_s=time.time() - begin,
            )
        return None

    def _read(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return this rank's snapshot; None on all ranks if one of them is damaged or of another job."""
        parts: list[tuple[dict[str, Tensor], dict[str, Any]]] = []

        def read() -> None:
            tensors, state = self._slots.read(step)
            values = unpacked(state)
            require_same_job(self._engine, values["job"])
            parts.append((tensors, values))

        try:
            together(read, CheckpointError)
        except CheckpointError as error:
            if self._rank == 0:
                logger.warning("%s An older snapshot is used, if there is one.", error)
            return None
        return parts[0]


def _started_s() -> float:
    """Return the start of this process in seconds since 1970."""
    with open("/proc/self/stat", encoding="utf-8") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    with open("/proc/uptime", encoding="ascii") as file:
        up_s = float(file.read().split()[0])
    return time.time() - up_s + ticks / os.sysconf("SC_CLK_TCK")
