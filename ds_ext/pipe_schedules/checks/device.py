"""Check the instructions of one device, assuming that every receive gets the expected message.

The device must compute the ops of its timetable in order. Each instruction must have its inputs. Nothing may be
produced twice, and no two live slices at stages may share a buffer. The result is the list of sends and receives, for
:mod:`.links`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntFlag, auto
from functools import cached_property
from typing import NamedTuple

from ...errors import ScheduleError
from ..dependencies import Dependencies
from ..ops import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    COMPUTE_NAME,
    FORWARD,
    RECOMPUTE,
    Instruction,
    MessageKind,
    Op,
    slice_text,
)
from ..stage_kinds import StageRow
from ..timetables import Program
from .timetable import error_at


class Content(IntFlag):
    """Tensors of a micro-batch at a stage. Errors name the first missing content in this order."""

    ACTIVATION = auto()
    GRADIENT = auto()
    LABELS = auto()
    OUTPUT = auto()
    INPUT_GRADIENT = auto()
    WEIGHT_GRADIENT = auto()

    @property
    def text(self) -> str:
        return (self.name or "").lower().replace("_", " ")


_RESULT_OF = {
    FORWARD: Content.OUTPUT,
    RECOMPUTE: Content.OUTPUT,
    BACKWARD: Content.INPUT_GRADIENT,
    BACKWARD_INPUT: Content.INPUT_GRADIENT,
    BACKWARD_WEIGHT: Content.WEIGHT_GRADIENT,
}
# Content of a result at the stage that receives it.
_MESSAGE_OF = {Content.OUTPUT: Content.ACTIVATION, Content.INPUT_GRADIENT: Content.GRADIENT}
_SOURCE_OF = {content: result for result, content in _MESSAGE_OF.items()}
LOCAL, SEND, RECEIVE = 0, 1, 2


class Transfer(NamedTuple):
    """Content that an instruction passes on."""

    content: Content
    direction: int


TRANSFERS = {
    f"{verb}{kind.suffix}": Transfer(Content[kind.name], direction)
    for verb, direction in (("Recv", RECEIVE), ("Send", SEND), ("Copy", LOCAL))
    for kind in MessageKind
}


class Item(NamedTuple):
    """Content of a slice of one micro-batch at one stage, from the stage ``source``."""

    content: Content
    stage: int
    micro_batch: int
    slice: int = 0
    source: int | None = None

    def __str__(self) -> str:
        text = f"{self.content.text} of micro-batch {slice_text(self.micro_batch, self.slice)} for stage {self.stage}"
        return text if self.source is None else f"{text} from stage {self.source}"


def moved_item(instruction: Instruction) -> Item:
    """Return what a message or copy moves, as an item of the stage that gets it."""
    name, m, stage, _, _, _, _, _, j, other = instruction
    assert m is not None and stage is not None and other is not None, (
        "messages have a micro-batch and two stages"
    )
    content, direction = TRANSFERS[name]
    return Item(content, stage, m, j, other) if direction == RECEIVE else Item(content, other, m, j, stage)


@dataclass
class DeviceMessages:
    """Sends and receives of one device, in order. If its program has an error, the list ends there."""

    instructions: list[Instruction] = field(default_factory=list)
    error: ScheduleError | None = None


class _Rule(NamedTuple):
    """Inputs and result of an instruction.

    Both are bits of :class:`Content` as plain integers, which are several times faster. ``neighbor`` is -1 or 1 if the
    same result must exist for the slice before or after this one.
    """

    needs: int
    result: int
    direction: int = LOCAL
    neighbor: int = 0


@dataclass(frozen=True)
class DeviceCheck:
    program: Program

    def messages(self, device: int) -> DeviceMessages:
        """Return the sends and receives of ``device``. An op out of order raises; other errors are in the result."""
        self._check_order(device)
        messages = DeviceMessages()
        try:
            for instruction in self._check_data(device):
                messages.instructions.append(instruction)
            self._check_buffers(device)
        except ScheduleError as error:
            messages.error = error
        return messages

    @property
    def _table(self) -> tuple[StageRow, ...]:
        return self.program.timetable.placement.table

    @cached_property
    def _joined(self) -> dict[tuple[int, int], int]:
        """(stage, bit of a content) -> number of stages that it gets this from, if they are several."""
        counts = {
            (stage, int(content)): len(near)
            for stage, row in enumerate(self._table)
            for content, near in ((Content.ACTIVATION, row.sources), (Content.GRADIENT, row.gradients))
        }
        return {key: count for key, count in counts.items() if count > 1}

    @cached_property
    def _rules(self) -> dict[str, tuple[_Rule, ...]]:
        """Name of an instruction -> its rule at every stage. SyncWeights has no rule: it belongs to no micro-batch."""
        stages = range(len(self._table))
        first, later = _Rule(0, int(Content.ACTIVATION)), _Rule(0, int(Content.LABELS))
        computations = {
            COMPUTE_NAME[kind]: tuple(
                _Rule(
                    int(self._needs(kind, stage)),
                    int(self._result(kind, stage)),
                    neighbor=Dependencies.slice_before(kind),
                )
                for stage in stages
            )
            for kind in self.program.timetable.placement.kinds
        }
        transfers = {}
        for name, (content, direction) in TRANSFERS.items():
            needs = 0 if direction == RECEIVE else int(_SOURCE_OF[content])
            transfers[name] = (_Rule(needs, int(content), direction),) * len(stages)
        loads = tuple(later if row.sources else first for row in self._table)
        return {"LoadMicroBatch": loads, **computations, **transfers}

    def _needs(self, kind: str, stage: int) -> Content:
        """Return the inputs of a computation: loaded data, and the results of its dependencies."""
        needs = Content(0)
        if kind in (FORWARD, RECOMPUTE):
            if not self._table[stage].sources:
                needs |= Content.ACTIVATION
            elif stage == self.program.timetable.placement.stages - 1:
                needs |= Content.LABELS
        for dependency, _ in self.program.timetable.dependencies.needs(Op(kind, 0, stage)):
            if dependency.slice:
                continue  # another slice has other buffers
            result = self._result(dependency.kind, dependency.stage)
            needs |= result if dependency.stage == stage else _MESSAGE_OF[result]
        return needs

    def _result(self, kind: str, stage: int) -> Content:
        """Return the result of a computation. The forward of a stage without backwards has all gradients."""
        return _RESULT_OF[kind] if any(self._table[stage].kind.backwards) else Content.INPUT_GRADIENT

    def _error(self, sentence: str, device: int, op: Op | None) -> ScheduleError:
        return error_at(self.program.timetable, f"device {device} {sentence}", device, op)

    def _check_order(self, device: int) -> None:
        order = self.program.timetable.orders[device]
        computed = [
            Op(COMPUTE[name], m, stage, j)  # pyright: ignore[reportArgumentType]
            for name, m, stage, _, _, _, _, _, j, _ in self.program.instructions[device]
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

    def _check_data(self, device: int) -> Iterator[Instruction]:
        """Check that inputs exist and that no result is produced twice. Yield the sends and receives."""
        timetable, placement = self.program.timetable, self.program.timetable.placement
        stages, micro_batches, slices = placement.op_stages, timetable.micro_batches, timetable.slices
        # (stage, bit of a content, micro-batch, slice) -> stages that it was got from.
        sources: dict[tuple[int, int, int, int], set[int | None]] = {}
        available: dict[tuple[int, int, int], int] = {}
        rules, joined = self._rules, self._joined
        for instruction in self.program.instructions[device]:
            name, m, stage, _, _, peer, _, _, j, other = instruction
            if stage is None or m is None:
                continue
            known = 0 <= stage < stages and 0 <= m < micro_batches and 0 <= j < slices and name in rules
            known &= other is None or 0 <= other < stages
            if not known:
                raise self._unknown_instruction(device, instruction)
            needs, result, direction, neighbor = rules[name][stage]
            moves = name in TRANSFERS
            if moves and other is None:
                raise self._error(f"has {instruction} without the stage at its other end.", device, None)
            have = available.get((stage, m, j), 0)
            if have & needs != needs:
                raise self._missing_input(device, instruction, Content(needs & ~have))
            if (
                neighbor
                and 0 <= j + neighbor < slices
                and not available.get((stage, m, j + neighbor), 0) & result
            ):
                op = instruction.op
                assert op is not None, "only computations depend on other slices"
                raise self._error(f"computes {op} before {op._replace(slice=j + neighbor)}.", device, op)
            if direction != LOCAL:
                if peer is None:
                    raise self._error(f"has {instruction} without a peer.", device, None)
                yield instruction
            if direction != SEND:
                target = stage
                if moves:
                    item = moved_item(instruction)
                    target = item.stage
                    if (target, result) in joined:
                        got = sources.setdefault((target, result, m, j), set())
                        if item.source in got:
                            raise self._error(f"gets the {item} twice.", device, error_op(self.program, item))
                        got.add(item.source)
                        if len(got) < joined[target, result]:
                            continue
                    have = available.get((target, m, j), 0)
                if have & result:
                    item = Item(Content(result), target, m, j, other)
                    raise self._error(f"gets the {item} twice.", device, error_op(self.program, item))
                available[target, m, j] = have | result

    def _check_buffers(self, device: int) -> None:
        count = self.program.num_buffers[device]
        buffer_of: dict[Op, int] = {}
        holder: list[Op | None] = [None] * count
        for op, buffer in _buffer_uses(self.program.instructions[device]):
            text = f"micro-batch {slice_text(op.micro_batch, op.slice)}"
            if not 0 <= buffer < count:
                raise self._error(f"uses buffer {buffer}, but has {count} buffers.", device, op)
            if holder[buffer] == op:
                continue
            if buffer_of.get(op, buffer) != buffer:
                sentence = f"expects {text} of stage {op.stage} in buffer {buffer}; it is in {buffer_of[op]}."
                raise self._error(sentence, device, op)
            if op in buffer_of:
                new = holder[buffer] or op
                sentence = (
                    f"overwrites buffer {buffer} with micro-batch {slice_text(new.micro_batch, new.slice)} of stage "
                    f"{new.stage}; {text} of stage {op.stage} is still live."
                )
                raise self._error(sentence, device, new)
            buffer_of[op] = buffer
            holder[buffer] = op

    def _unknown_instruction(self, device: int, instruction: Instruction) -> ScheduleError:
        stages, micro_batches = (
            self.program.timetable.placement.op_stages,
            self.program.timetable.micro_batches,
        )
        sizes = (
            f"{stages} stages, {micro_batches} micro-batches and the instructions {', '.join(self._rules)}"
        )
        return self._error(f"has {instruction}, but there are {sizes}.", device, None)

    def _missing_input(self, device: int, instruction: Instruction, inputs: Content) -> ScheduleError:
        content = next(iter(inputs))
        op, m, stage = instruction.op, instruction.micro_batch, instruction.stage
        assert m is not None and stage is not None
        if op is not None:
            return self._error(f"computes {op} {self._gap(content, op)}.", device, op)
        item = Item(content, stage, m, instruction.slice)
        sentence = (
            f"sends or copies the {content.text} of micro-batch {slice_text(m, item.slice)} at stage {stage} before "
            f"computing it."
        )
        return self._error(sentence, device, error_op(self.program, item))

    def _gap(self, content: Content, op: Op) -> str:
        """Return what is wrong with an op: ``before F3@1`` for a result of this device, else ``without its labels``."""
        # Every op occurs once, so a missing result of this device is computed later.
        if content == Content.OUTPUT:
            return f"before {op._replace(kind=self.program.timetable.placement.graph_kind)}"
        if content == Content.INPUT_GRADIENT:
            return f"before {op._replace(kind=BACKWARD_INPUT)}"
        return f"without its {content.text}"


def error_op(program: Program, item: Item) -> Op:
    content, stage, m, j, _ = item
    kind = program.timetable.placement.table[stage].kind
    if content == Content.GRADIENT and kind.gradient_kind == FORWARD:
        return Op(BACKWARD_WEIGHT, m, stage, j)
    if content in (Content.GRADIENT, Content.INPUT_GRADIENT):
        return Op(program.timetable.dependencies.gradient_kind(stage, m), m, stage, j)
    return Op(FORWARD, m, stage, j)


def _buffer_uses(instructions: tuple[Instruction, ...]) -> Iterator[tuple[Op, int]]:
    """Yield (forward of a slice of a micro-batch at a stage, buffer) in the order of use."""
    for instruction in instructions:
        _, m, stage, _, _, _, buffer, to_buffer, j, _ = instruction
        if stage is None or m is None or buffer is None:
            continue
        yield Op(FORWARD, m, stage, j), buffer
        if to_buffer is not None:
            yield Op(FORWARD, m, moved_item(instruction).stage, j), to_buffer
