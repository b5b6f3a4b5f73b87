"""Links between global ranks that programs use."""

from __future__ import annotations

from collections.abc import Iterable

from ..pipe_schedules import Program
from .layout import ParallelLayout


def links_of(layout: ParallelLayout, programs: Iterable[Program]) -> list[tuple[int, int]]:
    """Return the (sender, receiver) global ranks of every link, each once; the same on all ranks."""
    links = {
        (device, instruction.peer)
        for program in programs
        for device, instructions in enumerate(program.instructions)
        for instruction in instructions
        if instruction.peer is not None and instruction.name.startswith("Send")
    }
    pairs = [
        (layout.rank(source, data, tensor), layout.rank(target, data, tensor))
        for source, target in sorted(links)
        for data in range(layout.data_parallel_size)
        for tensor in range(layout.tensor_parallel_size)
    ]
    return list(dict.fromkeys(pairs))  # a merged forward rank appears once per tensor-parallel index
