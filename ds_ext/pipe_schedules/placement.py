"""Where the stages live: a placement maps every stage of every pipe to a device.

A *pipe* is one full copy of the model laid over the devices. Unidirectional schedules have one; BitPipe has
two, which run in opposite directions, so that every device holds stages of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import ScheduleError
from .ops import ALL_KINDS, FORWARD, KINDS, RECOMPUTE


class Chunk(NamedTuple):
    """One piece of the model on a device: ``stage`` of ``pipe``."""

    stage: int
    pipe: int


@dataclass(frozen=True)
class ForwardPipe:
    """Devices that only compute forwards, for all pipes of a placement (FBD): one stage each.

    Args:
        devices: ``devices[stage]`` computes that stage.
        merged: tensor-parallel ranks of a backward device whose work one rank of a forward device does; 1: as many
            ranks as a backward device.
        slowdown: time of the same work on a forward device, relative to a backward device's.
    """

    devices: tuple[int, ...]
    merged: int = 1
    slowdown: float = 1.0

    @property
    def factor(self) -> float:
        """Time of a stage's forward on its forward device, relative to a backward device's."""
        return self.merged * self.slowdown


@dataclass(frozen=True)
class Placement:
    """``pipes[p][stage]`` is the device that computes ``stage`` for the micro-batches of pipe ``p``.

    With ``forward`` the devices of the pipes repeat forwards and go backward, and those of ``forward`` compute the
    forwards of all pipes.
    """

    pipes: tuple[tuple[int, ...], ...]
    forward: ForwardPipe | None = None

    @property
    def stages(self) -> int:
        """Number of pieces the model is cut into."""
        return len(self.pipes[0])

    @property
    def replicas(self) -> int:
        """Number of full copies of the model among the devices."""
        return len(self.pipes)

    @cached_property
    def num_devices(self) -> int:
        """Number of devices."""
        return 1 + max(map(max, filter(None, (*self.pipes, self.forward_devices))))

    @cached_property
    def devices_per_pipe(self) -> int:
        """D: the devices over which a pipe is laid; costs and activations are counted for one D-th of the model."""
        return self.num_devices if self.forward is None else len(set(self.pipes[0]))

    @cached_property
    def forward_devices(self) -> tuple[int, ...]:
        """The devices that only compute forwards, by stage; none where every device does both."""
        return () if self.forward is None else self.forward.devices

    @property
    def merged(self) -> int:
        """Tensor-parallel ranks of a backward device whose work one rank of a forward device does."""
        return 1 if self.forward is None else self.forward.merged

    @property
    def keeps(self) -> str:
        """The kind of op whose activations a backward uses: the forward, or the forward that its device repeats."""
        return FORWARD if self.forward is None else RECOMPUTE

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of ops that devices compute."""
        return KINDS if self.forward is None else ALL_KINDS

    @property
    def copies(self) -> int:
        """Number of copies of every stage's weights."""
        return self.replicas + (self.forward is not None)

    @cached_property
    def weight_copies(self) -> tuple[tuple[int, int, int], ...]:
        """(stage, from, to): the devices that get new weights from another after a step."""
        return tuple((stage, self.pipes[0][stage], to) for stage, to in enumerate(self.forward_devices))

    def slowdown(self, kind: str) -> float:
        """Return the time of an op of ``kind`` relative to the time on a backward device."""
        return self.forward.factor if self.forward is not None and kind == FORWARD else 1.0

    def device(self, kind: str, stage: int, pipe: int) -> int:
        """Return the device that computes ops of ``kind`` at ``stage`` for the micro-batches of ``pipe``."""
        if kind == FORWARD and self.forward is not None:
            return self.forward.devices[stage]
        return self.pipes[pipe][stage]

    def pipes_of(self, micro_batches: int) -> tuple[int, ...]:
        """Return the pipe of every micro-batch: pipe 0 has the first N/replicas ids, and so on.

        Consecutive ids are consecutive samples, so a pipe reads what a data-parallel rank of the same index would read.
        """
        return tuple(m * self.replicas // micro_batches for m in range(micro_batches))

    @cached_property
    def chunks(self) -> tuple[tuple[Chunk, ...], ...]:
        """Per device its chunks; chunk index = position. First visits of all pipes come before second visits.

        For BitPipe's device d: down stage d, up stage D-1-d, down stage 2D-1-d, up stage D+d.
        """
        visits: list[list[tuple[int, int, int]]] = [[] for _ in range(self.num_devices)]
        for pipe, devices in enumerate(self.pipes):
            seen = [0] * self.num_devices
            for stage, device in enumerate(devices):
                visits[device].append((seen[device], pipe, stage))
                seen[device] += 1
        for stage, device in enumerate(self.forward_devices):
            visits[device].append((0, 0, stage))  # one stage, of all pipes
        return tuple(tuple(Chunk(stage, pipe) for _, pipe, stage in sorted(visit)) for visit in visits)

    @cached_property
    def _chunk_index(self) -> tuple[dict[tuple[int, int], int], ...]:
        """Per device its (stage, pipe) -> chunk index."""
        return tuple({(c.stage, c.pipe): i for i, c in enumerate(chunks)} for chunks in self.chunks)

    def chunk_index(self, device: int, stage: int, pipe: int) -> int:
        """Return the index of a chunk on ``device``; a forward device has one for all pipes."""
        return self._chunk_index[device].get((stage, pipe), 0)

    @cached_property
    def replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """Devices that hold the same stages, one group per distinct set, ordered by first device.

        A group has ``replicas`` members: to the optimizer they are data-parallel ranks of each other.
        """
        groups = tuple(tuple(group) for group in self._same_stages().values())
        assert all(len(group) == self.replicas for group in groups), "check_replicas comes before"
        return groups

    def check_replicas(self, schedule: str) -> None:
        """Refuse pipes that do not make replicas of each other's devices. Raises ScheduleError.

        ``schedule`` is its name, for the error.
        """
        for stages, devices in self._same_stages().items():
            if len(devices) != self.replicas:
                raise ScheduleError(
                    f"{schedule}: devices that hold the same stages must be as many as there are pipes, because "
                    f"gradients are averaged over them; there are {self.replicas} pipes, and exactly the stages "
                    f"{sorted(stages)} are held by {len(devices)} ({', '.join(map(str, devices))}). Let the pipes "
                    f"run over the devices in opposite directions."
                )

    def _same_stages(self) -> dict[frozenset[int], list[int]]:
        """Devices by the set of stages that they hold; those that only compute forwards are nobody's replicas."""
        groups: dict[frozenset[int], list[int]] = {}
        for device, chunks in enumerate(self.chunks):
            if device in self.forward_devices:
                continue
            groups.setdefault(frozenset(c.stage for c in chunks), []).append(device)
        return groups

    def stages_of(self, device: int) -> tuple[int, ...]:
        """The stages that ``device`` holds, ascending."""
        return tuple(sorted(chunk.stage for chunk in self.chunks[device]))


def linear(num_devices: int) -> Placement:
    """Stage s on device s."""
    return Placement((tuple(range(num_devices)),))


def looped(num_devices: int, chunks: int) -> Placement:
    """Stage s on device s mod D: every device holds ``chunks`` stages (arXiv 2104.04473, section 2.2.2)."""
    return Placement((tuple(range(num_devices)) * chunks,))


def v(num_devices: int) -> Placement:
    """One V-shaped pipe of 2D stages: there over all devices and back (ZB-V, arXiv 2405.15362)."""
    there = tuple(range(num_devices))
    return Placement((there + there[::-1],))


def bidirectional_linear(num_devices: int) -> Placement:
    """Two pipes of D stages in opposite directions (Chimera, arXiv 2107.06925)."""
    there = tuple(range(num_devices))
    return Placement((there, there[::-1]))


def bidirectional_v(num_devices: int, waves: int = 1) -> Placement:
    """Two V-shaped pipes of 2D stages: down turns at device D-1, up at device 0 (BitPipe, arXiv 2410.19367).

    With ``waves`` both go there and back that many times, over 2D x waves stages.
    """
    there = tuple(range(num_devices))
    back = there[::-1]
    return Placement(((there + back) * waves, (back + there) * waves))
