"""The messages of a timetable: what crosses between devices, in the order in which it is sent."""

from __future__ import annotations

from .ops import Timetable


def inboxes(timetable: Timetable) -> list[dict[int, list[int]]]:
    """``inboxes(t)[receiver][sender]``: the messages of that directed link in the order in which they are sent.

    Activations and gradients share a link. A message is named by the op that needs it, as in
    :attr:`Timetable.numbers`. Every device must compute only what the placement gives it, as ``check_timetable``
    proves.
    """
    placement, pipes = timetable.placement, timetable.pipes
    stages, pairs = placement.stages, placement.stages * timetable.micro_batches
    # (pipe, stage) -> the devices of the stage before and after, None at the ends of the pipe.
    before = [(None, *devices[:-1]) for devices in placement.pipes]
    after = [(*devices[1:], None) for devices in placement.pipes]
    found: list[dict[int, list[int]]] = [{} for _ in timetable.ranks]
    if placement.forward is not None:
        return _with_forward_devices(timetable, found)
    for rank, numbers in enumerate(timetable.numbers):
        for number in numbers:
            if number >= 2 * pairs:
                continue  # nobody waits for a weight gradient
            m, stage = divmod(number % pairs, stages)
            forward = number < pairs
            peer = (after if forward else before)[pipes[m]][stage]
            if peer is not None and peer != rank:
                found[peer].setdefault(rank, []).append(number + 1 if forward else number - 1)
    return found


def _with_forward_devices(
    timetable: Timetable, found: list[dict[int, list[int]]]
) -> list[dict[int, list[int]]]:
    """An output goes to the next forward device and to the backward device that repeats the next stage."""
    placement, pipes = timetable.placement, timetable.pipes
    stages, pairs = placement.stages, placement.stages * timetable.micro_batches
    for rank, numbers in enumerate(timetable.numbers):
        for number in numbers:
            m, stage = divmod(number % pairs, stages)
            backwards, forwards = placement.pipes[pipes[m]], placement.forward_pipes[pipes[m]]
            if number < pairs and stage < stages - 1:
                if not timetable.unused_forward(stage + 1):
                    found[forwards[stage + 1]].setdefault(rank, []).append(number + 1)
                if timetable.trains:
                    found[backwards[stage + 1]].setdefault(rank, []).append(number + 1 + 3 * pairs)
            elif pairs <= number < 2 * pairs and stage > 0:
                found[backwards[stage - 1]].setdefault(rank, []).append(number - 1)
    return found
