"""Timetable: the order of ops on every device for given sizes. Program: the timetable after lowering.

A timetable contains computations only. :mod:`.lowering` adds messages, loads, reductions and buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .dependencies import Dependencies
from .fixed_orders import FixedOrders
from .ops import BACKWARD, BACKWARD_INPUT, FORWARD, Instruction, Op
from .placement import Placement


@dataclass(frozen=True)
class Timetable:
    """Order of ops on every device: ``orders[d]`` lists the ops of device ``d``, first to last.

    ``micro_batches`` is N, summed over the pipes. The ids are 0..N-1, and each micro-batch uses one pipe. It passes
    through the stages in ``slices`` parts of its sequence.
    """

    schedule: str
    placement: Placement
    micro_batches: int
    orders: tuple[tuple[Op, ...], ...]
    slices: int = 1

    @cached_property
    def dependencies(self) -> Dependencies:
        """Dependencies between the ops, and the device of each op."""
        split = self.split_backwards
        backwards = (
            sum(row.kind.gradient_kind == BACKWARD for row in self.placement.table) * self.micro_batches
        )
        if not split or len(split) == backwards:
            split = bool(split)  # the same for all backwards, which is faster to look up
        return Dependencies(
            self.placement, self.micro_batches, split=split, trains=self.trains, slices=self.slices
        )

    @cached_property
    def fixed_orders(self) -> FixedOrders:
        """The orders for simulations, with numbers in place of ops."""
        return FixedOrders(self.dependencies, self.orders)

    def pipe(self, micro_batch: int) -> int:
        """Return the pipe that carries ``micro_batch``."""
        return self.dependencies.pipes[micro_batch]

    @cached_property
    def micro_batches_by_pipe(self) -> list[list[int]]:
        """Micro-batches of every pipe, in the order of the pipes; pipes without any are omitted."""
        by_pipe: dict[int, list[int]] = {}
        for micro_batch in range(self.micro_batches):
            by_pipe.setdefault(self.pipe(micro_batch), []).append(micro_batch)
        return [*by_pipe.values()]

    @cached_property
    def sent_tensors(self) -> int:
        """Number of tensors of hidden states that are sent between devices; a message of head parts has 0 to 2."""
        return sum(
            self.dependencies.tensors(consumer)
            for device, order in enumerate(self.orders)
            for op in order
            for consumer, receiver in self.dependencies.consumers(op)
            if receiver != device
        )

    @cached_property
    def trains(self) -> bool:
        """True if the timetable has backwards; an evaluation has forwards only."""
        return any(op.kind != FORWARD for order in self.orders for op in order)

    @cached_property
    def split_backwards(self) -> frozenset[tuple[int, int]]:
        """(stage, micro-batch) pairs whose backward is two ops: backward for the input, then for the weights."""
        return frozenset(
            (op.stage, op.micro_batch) for order in self.orders for op in order if op.kind == BACKWARD_INPUT
        )


@dataclass(frozen=True)
class Program:
    """Timetable after lowering: instructions and number of buffers of every device."""

    timetable: Timetable
    instructions: tuple[tuple[Instruction, ...], ...]
    num_buffers: tuple[int, ...]
