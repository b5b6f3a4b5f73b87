"""A schedule made for given sizes: the order of ops on every device, and the program that it is lowered to.

A *timetable* states which device computes which (micro-batch, stage) in which order, and nothing else. It is a value:
made by a pure function, compared with ``==``, printed. Messages, loads, reductions and buffers are inserted later by
:mod:`ds_ext.pipe_schedules.lower`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .dependencies import Dependencies
from .ops import BACKWARD_INPUT, FORWARD, Instruction, Op
from .placement import Placement


@dataclass(frozen=True)
class Timetable:
    """The order of ops: ``orders[d]`` is what device ``d`` computes, first to last.

    ``micro_batches`` counts all pipes together; their ids are 0..N-1, and each belongs to one pipe.
    """

    schedule: str
    placement: Placement
    micro_batches: int
    orders: tuple[tuple[Op, ...], ...]

    @cached_property
    def dependencies(self) -> Dependencies:
        """Which op waits for which, and on which device each is computed."""
        halves = self.split_backwards
        everything = len(halves) == self.placement.stages * self.micro_batches
        split = everything if everything or not halves else halves
        return Dependencies(self.placement, self.micro_batches, split=split, trains=self.trains)

    def pipe(self, micro_batch: int) -> int:
        """Return the pipe that carries ``micro_batch``."""
        return self.dependencies.pipes[micro_batch]

    @cached_property
    def trains(self) -> bool:
        """Whether there are backwards; an evaluation has forwards only."""
        return any(op.kind != FORWARD for order in self.orders for op in order)

    @cached_property
    def split_backwards(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) whose backward is two ops: input gradient, then weight gradient."""
        return frozenset(
            (op.stage, op.micro_batch) for order in self.orders for op in order if op.kind == BACKWARD_INPUT
        )


@dataclass(frozen=True)
class Program:
    """A timetable after lowering: what every device executes, instruction by instruction.

    ``num_buffers[d]`` is the number of buffers that the instructions of device ``d`` use.
    """

    timetable: Timetable
    instructions: tuple[tuple[Instruction, ...], ...]
    num_buffers: tuple[int, ...]
