"""Eager gradient reduction: right after the last backward of a stage, while other stages still compute.

A reduction is a collective over the replicas of a device. The replicas finish their stages in different orders, but
must start the reductions in a common order: by the time at which the last replica finishes a stage.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from .ops import BACKWARD, BACKWARD_WEIGHT, REDUCE_STAGE, Instruction, MessageKind, Op
from .simulation import Simulation
from .timetables import Program

Reductions = Sequence[Mapping[Op, tuple[int, ...]]]
"""For every device: op -> stages whose reductions start after it."""
_MESSAGES = frozenset(
    f"{verb}{kind.suffix}" for verb in ("Send", "Copy") for kind in MessageKind
)  # after an op


def eager_reductions(simulation: Simulation) -> Reductions:
    """Return, for every device, op -> stages whose reductions start after that op, in order.

    A device starts the reduction of a stage when it has finished that stage and all earlier ones in the common order.
    Each stage of a device occurs once. (BitPipe, arXiv 2410.19367, section 3.3; the common order is our addition.)
    """
    last_backwards = [
        {op.stage: (end, op) for op, _, end in spans if op.kind in (BACKWARD, BACKWARD_WEIGHT)}
        for spans in simulation.spans
    ]
    timetable = simulation.timetable
    reductions: list[dict[Op, tuple[int, ...]]] = [{} for _ in timetable.orders]
    for group in timetable.placement.replica_groups:
        stages = set().union(*(last_backwards[device] for device in group))
        latest = {
            stage: max(
                last_backwards[device][stage][0] for device in group if stage in last_backwards[device]
            )
            for stage in stages
        }
        order = sorted(stages, key=lambda stage: (latest[stage], stage))
        for device in group:
            reductions[device] = _starts(timetable.orders[device], last_backwards[device], order)
    return tuple(reductions)


def _starts(
    ops: tuple[Op, ...], last_backwards: dict[int, tuple[float, Op]], order: list[int]
) -> dict[Op, tuple[int, ...]]:
    """Return the ops after which a device starts the reductions of the stages in ``order``.

    ``last_backwards`` maps the stages of the device to (end, op) of their last backward.
    """
    position = {op: i for i, op in enumerate(ops)}
    starts: dict[Op, tuple[int, ...]] = {}
    latest = 0
    for stage in order:
        # With few micro-batches, a device may compute no op of a stage; it then need not wait for that stage.
        if stage in last_backwards:
            latest = max(latest, position[last_backwards[stage][1]])
        starts[ops[latest]] = (*starts.get(ops[latest], ()), stage)
    return starts


def with_reductions(program: Program, reductions: Reductions) -> Program:
    """Return the program with only these eager reductions. Each follows the messages of its op."""
    instructions = tuple(
        tuple(_insert_reductions(of_device, stages_after))
        for of_device, stages_after in zip(program.instructions, reductions, strict=True)
    )
    return replace(program, instructions=instructions)


def order_of_reductions(program: Program, device: int) -> list[int]:
    instructions = program.instructions[device]
    return [i.stage for i in instructions if i.name == REDUCE_STAGE and i.stage is not None]


class StageReductions:
    """Reductions of one device in a step whose order is decided at run time.

    ``program`` is that of a simulated step, with the common order of the reductions.
    """

    def __init__(self, program: Program, device: int) -> None:
        self._order = deque(order_of_reductions(program, device))
        self._remaining_backwards = Counter(
            op.stage for op in program.timetable.orders[device] if op.kind in (BACKWARD, BACKWARD_WEIGHT)
        )

    def after(self, op: Op) -> Iterator[Instruction]:
        """Yield the reductions that start after ``op``: the next ones in order whose stage has no more backwards."""
        self._remaining_backwards[op.stage] -= op.kind in (BACKWARD, BACKWARD_WEIGHT)
        while self._order and not self._remaining_backwards[self._order[0]]:
            yield Instruction(REDUCE_STAGE, stage=self._order.popleft())


def _insert_reductions(
    instructions: Iterable[Instruction], stages_after: Mapping[Op, tuple[int, ...]]
) -> Iterator[Instruction]:
    """Yield the instructions with each reduction after the messages of its op. Existing reductions are dropped."""
    stages: tuple[int, ...] = ()
    for instruction in instructions:
        if instruction.name == REDUCE_STAGE:
            continue
        if instruction.name not in _MESSAGES:
            yield from (Instruction(REDUCE_STAGE, stage=stage) for stage in stages)
            stages = ()
        yield instruction
        if instruction.op is not None:
            stages = stages_after.get(instruction.op, ())
    assert not stages, "the end of the step follows the last op"
