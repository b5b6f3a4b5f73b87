"""Lowering of one computation at a time, for an order that is decided at run time."""

from __future__ import annotations

from ..lower import Lowering
from ..ops import Instruction, Op, Timetable


class LiveLowering(Lowering):
    """The instructions of a device's computations, as they are chosen.

    The same as of a timetable, but that a message is received with the computation that needs it and not before: by
    then it is there.

    Args:
        rank: the device.
        timetable: any of the schedule's, for placement and sizes.
    """

    def __init__(self, rank: int, timetable: Timetable) -> None:
        super().__init__(rank, timetable, {})

    def lower(self, op: Op) -> list[Instruction]:
        """One computation, with what comes before and after it."""
        self.program = []
        self.add(op)
        return self.program

    def _receive(self, wanted: int, sender: int) -> None:
        if sender != self.rank:
            m, stage = divmod(wanted % self.pairs, self.stages)
            name = "RecvActivation" if wanted < self.pairs else "RecvGrad"
            self._instruct(name, m, stage, self.timetable.pipes[m], peer=sender)
