"""Gathering of updated weights (ZeRO stage 1) beside the first ops of the next step.

The optimizer step of a rank updates its part of every stage. After it, the program starts to gather the stages, in the
order of their first use, and waits for each stage before its first op. Without these waits, a forward would read
weights of the step before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from .ops import GATHER_STAGE, OPTIMIZER_STEP, WAIT_STAGE, Instruction, Op
from .simulation import Simulation
from .timetables import Program


def order_of_first_use(simulation: Simulation, device: int) -> list[int]:
    """Return the stages of a device by their first use on any of its replicas, which gather them in this order.

    Gathers are collectives over these replicas, so all must start them in one order.
    """
    placement = simulation.timetable.placement
    group = placement.replicas_of(device)
    first: dict[int, float] = {}
    for op, start, _ in (span for member in group for span in simulation.spans[member]):
        first[op.stage] = min(start, first.get(op.stage, start))
    stages = {chunk.stage for chunk in placement.chunks[device]}
    return sorted(stages, key=lambda stage: (first.get(stage, simulation.end), stage))


def with_gathers(program: Program, simulation: Simulation) -> Program:
    """Return the program with gathers after the optimizer step, and waits before the first ops of the stages."""
    instructions = [
        tuple(_insert(program, device, order_of_first_use(simulation, device)))
        for device in range(program.timetable.placement.num_devices)
    ]
    return replace(program, instructions=tuple(instructions))


def order_of_gathers(program: Program, device: int) -> list[int]:
    instructions = program.instructions[device]
    return [i.stage for i in instructions if i.name == GATHER_STAGE and i.stage is not None]


class StageWaits:
    """Waits of one device for the weights of its stages; ``program`` is that of the step, or of a simulated one."""

    def __init__(self, program: Program, device: int) -> None:
        self._left = {i.stage for i in program.instructions[device] if i.name == WAIT_STAGE}

    def before(self, op: Op) -> Iterator[Instruction]:
        if op.stage in self._left:
            self._left.remove(op.stage)
            yield Instruction(WAIT_STAGE, stage=op.stage)


def _insert(program: Program, device: int, gathers: Iterable[int]) -> Iterator[Instruction]:
    waited = set()
    for instruction in program.instructions[device]:
        op = instruction.op
        # The loss that joins the parts of a head has no weights.
        if op is not None and op.stage not in waited and program.timetable.placement.has_weights(op.stage):
            waited.add(op.stage)
            yield Instruction(WAIT_STAGE, stage=op.stage)
        if instruction.name not in (WAIT_STAGE, GATHER_STAGE):
            yield instruction
        if instruction.name == OPTIMIZER_STEP:
            yield from (Instruction(GATHER_STAGE, stage=stage) for stage in gathers)
