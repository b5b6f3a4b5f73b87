"""What a timetable costs: start and end of every computation, bubble, live activations, messages.

Costs are for one D-th of the model and one micro-batch (one device's share in a plain pipeline); a stage that is a
smaller piece costs its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .check.timetable import check_timetable, fail
from .costs import Costs
from .events import FixedOrder, NoAdmission, Run, Work, run
from .ops import BACKWARD_INPUT, FORWARD, RECOMPUTE, Op
from .timetables import Timetable

_MOST_LISTED = 64  # of the devices that wait for each other


@dataclass(frozen=True)
class Simulation:
    """The priced timetable. Times are in the costs' unit.

    ``spans[d]`` lists (op, start, end) of device d. ``ideal`` is the computing time of an average device,
    ``peak_activations[d]`` the most activations that device d keeps at once, in units of one D-th of the model,
    ``messages`` the number of tensors that cross between devices. ``busy[d]`` is the share of the makespan in which
    device d computes; ``costs`` are those that the timetable was priced with.
    """

    timetable: Timetable
    spans: tuple[tuple[tuple[Op, float, float], ...], ...]
    makespan: float
    ideal: float
    peak_activations: tuple[float, ...]
    messages: int
    costs: Costs
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Share of the step in which an average device computes nothing."""
        return 1 - self.ideal / self.makespan if self.makespan else 0.0

    def as_dict(self) -> dict[str, object]:
        """Return the keys of ``python -m ds_ext simulate --json``."""
        return {
            "makespan": self.makespan,
            "ideal": self.ideal,
            "bubble": self.bubble,
            "peak_activations": list(self.peak_activations),
            "messages": self.messages,
        }


def simulate(timetable: Timetable, costs: Costs | None = None) -> Simulation:
    """Run the timetable on ideal devices.

    Raises:
        ScheduleError: the timetable is not complete, or no device can go on.
    """
    check_timetable(timetable)
    costs, needs = costs or Costs(), timetable.dependencies
    work = Work(
        timetable.placement, timetable.micro_batches, costs, needs.split, costs.jitter > 0, needs.trains
    )
    done = in_order(work, timetable.orders)
    _refuse_deadlock(timetable, done)
    busy = [sum(map(work.time, order)) for order in timetable.orders]
    share = timetable.placement.devices_per_pipe / timetable.placement.stages
    return Simulation(
        timetable,
        tuple(
            tuple(zip(*rows, strict=True)) for rows in zip(done.orders, done.starts, done.ends, strict=True)
        ),
        done.makespan,
        ideal=sum(busy) / max(len(busy), 1),
        peak_activations=tuple(peak_stages(order, timetable.trains) * share for order in timetable.orders),
        messages=done.messages,
        costs=costs,
        busy=tuple(time / done.makespan if done.makespan else 0.0 for time in busy),
    )


def in_order(work: Work, orders: Sequence[Sequence[Op]]) -> Run:
    """Run given orders of all devices."""
    return run(work, [FixedOrder(order) for order in orders], NoAdmission(work))


def _refuse_deadlock(timetable: Timetable, done: Run) -> None:
    """Raise ScheduleError with what each device waits for, and the grid, if some have not reached the end."""
    at = [len(order) for order in done.orders]
    stuck = [device for device, order in enumerate(timetable.orders) if at[device] < len(order)]
    if not stuck:
        return
    ended = {op for order in done.orders for op in order}
    waits = []
    for device in stuck[:_MOST_LISTED]:
        op = timetable.orders[device][at[device]]
        missing = [str(need) for need, _ in timetable.dependencies.of(op) if need not in ended]
        waits.append(f"rank {device}: {op} needs {' and '.join(missing)}")
    if len(stuck) > _MOST_LISTED:
        waits.append(f"and {len(stuck) - _MOST_LISTED} more")
    first = stuck[0]
    sentence = f"no rank can move; waiting: {', '.join(waits)}."
    raise fail(timetable, sentence, first, timetable.orders[first][at[first]])


def peak_stages(order: Sequence[Op], trains: bool = True) -> int:
    """Return the most stages whose activations are alive at once: from a forward to the end of its backward.

    A device that only computes forwards while others train keeps none.
    """
    if not trains:
        return min(len(order), 1)
    live = peak = 0
    if all(op.kind == FORWARD for op in order):
        return 0
    for op in order:
        if op.kind in (FORWARD, RECOMPUTE):
            live += 1
            peak = max(peak, live)
        elif op.kind != BACKWARD_INPUT:
            live -= 1
    return peak
