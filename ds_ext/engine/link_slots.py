"""How many received messages of a link live at a time, read from the programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..parallel.layout import ParallelLayout
from ..pipe_schedules import Program
from .messages import directed_pairs

_SPARE = 1  # the next message may be there before the tensors of the last one are gone


def link_slots(layout: ParallelLayout, programs: Iterable[Program]) -> dict[tuple[int, int], int]:
    """(sender, receiver) global ranks of every link, with the messages that the receiver holds at most, and one more.

    The same on all ranks. An activation is held until the last backward of its micro-batch, which may be that of the
    weights; a gradient too.
    """
    programs = list(programs)
    most: Counter[tuple[int, int]] = Counter()
    for program in programs:
        for device in range(len(program.ranks)):
            for sender, held in _held(program, device).items():
                most[sender, device] = max(most[sender, device], held)
    device_of = layout.coordinates
    return {
        (source, target): most[device_of(source)[0], device_of(target)[0]] + _SPARE
        for source, target in directed_pairs(layout, programs)
    }


def _held(program: Program, device: int) -> Counter[int]:
    """By sending device, how many of its messages live on a device at a time, at most."""
    instructions = program.ranks[device]
    last = {(i.stage, i.micro_batch): at for at, i in enumerate(instructions) if i.op is not None}
    held: dict[tuple[int | None, int | None], list[int]] = {}
    live: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for at, instruction in enumerate(instructions):
        pair = instruction.stage, instruction.micro_batch
        if instruction.name.startswith("Recv"):
            assert instruction.peer is not None
            held.setdefault(pair, []).append(instruction.peer)
            live[instruction.peer] += 1
            most[instruction.peer] = max(most[instruction.peer], live[instruction.peer])
        elif last.get(pair) == at:
            for sender in held.pop(pair, ()):
                live[sender] -= 1
    return most
