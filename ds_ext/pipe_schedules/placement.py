"""Placement: the device of every stage of every pipe.

A pipe is one copy of the model, distributed over the devices. Most schedules have one pipe. BitPipe and Chimera have
two, in opposite directions, so every device holds stages of both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ..errors import ScheduleError
from .ops import ALL_KINDS, FORWARD, KINDS, RECOMPUTE
from .stage_kinds import HEAD_PART, StageKind, StageRow, chain, chain_to_parts


class Chunk(NamedTuple):
    """Stage of a pipe that a device holds."""

    stage: int
    pipe: int


@dataclass(frozen=True)
class ForwardPipe:
    """Devices that compute only forwards, for all pipes of a placement (``fbd``). Each holds one stage.

    Args:
        devices: ``devices[stage]`` computes the forwards of that stage.
        merged: tensor-parallel ranks of a backward device that one rank of a forward device replaces; 1: no merging.
        slowdown: time of the same work on a forward device, relative to a backward device.
    """

    devices: tuple[int, ...]
    merged: int = 1
    slowdown: float = 1.0

    @property
    def time_factor(self) -> float:
        """Time of a forward on its forward device, relative to a backward device."""
        return self.merged * self.slowdown


@dataclass(frozen=True)
class Placement:
    """Device of every stage: ``pipes[p][stage]`` computes ``stage`` for the micro-batches of pipe ``p``.

    With ``forward``, the devices of ``forward`` compute the forwards of all pipes. The devices of ``pipes`` repeat the
    forwards and compute the backwards.

    ``rows`` is the table of stages, if they are more than those of ``pipes``, whose outputs pass from each to the next.
    ``further_devices[p]`` are the devices of the stages after those of ``pipes[p]``.

    A vocabulary-parallel head has a part of its rows on each of the D devices of a pipe: with S stages of layers, ops
    of stage S + i compute part i, ops of stage S + D join the parts to the loss (arXiv 2411.05288, algorithm 2).
    """

    pipes: tuple[tuple[int, ...], ...]
    forward: ForwardPipe | None = None
    rows: tuple[StageRow, ...] = ()
    further_devices: tuple[tuple[int, ...], ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages of layers, without those in ``further_devices``."""
        return len(self.pipes[0])

    @cached_property
    def table(self) -> tuple[StageRow, ...]:
        """Kind, sources and gradients of every stage."""
        return self.rows or chain(self.stages)

    @cached_property
    def stage_kinds(self) -> frozenset[StageKind]:
        """Kinds of the stages."""
        return frozenset(row.kind for row in self.table)

    def stages_of_kind(self, kind: StageKind) -> tuple[int, ...]:
        """Return the stages of a kind in ascending order."""
        return tuple(stage for stage, row in enumerate(self.table) if row.kind == kind)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Stages that read outputs or gradients of each stage, in ascending order."""
        readers: list[list[int]] = [[] for _ in self.table]
        for stage, row in enumerate(self.table):
            for source in {*row.sources, *row.gradients}:
                readers[source].append(stage)
        return tuple(map(tuple, readers))

    @property
    def op_stages(self) -> int:
        """Number of stages that ops have."""
        return len(self.table)

    @cached_property
    def loss_stage(self) -> int:
        """Stage whose forward computes the loss."""
        return next(stage for stage, row in enumerate(self.table) if not row.gradients)

    @property
    def head_parts(self) -> int:
        """Number of parts of the head; 0: the last stage of layers has the head."""
        return len(self.stages_of_kind(HEAD_PART))

    def is_head_part(self, stage: int) -> bool:
        """Return True if ops of ``stage`` compute a part of the head."""
        return self.table[stage].kind == HEAD_PART

    def stage_text(self, stage: int) -> str:
        """Return the number of a stage, or the name of its kind, such as ``head part 0`` or ``loss``."""
        kind = self.table[stage].kind
        if stage < self.stages:
            return str(stage)
        return f"{kind.name} {stage - self.stages_of_kind(kind)[0]}" if kind.has_weights else kind.name

    def has_weights(self, stage: int) -> bool:
        """Return False for a stage such as the one that joins head parts to the loss."""
        return self.table[stage].kind.has_weights

    def loads(self, stage: int) -> bool:
        """Return True if the stage loads data: inputs without sources, labels as the last stage of layers."""
        return not self.table[stage].sources or stage == self.stages - 1

    @cached_property
    def head_devices(self) -> tuple[tuple[int, ...], ...]:
        """Device of every head part, by pipe."""
        parts = self.stages_of_kind(HEAD_PART)
        return tuple(
            tuple(self.device(FORWARD, stage, pipe) for stage in parts) for pipe in range(self.replicas)
        )

    def with_head_parts(self, schedule: str) -> Placement:
        """Return the placement with a part of the head on every device, and the loss where the last stage is.

        Part i is where the stages are that device i holds of pipe 0. Devices that hold the same stages thus hold the
        same parts.

        Args:
            schedule: name of the schedule, for the error.

        Raises:
            ScheduleError: the placement has forward devices, or a device without a stage of every pipe.
        """
        if self.forward is not None:
            raise ScheduleError(
                f"{schedule}: vocabulary_parallel_head needs devices that compute forwards and backwards (got "
                f"{len(self.forward_devices)} forward devices). Remove it, or use another schedule."
            )
        missing = [set(range(self.num_devices)) - set(devices) for devices in self.pipes]
        if any(missing):
            pipe = next(pipe for pipe, devices in enumerate(missing) if devices)
            raise ScheduleError(
                f"{schedule}: vocabulary_parallel_head needs a stage of every pipe on every device (got none of pipe "
                f"{pipe} on device {min(missing[pipe])}). Remove it, or use another schedule."
            )
        mirrors = [dict(zip(self.pipes[0], devices, strict=True)) for devices in self.pipes]
        return replace(
            self,
            rows=chain_to_parts(self.stages, self.num_devices),
            further_devices=tuple(
                (*(mirror[i] for i in range(self.num_devices)), devices[-1])
                for mirror, devices in zip(mirrors, self.pipes, strict=True)
            ),
        )

    def of_layers(self) -> Placement:
        """Return the placement of the stages of layers alone."""
        return replace(self, rows=(), further_devices=())

    @property
    def replicas(self) -> int:
        """Number of pipes."""
        return len(self.pipes)

    @cached_property
    def num_devices(self) -> int:
        """Number of devices of all pipes, forward devices included."""
        return 1 + max(map(max, filter(None, (*self.pipes, *self.further_devices, self.forward_devices))))

    @cached_property
    def devices_per_pipe(self) -> int:
        """D: number of devices of a pipe. Costs and activations are in units of 1/D of the model."""
        return self.num_devices if self.forward is None else len(set(self.pipes[0]))

    @cached_property
    def forward_devices(self) -> tuple[int, ...]:
        """Devices that compute only forwards, by stage; empty for every schedule except ``fbd``."""
        return () if self.forward is None else self.forward.devices

    @property
    def merged(self) -> int:
        """Tensor-parallel ranks of a backward device that one rank of a forward device replaces."""
        return 1 if self.forward is None else self.forward.merged

    @property
    def graph_kind(self) -> str:
        """Kind of the forward that builds the autograd graph: FORWARD, or RECOMPUTE with forward devices."""
        return FORWARD if self.forward is None else RECOMPUTE

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of ops that the devices compute."""
        return KINDS if self.forward is None else ALL_KINDS

    @property
    def copies(self) -> int:
        """Number of copies of the weights."""
        return self.replicas + (self.forward is not None)

    @cached_property
    def weight_transfers(self) -> tuple[tuple[int, int, int], ...]:
        """(stage, source, target) of every transfer of weights to a forward device after a step."""
        return tuple((stage, self.pipes[0][stage], to) for stage, to in enumerate(self.forward_devices))

    def slowdown(self, kind: str) -> float:
        """Return the time of an op of ``kind`` relative to its time on a backward device."""
        return self.forward.time_factor if self.forward is not None and kind == FORWARD else 1.0

    def device(self, kind: str, stage: int, pipe: int) -> int:
        """Return the device that computes ops of ``kind`` at ``stage`` for the micro-batches of ``pipe``."""
        if kind == FORWARD and self.forward is not None:
            return self.forward.devices[stage]
        stages = len(self.pipes[pipe])
        return self.pipes[pipe][stage] if stage < stages else self.further_devices[pipe][stage - stages]

    def pipes_of(self, micro_batches: int) -> tuple[int, ...]:
        """Return the pipe of every micro-batch. Pipe 0 has the first N/replicas ids, pipe 1 the next, and so on.

        Consecutive ids are consecutive samples, so pipe p reads the samples of data-parallel rank p.
        """
        return tuple(m * self.replicas // micro_batches for m in range(micro_batches))

    @cached_property
    def visits(self) -> dict[tuple[int, int], int]:
        """(stage, pipe) -> number of earlier stages of the pipe on the same device."""
        visits: dict[tuple[int, int], int] = {}
        for pipe, devices in enumerate(self.pipes):
            seen = [0] * self.num_devices
            for stage, device in enumerate(devices):
                visits[stage, pipe] = seen[device]
                seen[device] += 1
        return visits

    @cached_property
    def chunks(self) -> tuple[tuple[Chunk, ...], ...]:
        """Chunks of every device, by chunk index. First visits of all pipes come before second visits.

        Device d of BitPipe: down stage d, up stage D-1-d, down stage 2D-1-d, up stage D+d. Stages after those of the
        pipes come last.
        """
        by_device: list[list[tuple[int, int, int]]] = [[] for _ in range(self.num_devices)]
        for (stage, pipe), visit in self.visits.items():
            by_device[self.pipes[pipe][stage]].append((visit, pipe, stage))
        for stage, device in enumerate(self.forward_devices):
            by_device[device].append((0, 0, stage))
        for pipe, devices in enumerate(self.further_devices):
            for stage, device in enumerate(devices, self.stages):
                if self.has_weights(stage):
                    by_device[device].append((self.stages, pipe, stage))  # after every visit
        return tuple(tuple(Chunk(stage, pipe) for _, pipe, stage in sorted(chunks)) for chunks in by_device)

    @cached_property
    def _chunk_index(self) -> tuple[dict[tuple[int, int], int], ...]:
        """(stage, pipe) -> chunk index, for every device."""
        return tuple({(c.stage, c.pipe): i for i, c in enumerate(chunks)} for chunks in self.chunks)

    def chunk_index(self, device: int, stage: int, pipe: int) -> int:
        """Return the index of a chunk on ``device``. A forward device has one chunk for all pipes."""
        return self._chunk_index[device].get((stage, pipe), 0)

    @cached_property
    def replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of devices that hold the same stages, ordered by first device.

        A group has ``replicas`` members, which are data-parallel ranks to the optimizer.
        """
        groups = tuple(tuple(group) for group in self._devices_by_stages().values())
        assert all(len(group) == self.replicas for group in groups), "call check_replicas first"
        return groups

    def replicas_of(self, device: int) -> tuple[int, ...]:
        """Return the group of :attr:`replica_groups` with ``device``."""
        return next(group for group in self.replica_groups if device in group)

    @cached_property
    def tied_pairs(self) -> tuple[tuple[int, int], ...]:
        """Pairs of devices that sum the gradient of a tied head, or of a part of it: those of its two ends in a pipe.

        Devices with the same stages are replicas, which have one copy of both ends.
        """
        heads = (
            self.head_devices if HEAD_PART in self.stage_kinds else tuple(pipe[-1:] for pipe in self.pipes)
        )
        return tuple(
            (pipe[0], device)
            for pipe, devices in zip(self.pipes, heads, strict=True)
            for device in devices
            if self.stages_of(device) != self.stages_of(pipe[0])
        )

    def check_replicas(self, schedule: str) -> None:
        """Raise ScheduleError if the devices of the pipes are not replicas of each other.

        Args:
            schedule: name of the schedule, for the error.
        """
        for stages, devices in self._devices_by_stages().items():
            if len(devices) != self.replicas:
                raise ScheduleError(
                    f"{schedule}: every set of stages must be on {self.replicas} devices, one per pipe, to average "
                    f"gradients (got stages {sorted(stages)} on {len(devices)}: {', '.join(map(str, devices))}). "
                    f"Place the pipes on the devices in opposite directions."
                )

    def _devices_by_stages(self) -> dict[frozenset[int], list[int]]:
        """Return the devices by the set of stages that they hold, without forward devices."""
        groups: dict[frozenset[int], list[int]] = {}
        for device, chunks in enumerate(self.chunks):
            if device in self.forward_devices:
                continue
            groups.setdefault(frozenset(c.stage for c in chunks), []).append(device)
        return groups

    def stages_of(self, device: int) -> tuple[int, ...]:
        """Return the stages of ``device`` in ascending order."""
        return tuple(sorted(chunk.stage for chunk in self.chunks[device]))


def linear(num_devices: int) -> Placement:
    return Placement((tuple(range(num_devices)),))


def looped(num_devices: int, chunks: int) -> Placement:
    """Return one pipe with stage s on device s mod D, and ``chunks`` stages per device (arXiv 2104.04473, 2.2.2)."""
    return Placement((tuple(range(num_devices)) * chunks,))


def v(num_devices: int) -> Placement:
    """Return one V-shaped pipe of 2D stages, which turns at device D-1 (ZB-V, arXiv 2405.15362)."""
    down = tuple(range(num_devices))
    return Placement((down + down[::-1],))


def bidirectional_linear(num_devices: int) -> Placement:
    """Return two pipes of D stages in opposite directions (Chimera, arXiv 2107.06925)."""
    down = tuple(range(num_devices))
    return Placement((down, down[::-1]))


def bidirectional_v(num_devices: int, waves: int = 1) -> Placement:
    """Return two V-shaped pipes in opposite directions: one turns at device D-1, one at device 0 (arXiv 2410.19367).

    Each pipe has 2D x ``waves`` stages: ``waves`` consecutive Vs.
    """
    down = tuple(range(num_devices))
    up = down[::-1]
    return Placement(((down + up) * waves, (up + down) * waves))
