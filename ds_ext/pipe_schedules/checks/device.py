"""Check the instructions of one device, assuming that every receive gets the expected message.

The device must compute the ops of its timetable in order. Each instruction must have its inputs. Nothing may be
produced twice, and no two live (stage, micro-batch) pairs may share a buffer. The result is the list of sends and
receives, for :mod:`.links`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ...errors import ScheduleError
from ..ops import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    COMPUTE_NAME,
    FORWARD,
    RECOMPUTE,
    Instruction,
    Op,
)
from ..timetables import Program
from .timetable import error_at

ACTIVATION, GRADIENT, LABELS, OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = 1, 2, 4, 8, 16, 32
NAMES = {
    ACTIVATION: "activation",
    GRADIENT: "gradient",
    LABELS: "labels",
    OUTPUT: "output",
    INPUT_GRADIENT: "input gradient",
    WEIGHT_GRADIENT: "weight gradient",
}
_OUTPUT_OF = {
    FORWARD: OUTPUT,
    RECOMPUTE: OUTPUT,
    BACKWARD: INPUT_GRADIENT,
    BACKWARD_INPUT: INPUT_GRADIENT,
    BACKWARD_WEIGHT: WEIGHT_GRADIENT,
}
_RECEIVED_AS = {
    OUTPUT: ACTIVATION,
    INPUT_GRADIENT: GRADIENT,
}  # name of a result at the stage that receives it
_LOCAL, _SEND, _RECEIVE = 0, 1, 2


class Item(NamedTuple):
    """Tensors of a micro-batch at a stage: ``kind`` is one of the bits above."""

    kind: int
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{NAMES[self.kind]} of micro-batch {self.micro_batch} for stage {self.stage}"


@dataclass
class DeviceMessages:
    """Sends and receives of one device, in order. If its program has an error, the list ends there."""

    instructions: list[Instruction] = field(default_factory=list)
    error: ScheduleError | None = None


class _Rule(NamedTuple):
    """Inputs and result of an instruction, as bits. The result belongs to the stage at offset ``shift``."""

    needs: int
    makes: int
    shift: int = 0
    direction: int = _LOCAL


@dataclass(frozen=True)
class DeviceCheck:
    """Checker for the devices of a program, one at a time."""

    program: Program

    def traffic(self, device: int) -> DeviceMessages:
        """Return the sends and receives of ``device``. Raises ScheduleError if its ops differ from the timetable."""
        self._check_order(device)
        traffic = DeviceMessages()
        try:
            self._check_data(device, traffic.instructions)
            self._check_buffers(device)
        except ScheduleError as error:
            traffic.error = error
        return traffic

    @cached_property
    def _rules(self) -> dict[str, tuple[_Rule, ...]]:
        """Name of an instruction -> its rule at every stage. SyncWeights has no rule: it belongs to no micro-batch."""
        stages = range(self.program.timetable.placement.stages)

        def everywhere(*rule: int) -> tuple[_Rule, ...]:
            return (_Rule(*rule),) * len(stages)

        computations = {
            COMPUTE_NAME[kind]: tuple(_Rule(self._needs(kind, stage), _OUTPUT_OF[kind]) for stage in stages)
            for kind in self.program.timetable.placement.kinds
        }
        return {
            "LoadMicroBatch": tuple(_Rule(0, LABELS if stage else ACTIVATION) for stage in stages),
            **computations,
            "RecvActivation": everywhere(0, ACTIVATION, 0, _RECEIVE),
            "RecvGrad": everywhere(0, GRADIENT, 0, _RECEIVE),
            "SendActivation": everywhere(OUTPUT, ACTIVATION, 1, _SEND),
            "SendGrad": everywhere(INPUT_GRADIENT, GRADIENT, -1, _SEND),
            "CopyActivation": everywhere(OUTPUT, ACTIVATION, 1),
            "CopyGrad": everywhere(INPUT_GRADIENT, GRADIENT, -1),
        }

    def _needs(self, kind: str, stage: int) -> int:
        """Return the inputs of a computation as bits: loaded data, and the results of its dependencies."""
        needs = 0
        if kind in (FORWARD, RECOMPUTE):
            last = self.program.timetable.placement.stages - 1
            needs = (0 if stage else ACTIVATION) | (LABELS if stage == last > 0 else 0)
        for need, _ in self.program.timetable.dependencies.needs(Op(kind, 0, stage)):
            output = _OUTPUT_OF[need.kind]
            needs |= output if need.stage == stage else _RECEIVED_AS[output]
        return needs

    def _error(self, sentence: str, device: int, op: Op | None) -> ScheduleError:
        return error_at(self.program.timetable, f"device {device} {sentence}", device, op)

    def _check_order(self, device: int) -> None:
        """Raise ScheduleError if the instructions do not compute the ops of the timetable in order."""
        order = self.program.timetable.orders[device]
        computed = [
            Op(COMPUTE[name], m, stage)  # pyright: ignore[reportArgumentType]
            for name, m, stage, *_ in self.program.instructions[device]
            if name in COMPUTE
        ]
        if computed == list(order):
            return
        for step, op in enumerate(order):
            if step >= len(computed) or computed[step] != op:
                instead = computed[step] if step < len(computed) else "nothing"
                raise self._error(f"computes {instead} instead of {op}.", device, op)
        extra = computed[len(order)]
        raise self._error(f"computes {extra} after the end of its timetable.", device, extra)

    def _check_data(self, device: int, traffic: list[Instruction]) -> None:
        """Raise ScheduleError if an input is missing or a result is produced twice. Append sends and receives."""
        stages, micro_batches = self.program.timetable.placement.stages, self.program.timetable.micro_batches
        available: dict[tuple[int, int], int] = {}
        rules = self._rules
        for instruction in self.program.instructions[device]:
            name, m, stage, _, _, peer, _, _ = instruction
            if stage is None or m is None:
                continue
            if not (0 <= stage < stages and 0 <= m < micro_batches and name in rules):
                sizes = (
                    f"{stages} stages, {micro_batches} micro-batches and the instructions {', '.join(rules)}"
                )
                raise self._error(f"has {instruction}, but there are {sizes}.", device, None)
            needs, makes, shift, direction = rules[name][stage]
            have = available.get((stage, m), 0)
            if have & needs != needs:
                raise self._missing(device, instruction, needs & ~have)
            if direction != _LOCAL:
                if peer is None:
                    raise self._error(f"has {instruction} without a peer.", device, None)
                traffic.append(instruction)
            if direction != _SEND:
                if shift:
                    have = available.get((stage + shift, m), 0)
                if have & makes:
                    item = Item(makes, stage + shift, m)
                    raise self._error(f"gets the {item} twice.", device, op_of(self.program, item))
                available[stage + shift, m] = have | makes

    def _check_buffers(self, device: int) -> None:
        """Raise ScheduleError if a pair changes buffers, or two live pairs share one."""
        count = self.program.num_buffers[device]
        buffer_of: dict[tuple[int, int], int] = {}
        holder: list[tuple[int, int] | None] = [None] * count
        for pair, buffer in _buffer_uses(self.program.instructions[device]):
            stage, m = pair
            op = Op(FORWARD, m, stage)
            if not 0 <= buffer < count:
                raise self._error(f"uses buffer {buffer}, but has {count} buffers.", device, op)
            if holder[buffer] == pair:
                continue
            if buffer_of.get(pair, buffer) != buffer:
                sentence = f"expects micro-batch {m} of stage {stage} in buffer {buffer}; it is in {buffer_of[pair]}."
                raise self._error(sentence, device, op)
            if pair in buffer_of:
                other_stage, other_m = holder[buffer] or pair
                sentence = (
                    f"overwrites buffer {buffer} with micro-batch {other_m} of stage {other_stage}; micro-batch {m} of "
                    f"stage {stage} is still live."
                )
                raise self._error(sentence, device, Op(FORWARD, other_m, other_stage))
            buffer_of[pair], holder[buffer] = buffer, pair

    def _missing(self, device: int, instruction: Instruction, missing: int) -> ScheduleError:
        """Return the error for the first missing input, in the order of NAMES."""
        kind = next(bit for bit in NAMES if bit & missing)
        _, m, stage, *_ = instruction
        assert m is not None and stage is not None
        op = instruction.op
        if op is not None:
            # Every op occurs once, so a missing result of this device is computed later.
            graph_kind = self.program.timetable.placement.graph_kind
            later = {OUTPUT: graph_kind, INPUT_GRADIENT: BACKWARD_INPUT}.get(kind)
            problem = f"without its {NAMES[kind]}" if later is None else f"before {Op(later, m, stage)}"
            return self._error(f"computes {op} {problem}.", device, op)
        sentence = (
            f"sends or copies the {NAMES[kind]} of micro-batch {m} at stage {stage} before computing it."
        )
        return self._error(sentence, device, op_of(self.program, Item(kind, stage, m)))


def op_of(program: Program, item: Item) -> Op:
    """Return the op that an error about ``item`` points at."""
    gradient = item.kind in (GRADIENT, INPUT_GRADIENT)
    _, stage, m = item
    kind = program.timetable.dependencies.gradient_kind(stage, m) if gradient else FORWARD
    return Op(kind, m, stage)


def _buffer_uses(instructions: tuple[Instruction, ...]) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield ((stage, micro-batch), buffer) in the order of use."""
    for name, m, stage, _, _, _, buffer, to_buffer in instructions:
        if stage is None or m is None or buffer is None:
            continue
        yield (stage, m), buffer
        if to_buffer is not None:
            yield (stage + (1 if name == "CopyActivation" else -1), m), to_buffer
