"""What a timetable costs: start and end of every computation, bubble, live activations, messages.

Discrete events in dependency order. Costs are for one D-th of the model and one micro-batch (one device's share
in a plain pipeline); a stage that is a smaller piece costs its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .check.timetable import fail
from .collection import without_collection
from .costs import Costs
from .ops import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE, Op, Timetable

_MOST_LISTED = 64  # of the ranks that wait for each other


@dataclass(frozen=True)
class Simulation:
    """The priced timetable. Times are in the costs' unit.

    ``spans[r]`` lists (op, start, end) of device r. ``ideal`` is the computing time of an average device,
    ``peak_activations[r]`` the most activations that device r keeps at once, in units of one D-th of the model,
    ``messages`` the number of tensors that cross between devices. ``busy[r]`` is the share of the makespan in which
    device r computes; ``costs`` are those that the timetable was priced with.
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
        """The keys of ``python -m ds_ext simulate --json``."""
        return {
            "makespan": self.makespan,
            "ideal": self.ideal,
            "bubble": self.bubble,
            "peak_activations": list(self.peak_activations),
            "messages": self.messages,
        }


def dependencies(op: Op, timetable: Timetable) -> list[tuple[Op, int]]:
    """What must have ended before ``op`` may start, and the device that computes it."""
    stage, m = op.stage, op.micro_batch
    needed: list[Op] = []
    if op.kind in (FORWARD, RECOMPUTE):
        if stage > 0:
            needed.append(Op(FORWARD, m, stage - 1))
    elif op.kind == BACKWARD_WEIGHT:
        needed.append(Op(BACKWARD_INPUT, m, stage))
    else:
        needed.append(Op(FORWARD if timetable.placement.forward is None else RECOMPUTE, m, stage))
        if stage < timetable.placement.stages - 1:
            needed.append(timetable.gradient_op(stage + 1, m))
    return [(need, timetable.rank(need.stage, m, need.kind)) for need in needed]


@without_collection
def simulate(timetable: Timetable, costs: Costs | None = None) -> Simulation:
    """Run the timetable on ideal devices. Raises ScheduleError when no device can move."""
    clock = _Clock(timetable, costs or Costs())
    clock.run()
    _refuse_deadlock(timetable, clock.ends)
    makespan = max(map(max, filter(None, clock.ends)), default=0.0)
    spans = tuple(
        tuple(zip(*rows, strict=True)) for rows in zip(timetable.ranks, clock.starts, clock.ends, strict=True)
    )
    work = [sum(map(clock.duration, order)) for order in timetable.ranks]
    share = timetable.placement.width / timetable.placement.stages
    return Simulation(
        timetable,
        spans,
        makespan,
        ideal=sum(work) / max(len(work), 1),
        peak_activations=tuple(peak_stages(order, timetable.trains) * share for order in timetable.ranks),
        messages=clock.messages,
        costs=clock.costs,
        busy=tuple(time / makespan if makespan else 0.0 for time in work),
    )


class _Clock:
    """Start and end of every op, found in one pass: a device goes on until it needs what has not ended yet."""

    def __init__(self, timetable: Timetable, costs: Costs) -> None:
        self.timetable, self.costs = timetable, costs
        self.stages = timetable.placement.stages
        self.pairs = self.stages * timetable.micro_batches
        self.starts: list[list[float]] = [[] for _ in timetable.ranks]
        self.ends: list[list[float]] = [[] for _ in timetable.ranks]
        self.messages = 0
        self._times = costs.durations(timetable.placement)
        # End of every op by its number, -1 if it has not ended; one more for what needs nothing.
        kinds = 3 if timetable.placement.forward is None else 4
        self._nothing = kinds * self.pairs
        self._end = [-1.0] * self._nothing + [0.0]
        self._waiting: dict[int, list[int]] = {}  # op -> devices that need it

    def duration(self, op: Op) -> float:
        """Time of ``op``, with its jitter."""
        time = self._times[op.kind][op.stage]
        return time * self.costs.factor(op) if self.costs.jitter else time

    def run(self) -> None:
        """Let the devices go on as long as one can."""
        runnable = list(range(len(self.timetable.ranks)))
        while runnable:
            runnable += self._go_on(runnable.pop())

    def _go_on(self, rank: int) -> list[int]:
        """Compute on ``rank`` until it must wait; returns the devices that waited for what it computed."""
        order, numbers = self.timetable.ranks[rank], self.timetable.numbers[rank]
        starts, ends, end = self.starts[rank], self.ends[rank], self._end
        jitter, times, woken = self.costs.jitter, self._times, []
        links, comm = self.costs.links, self.costs.comm
        now = ends[-1] if ends else 0.0
        for at in range(len(ends), len(order)):
            op, number = order[at], numbers[at]
            local, message, sender = self._needs(op, number, rank)
            if end[local] < 0 or end[message] < 0:
                self._waiting.setdefault(local if end[local] < 0 else message, []).append(rank)
                break
            arrives = end[message]
            if sender != rank:
                self.messages += 1
                delay = links.get((sender, rank), comm) if links else comm
                arrives += delay * self.costs.factor(op, message=True) if jitter else delay
            now = max(now, end[local], arrives)
            starts.append(now)
            now += self.duration(op) if jitter else times[op.kind][op.stage]
            ends.append(now)
            end[number] = now
            if number in self._waiting:
                woken += self._waiting.pop(number)
        return woken

    def _needs(self, op: Op, number: int, rank: int) -> tuple[int, int, int]:
        """What ``op`` needs of its own stage, and of the neighbouring one, and the device that has the latter."""
        kind, m, stage = op
        nothing, placement = self._nothing, self.timetable.placement
        if kind in (FORWARD, RECOMPUTE):
            if stage == 0:
                return nothing, nothing, rank
            sender = placement.forward_pipes[self.timetable.pipes[m]][stage - 1]
            return nothing, number % self.pairs - 1, sender
        local = number - self.pairs
        if placement.forward is not None and kind != BACKWARD_WEIGHT:
            local = number + 2 * self.pairs  # of the forward it has repeated
        if kind == BACKWARD_WEIGHT or stage == self.stages - 1:
            return local, nothing, rank
        return local, number + 1, placement.pipes[self.timetable.pipes[m]][stage + 1]


def _refuse_deadlock(timetable: Timetable, ends: list[list[float]]) -> None:
    """Raise the sentence that says which rank waits for what, and the grid, if some did not reach the end."""
    at = [len(done) for done in ends]
    stuck = [rank for rank, order in enumerate(timetable.ranks) if at[rank] < len(order)]
    if not stuck:
        return
    ended = {op for order, done in zip(timetable.ranks, at, strict=True) for op in order[:done]}
    waits = []
    for rank in stuck[:_MOST_LISTED]:
        op = timetable.ranks[rank][at[rank]]
        missing = [str(need) for need, _ in dependencies(op, timetable) if need not in ended]
        waits.append(f"rank {rank}: {op} needs {' and '.join(missing)}")
    if len(stuck) > _MOST_LISTED:
        waits.append(f"and {len(stuck) - _MOST_LISTED} more")
    first = stuck[0]
    sentence = f"no rank can move; waiting: {', '.join(waits)}."
    raise fail(timetable, sentence, first, timetable.ranks[first][at[first]])


def peak_stages(order: Sequence[Op], trains: bool = True) -> int:
    """Most stages whose activations are alive at once: from a forward to the end of its backward.

    A device that only computes forwards while others train keeps none.
    """
    if not trains:
        return min(len(order), 1)
    live = peak = 0
    if all(kind == FORWARD for kind, _, _ in order):
        return 0
    for kind, _, _ in order:
        if kind in (FORWARD, RECOMPUTE):
            live += 1
            peak = max(peak, live)
        elif kind != BACKWARD_INPUT:
            live -= 1
    return peak
