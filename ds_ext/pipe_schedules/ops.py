"""The vocabulary of schedules: compute operations, timetables of them, and lowered instructions.

A *timetable* says which rank computes which (stage, micro-batch) in which order, and nothing else. It is a
value: made by a pure function, compared with ``==``, printed. Messages, loads, reductions and buffer slots are
inserted later by :mod:`ds_ext.pipe_schedules.lower`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import ScheduleError
from .placement import Placement

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
RECOMPUTE = (
    "R"  # of a placement with forward devices: the forward again, with its graph, on the backward device
)
ALL_KINDS = (*KINDS, RECOMPUTE)


class Op(NamedTuple):
    """One computation: ``Op(FORWARD, micro_batch, stage)``, in the order in which it prints (``F3@1``).

    ``kind`` is F forward, B whole backward, I input gradient, W weight gradient, or R: the forward that a backward
    device repeats with its graph when forwards have devices of their own.
    """

    kind: str
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        """``F3@1``: forward of micro-batch 3 at stage 1. Traces and errors use the same text."""
        return f"{self.kind}{self.micro_batch}@{self.stage}"


@dataclass(frozen=True)
class Timetable:
    """A schedule made for given sizes: ``ranks[r]`` is the order in which device ``r`` computes.

    ``micro_batches`` counts all pipes together; their ids are 0..N-1, and each belongs to one pipe.
    """

    schedule: str
    placement: Placement
    micro_batches: int
    ranks: tuple[tuple[Op, ...], ...]

    @cached_property
    def pipes(self) -> tuple[int, ...]:
        """The pipe of every micro-batch: pipe 0 has the first N/replicas ids, and so on.

        Consecutive ids are consecutive samples, so a pipe reads what a data-parallel rank of the same index
        would read.
        """
        return tuple(m * self.placement.replicas // self.micro_batches for m in range(self.micro_batches))

    def pipe(self, micro_batch: int) -> int:
        """The pipe that carries ``micro_batch``."""
        return self.pipes[micro_batch]

    @cached_property
    def trains(self) -> bool:
        """False for an evaluation: forwards only."""
        return any(op.kind != FORWARD for order in self.ranks for op in order)

    def rank(self, stage: int, micro_batch: int, kind: str = BACKWARD) -> int:
        """The device that computes ``stage`` for ``micro_batch``; forwards may have a device of their own."""
        placement = self.placement
        pipes = placement.forward_pipes if kind == FORWARD else placement.pipes
        return pipes[self.pipes[micro_batch]][stage]

    def unused_forward(self, stage: int) -> bool:
        """Whether training needs no forward of ``stage``: of the last one, where a backward device repeats it."""
        return self.placement.forward is not None and self.trains and stage == self.placement.stages - 1

    @cached_property
    def numbers(self) -> tuple[array[int], ...]:
        """Per device its ops as numbers, for passes over very long timetables.

        With S stages and N micro-batches F of (stage, m) is ``m*S + stage``, B and I are S*N more, W is 2*S*N more. (Of
        B and I a pair has one, and both hand on the input gradient.) R is 3*S*N more. What an op needs is then found by
        arithmetic: F needs the number before its own; B and I the one after their own, and their forward, S*N less, or
        their R, 2*S*N more; W its I, S*N less; R the F of the stage before. Raises ScheduleError for an op that these
        sizes do not have.
        """
        stages, micro_batches = self.placement.stages, self.micro_batches
        pairs = stages * micro_batches
        first = {FORWARD: 0, BACKWARD: pairs, BACKWARD_INPUT: pairs, BACKWARD_WEIGHT: 2 * pairs}
        if self.placement.forward is not None:
            first[RECOMPUTE] = 3 * pairs
        for rank, order in enumerate(self.ranks):
            for op in order:
                kind, m, stage = op
                if kind not in first or not (0 <= stage < stages and 0 <= m < micro_batches):
                    raise ScheduleError(
                        f"{self.schedule}: rank {rank} runs {op}, but there are {stages} stages and "
                        f"{micro_batches} micro-batches, both counted from 0, and the kinds {', '.join(first)}."
                    )
        return tuple(
            array("q", [first[kind] + m * stages + stage for kind, m, stage in order]) for order in self.ranks
        )

    @cached_property
    def split_backwards(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) whose backward is two ops: input gradient, then weight gradient."""
        return frozenset(
            (op.stage, op.micro_batch) for order in self.ranks for op in order if op.kind == BACKWARD_INPUT
        )

    def gradient_op(self, stage: int, micro_batch: int) -> Op:
        """The op that makes the input gradient of ``stage``: the whole backward, or its first half."""
        split = (stage, micro_batch) in self.split_backwards
        return Op(BACKWARD_INPUT if split else BACKWARD, micro_batch, stage)


class Instruction(NamedTuple):
    """One lowered instruction of one rank; ``name`` is the DeepSpeed class it becomes.

    ``peer`` is the other device of a message. ``slot`` is the buffer that holds the tensors of (stage,
    micro_batch), ``to_slot`` the destination of a hand-over on the same rank. Fields that mean nothing for an
    instruction are None.
    """

    name: str
    micro_batch: int | None = None
    stage: int | None = None
    pipe: int | None = None
    chunk: int | None = None
    peer: int | None = None
    slot: int | None = None
    to_slot: int | None = None

    @property
    def op(self) -> Op | None:
        """The computation this instruction performs, or None."""
        kind = COMPUTE.get(self.name)
        if kind is None or self.stage is None or self.micro_batch is None:
            return None
        return Op(kind, self.micro_batch, self.stage)

    def __str__(self) -> str:
        op = self.op
        if op is not None:
            return str(op)
        where = "" if self.micro_batch is None else f" {self.micro_batch}@{self.stage}"
        peer = (
            ""
            if self.peer is None
            else f" {'from' if self.name.startswith('Recv') else 'to'} rank {self.peer}"
        )
        return f"{self.name}{where}{peer}"


COMPUTE = {
    "ForwardPass": FORWARD,
    "BackwardPass": BACKWARD,
    "BackwardInput": BACKWARD_INPUT,
    "BackwardWeight": BACKWARD_WEIGHT,
    "RecomputeForward": RECOMPUTE,
}
COMPUTE_NAME = {kind: name for name, kind in COMPUTE.items()}


@dataclass(frozen=True)
class Program:
    """A timetable after lowering: what every device executes, instruction by instruction.

    ``num_slots[r]`` is the number of buffers that the instructions of device ``r`` use.
    """

    timetable: Timetable
    ranks: tuple[tuple[Instruction, ...], ...]
    num_slots: tuple[int, ...]
