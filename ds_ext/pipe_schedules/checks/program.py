"""Prove, before the launch, that a program runs to completion.

The check rejects: an op that is missing, repeated or on the wrong device; a missing input; a message that is never
received, or received out of order; a deadlock, including one caused by having only ``link_credits`` credits per link; a
buffer shared by two live slices; reductions that start early, or in another order than on a replica.

The proof has two parts, because devices interact only through messages. :mod:`.device` proves that each device is
correct if every receive gets the expected message. :mod:`.links` proves that it does. A link has one sender and one
receiver, so the result does not depend on the speed of the devices, and a single run is enough.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ScheduleError
from ..ops import FORWARD
from ..timetables import Program
from .collectives import check_reductions
from .device import DeviceCheck
from .links import Links
from .timetable import check_timetable


@dataclass(frozen=True)
class Report:
    """Requirements of a valid program.

    Attributes:
        link_credits: smallest number of credits per link that avoids a deadlock; 0 if the program has no messages.
        messages: number of tensors sent in one step.
    """

    num_buffers: tuple[int, ...]
    link_credits: int
    loss_devices: tuple[int, ...]
    messages: int


def check(program: Program, *, link_credits: int | None = None) -> Report:
    """Prove that ``program`` runs to completion.

    ``link_credits`` are the messages that each link holds before its sender must wait; None: no limit. Activations and
    gradients share the link from one device to another, and arrive in the order in which they are sent.
    """
    timetable, placement = program.timetable, program.timetable.placement
    check_timetable(timetable)
    if not len(program.instructions) == len(program.num_buffers) == len(timetable.orders):
        raise ScheduleError(
            f"{timetable.schedule}: the program needs instructions and a number of buffers for each of "
            f"{len(timetable.orders)} devices (got {len(program.instructions)} and {len(program.num_buffers)})."
        )
    check_reductions(program)
    devices = DeviceCheck(program)
    links = Links(program, [devices.messages(device) for device in range(len(program.instructions))])
    links.check_run(links.run(link_credits), link_credits)
    kind = placement.graph_kind if timetable.trains else FORWARD
    loss_devices = {placement.device(kind, placement.loss_stage, pipe) for pipe in range(placement.replicas)}
    return Report(program.num_buffers, links.fewest_credits(), tuple(sorted(loss_devices)), links.messages)
