"""Proof, before anything is launched, that a program runs to its end.

What is refused: a computation that is missing, doubled or on the wrong device; an input that is not there; a message
that nobody receives, or that comes in another order than it is taken; ranks that wait for each other in a cycle, also
when a link holds only ``link_slots`` messages; a buffer that two live (stage, micro-batch) share.

The proof has two parts, as ranks only meet in their messages. If every receive gets what it asks for, each rank is
right by itself (:mod:`.device`); and every receive gets that (:mod:`.links`). A run does not depend on which
rank goes first, because a link has one sender and one receiver: one run stands for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ScheduleError
from ..ops import FORWARD
from ..timetables import Program
from .device import RankCheck
from .links import Links
from .timetable import check_timetable, fail

__all__ = ["Report", "check", "check_timetable", "fail"]

_ORDERS = ("fifo", "tagged")


@dataclass(frozen=True)
class Report:
    """What a valid program needs.

    ``num_buffers[d]`` are the buffers of device d. ``link_slots`` is the fewest messages that every directed link
    must be able to hold for the program to end when senders wait for room; 0 if there are no messages.
    ``loss_ranks`` are the devices with a last stage, ``messages`` counts the tensors sent in one step.
    """

    num_buffers: tuple[int, ...]
    link_slots: int
    loss_ranks: tuple[int, ...]
    messages: int


def check(program: Program, *, link_slots: int | None = None, order: str = "fifo") -> Report:
    """Prove that ``program`` ends, or raise ScheduleError with a sentence and the grid with an arrow.

    Args:
        link_slots: messages a directed link holds before its sender must wait; None means any number.
        order: what a receive gets. ``"fifo"``: the next message of its link, from the sending to the receiving
            device, on which activations and gradients come in the order in which they are sent. ``"tagged"``: any
            message of the link, by its stage, micro-batch and kind.
    """
    if order not in _ORDERS:
        raise ScheduleError(f"check: order is one of the {len(_ORDERS)} {', '.join(_ORDERS)}; got {order!r}.")
    check_timetable(program.timetable)
    if not len(program.instructions) == len(program.num_buffers) == len(program.timetable.orders):
        raise ScheduleError(
            f"{program.timetable.schedule}: there are {len(program.instructions)} programs and "
            f"{len(program.num_buffers)} numbers of buffers for {len(program.timetable.orders)} devices."
        )
    ranks = RankCheck(program)
    traffic = [ranks.traffic(rank) for rank in range(len(program.instructions))]
    links = Links(program, traffic, order == "tagged")
    links.refuse(links.run(link_slots), link_slots)
    timetable, placement = program.timetable, program.timetable.placement
    kind, last = placement.keeps if timetable.trains else FORWARD, placement.stages - 1
    loss_ranks = tuple(sorted({placement.device(kind, last, pipe) for pipe in range(placement.replicas)}))
    return Report(program.num_buffers, links.fewest_slots(), loss_ranks, links.messages)
