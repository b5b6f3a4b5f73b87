"""What a timetable costs: start and end of every computation, bubble, live activations, messages.

Discrete events in dependency order. Costs are for one D-th of the model and one micro-batch (one device's share
in a plain pipeline); a stage that is a smaller piece costs its share.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ScheduleError
from .costs import Costs
from .ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Op, Timetable


@dataclass(frozen=True)
class Simulation:
    """The priced timetable. Times are in the costs' unit.

    ``spans[r]`` lists (op, start, end) of device r. ``ideal`` is the computing time of an average device,
    ``peak_activations[r]`` the most activations that device r keeps at once, in units of one D-th of the model,
    ``messages`` the number of tensors that cross between devices.
    """

    timetable: Timetable
    spans: tuple[tuple[tuple[Op, float, float], ...], ...]
    makespan: float
    ideal: float
    peak_activations: tuple[float, ...]
    messages: int

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
    if op.kind == FORWARD:
        if stage > 0:
            needed.append(Op(FORWARD, stage - 1, m))
    elif op.kind == BACKWARD_WEIGHT:
        needed.append(Op(BACKWARD_INPUT, stage, m))
    else:
        needed.append(Op(FORWARD, stage, m))
        if stage < timetable.placement.stages - 1:
            needed.append(timetable.gradient_op(stage + 1, m))
    return [(need, timetable.rank(need.stage, m)) for need in needed]


def simulate(timetable: Timetable, costs: Costs | None = None) -> Simulation:
    """Run the timetable on ideal devices. Raises ScheduleError when no device can move."""
    costs = costs or Costs()
    placement = timetable.placement
    share = placement.ranks / placement.stages
    ends: dict[Op, float] = {}
    spans: list[list[tuple[Op, float, float]]] = [[] for _ in timetable.ranks]
    waiting: dict[Op, list[int]] = {}
    runnable = list(range(len(timetable.ranks)))
    while runnable:
        rank = runnable.pop()
        order, done = timetable.ranks[rank], spans[rank]
        while len(done) < len(order):
            op = order[len(done)]
            needed = dependencies(op, timetable)
            missing = next((need for need, _ in needed if need not in ends), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            ready = max(
                (ends[need] + (costs.comm if owner != rank else 0.0) for need, owner in needed), default=0.0
            )
            start = max(ready, done[-1][2] if done else 0.0)
            ends[op] = start + costs.of(op.kind) * share
            done.append((op, start, ends[op]))
            runnable += waiting.pop(op, [])
    _refuse_deadlock(timetable, spans)
    makespan = max(ends.values(), default=0.0)
    busy = sum(costs.of(op.kind) * share for order in timetable.ranks for op in order)
    return Simulation(
        timetable,
        tuple(map(tuple, spans)),
        makespan,
        busy / max(len(timetable.ranks), 1),
        tuple(_peak(order, share, timetable.trains) for order in timetable.ranks),
        _messages(timetable),
    )


def _refuse_deadlock(timetable: Timetable, spans: list[list[tuple[Op, float, float]]]) -> None:
    """Raise the sentence that says which rank waits for what, if some did not reach the end."""
    ends = {op for done in spans for op, _, _ in done}
    stuck = []
    for rank, (order, done) in enumerate(zip(timetable.ranks, spans, strict=True)):
        if len(done) < len(order):
            op = order[len(done)]
            missing = [str(need) for need, _ in dependencies(op, timetable) if need not in ends]
            stuck.append(f"rank {rank}: {op} needs {' and '.join(missing)}")
    if stuck:
        raise ScheduleError(f"{timetable.schedule}: no rank can move; waiting: {', '.join(stuck)}.")


def _peak(order: tuple[Op, ...], share: float, trains: bool) -> float:
    """Most activations alive at once, in D-ths of the model: from a forward to the end of its backward."""
    ends = (BACKWARD, BACKWARD_WEIGHT) if trains else (FORWARD,)
    live = peak = 0
    for op in order:
        live += op.kind == FORWARD
        peak = max(peak, live)
        live -= op.kind in ends
    return peak * share


def _messages(timetable: Timetable) -> int:
    """Tensors that cross between devices in one step."""
    return sum(
        1
        for rank, order in enumerate(timetable.ranks)
        for op in order
        for need, owner in dependencies(op, timetable)
        if owner != rank
    )
