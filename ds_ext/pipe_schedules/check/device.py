"""What holds for the program of one rank by itself, if every receive gets what it asks for.

The rank computes what its timetable says, in its order; what a computation or a hand-over needs is there; nothing
comes twice; no buffer serves two live pairs (stage, micro-batch). What is left for the links is the list of the
rank's sends and receives.
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
from .timetable import fail

ACTIVATION, GRADIENT, LABELS, OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = 1, 2, 4, 8, 16, 32
WORDS = {
    ACTIVATION: "activation",
    GRADIENT: "gradient",
    LABELS: "labels",
    OUTPUT: "output",
    INPUT_GRADIENT: "input gradient",
    WEIGHT_GRADIENT: "weight gradient",
}
_MADE = {
    FORWARD: OUTPUT,
    RECOMPUTE: OUTPUT,
    BACKWARD: INPUT_GRADIENT,
    BACKWARD_INPUT: INPUT_GRADIENT,
    BACKWARD_WEIGHT: WEIGHT_GRADIENT,
}
_ELSEWHERE = {
    OUTPUT: ACTIVATION,
    INPUT_GRADIENT: GRADIENT,
}  # what a result is called at the stage that waits for it
_STAY, _SEND, _RECEIVE = 0, 1, 2


class Item(NamedTuple):
    """A message: what it holds, and the stage and micro-batch that it is for."""

    what: int
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{WORDS[self.what]} of micro-batch {self.micro_batch} for stage {self.stage}"


@dataclass
class Traffic:
    """The sends and receives of one rank in order, up to ``fault`` if its program has one."""

    instructions: list[Instruction] = field(default_factory=list)
    fault: ScheduleError | None = None


class _Rule(NamedTuple):
    """What an instruction needs and makes, as bits; ``shift`` is from its stage to the one that it makes it for."""

    needs: int
    makes: int
    shift: int = 0
    way: int = _STAY


@dataclass(frozen=True)
class RankCheck:
    """Checks the programs of a program's ranks one by one."""

    program: Program

    def traffic(self, rank: int) -> Traffic:
        """Follow the program of ``rank``. Raises ScheduleError when it computes something else than its timetable."""
        self._check_order(rank)
        traffic = Traffic()
        try:
            self._check_data(rank, traffic.instructions)
            self._check_buffers(rank)
        except ScheduleError as error:
            traffic.fault = error
        return traffic

    @cached_property
    def _rules(self) -> dict[str, tuple[_Rule, ...]]:
        """Name of an instruction -> its rule at every stage; SyncWeights has none, as it is of no micro-batch."""
        stages = range(self.program.timetable.placement.stages)

        def everywhere(*rule: int) -> tuple[_Rule, ...]:
            return (_Rule(*rule),) * len(stages)

        computations = {
            COMPUTE_NAME[kind]: tuple(_Rule(self._needs(kind, stage), _MADE[kind]) for stage in stages)
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
        """Return what a computation needs, as bits: what it loads, and what the ops that it waits for have made."""
        needs = 0
        if kind in (FORWARD, RECOMPUTE):
            last = self.program.timetable.placement.stages - 1
            needs = (0 if stage else ACTIVATION) | (LABELS if stage == last > 0 else 0)
        for need, _ in self.program.timetable.dependencies.of(Op(kind, 0, stage)):
            made = _MADE[need.kind]
            needs |= made if need.stage == stage else _ELSEWHERE[made]
        return needs

    def _check_order(self, rank: int) -> None:
        """The instructions compute what the timetable says, in its order."""
        order = self.program.timetable.orders[rank]
        computed = [Op(COMPUTE[i[0]], i[1], i[2]) for i in self.program.instructions[rank] if i[0] in COMPUTE]  # pyright: ignore[reportArgumentType]
        if computed == list(order):
            return
        for step, op in enumerate(order):
            if step >= len(computed) or computed[step] != op:
                instead = computed[step] if step < len(computed) else "nothing"
                sentence = f"rank {rank} computes {instead} where the timetable has {op}."
                raise fail(self.program.timetable, sentence, rank, op)
        sentence = f"rank {rank} computes {computed[len(order)]} after the end of its timetable."
        raise fail(self.program.timetable, sentence, rank, computed[len(order)])

    def _check_data(self, rank: int, traffic: list[Instruction]) -> None:
        """Inputs are there, results are handed on after they are computed, nothing comes twice."""
        stages, micro_batches = self.program.timetable.placement.stages, self.program.timetable.micro_batches
        there: dict[tuple[int, int], int] = {}
        rules = self._rules
        for instruction in self.program.instructions[rank]:
            name, m, stage, _, _, peer, _, _ = instruction
            if stage is None or m is None:
                continue
            if not (0 <= stage < stages and 0 <= m < micro_batches and name in rules):
                raise self._no_such_instruction(rank, instruction)
            needs, makes, shift, way = rules[name][stage]
            have = there.get((stage, m), 0)
            if have & needs != needs:
                raise self._lacks(rank, instruction, needs & ~have)
            if way != _STAY:
                if peer is None:
                    raise fail(
                        self.program.timetable, f"rank {rank} has {instruction} and no peer.", rank, None
                    )
                traffic.append(instruction)
            if way != _SEND:
                if shift:
                    have = there.get((stage + shift, m), 0)
                if have & makes:
                    raise self._twice(rank, Item(makes, stage + shift, m))
                there[stage + shift, m] = have | makes

    def _check_buffers(self, rank: int) -> None:
        """A pair keeps its buffer, and no buffer serves two pairs at once."""
        timetable, room = self.program.timetable, self.program.num_buffers[rank]
        home: dict[tuple[int, int], int] = {}
        holder: list[tuple[int, int] | None] = [None] * room
        for pair, slot in _buffer_uses(self.program.instructions[rank]):
            stage, m = pair
            if not 0 <= slot < room:
                sentence = f"rank {rank} has {room} buffers and uses number {slot}."
                raise fail(timetable, sentence, rank, Op(FORWARD, m, stage))
            if holder[slot] == pair:
                continue
            if home.get(pair, slot) != slot:
                sentence = (
                    f"rank {rank} looks for micro-batch {m} of stage {stage} in buffer {slot}, but it is in "
                    f"{home[pair]}."
                )
                raise fail(timetable, sentence, rank, Op(FORWARD, m, stage))
            if pair in home:
                other_stage, other_m = holder[slot] or pair
                sentence = (
                    f"rank {rank} puts micro-batch {other_m} of stage {other_stage} into buffer {slot}, which "
                    f"micro-batch {m} of stage {stage} still needs."
                )
                raise fail(timetable, sentence, rank, Op(FORWARD, other_m, other_stage))
            home[pair], holder[slot] = slot, pair

    def _no_such_instruction(self, rank: int, instruction: Instruction) -> ScheduleError:
        timetable = self.program.timetable
        sizes = f"{timetable.placement.stages} stages and {timetable.micro_batches} micro-batches"
        sentence = f"rank {rank} has {instruction}; there are {sizes}, and the instructions {', '.join(self._rules)}."
        return fail(timetable, sentence, rank, None)

    def _lacks(self, rank: int, instruction: Instruction, missing: int) -> ScheduleError:
        """The first input that is not there, in the order of WORDS."""
        what = next(bit for bit in WORDS if bit & missing)
        _, m, stage, *_ = instruction
        assert m is not None and stage is not None
        op = instruction.op
        if op is not None:
            # What the rank makes itself comes later, as every computation is there once.
            made = {OUTPUT: self.program.timetable.placement.keeps, INPUT_GRADIENT: BACKWARD_INPUT}.get(what)
            lack = f"without its {WORDS[what]}" if made is None else f"before {Op(made, m, stage)}"
            return fail(self.program.timetable, f"rank {rank} runs {op} {lack}.", rank, op)
        sentence = f"rank {rank} hands on the {WORDS[what]} of micro-batch {m} at stage {stage} before it is computed."
        return fail(self.program.timetable, sentence, rank, made_by(self.program, Item(what, stage, m)))

    def _twice(self, rank: int, item: Item) -> ScheduleError:
        sentence = f"rank {rank} gets the {item} twice."
        return fail(self.program.timetable, sentence, rank, made_by(self.program, item))


def made_by(program: Program, item: Item) -> Op:
    """The op of the item's stage that an error about it points at."""
    gradient = item.what in (GRADIENT, INPUT_GRADIENT)
    _, stage, m = item
    kind = program.timetable.dependencies.gradient_kind(stage, m) if gradient else FORWARD
    return Op(kind, m, stage)


def _buffer_uses(instructions: tuple[Instruction, ...]) -> Iterator[tuple[tuple[int, int], int]]:
    """((stage, micro-batch), buffer) in the order of use."""
    for name, m, stage, _, _, _, buffer, to_buffer in instructions:
        if stage is None or m is None or buffer is None:
            continue
        yield (stage, m), buffer
        if to_buffer is not None:
            yield (stage + (1 if name == "CopyActivation" else -1), m), to_buffer
