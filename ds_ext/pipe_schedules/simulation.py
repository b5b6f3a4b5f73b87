"""Simulation of a timetable: start and end of every op, bubble, live activations and messages.

Costs are for 1/D of the model and one micro-batch. A stage that is a smaller part of the model costs its share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .checks.timetable import check_timetable, deadlock_at
from .costs import Costs
from .events import FixedOrder, Run, Workload, run
from .ops import BACKWARD_INPUT, FORWARD, RECOMPUTE, Op
from .ports import Collective, Ports
from .timetables import Timetable


@dataclass(frozen=True)
class Simulation:
    """Simulated timetable. Times are in the unit of the costs.

    Attributes:
        spans: (op, start, end) of every op, by device.
        ideal: computing time of an average device.
        peak_activations: maximum live activations of every device; the unit is what 1/D of the model keeps for one
            micro-batch.
        messages: number of tensors sent between devices.
        busy: share of the makespan in which each device computes.
        collectives: the same of reductions and gathers, in a simulation with a network. They may end later.
    """

    timetable: Timetable
    spans: tuple[tuple[tuple[Op, float, float], ...], ...]
    makespan: float
    ideal: float
    peak_activations: tuple[float, ...]
    messages: int
    costs: Costs
    busy: tuple[float, ...]
    collectives: tuple[tuple[tuple[Collective, float, float], ...], ...] = ()

    @property
    def bubble(self) -> float:
        """Share of the makespan in which an average device computes nothing."""
        return max(0.0, 1 - self.ideal / self.makespan) if self.makespan else 0.0

    @property
    def end(self) -> float:
        """End of the last op or collective.

        In a measured step the last op may follow the makespan, because ranks start at different times.
        """
        ends = [end for row in self.collectives for _, _, end in row]
        return max([self.makespan, *(row[-1][2] for row in self.spans if row), *ends])

    def as_dict(self) -> dict[str, object]:
        """Return the keys of ``python -m ds_ext simulate --json``."""
        return {
            "makespan": self.makespan,
            "ideal": self.ideal,
            "bubble": self.bubble,
            "peak_activations": list(self.peak_activations),
            "messages": self.messages,
        }


def simulate(
    timetable: Timetable,
    costs: Costs | None = None,
    gathered: Mapping[tuple[int, int], float] | None = None,
    ports: Ports | None = None,
) -> Simulation:
    """Run the timetable on simulated devices.

    Args:
        gathered: (device, stage) -> time at which the device has the weights of the stage; 0 for others.
        ports: ports that messages share; None: messages do not wait for each other.

    Raises:
        ScheduleError: the timetable is incomplete, or it deadlocks.
    """
    if "fixed_orders" not in vars(timetable):  # checked by its first simulation
        check_timetable(timetable)
    costs = costs or Costs()
    dependencies = timetable.dependencies
    workload = Workload(
        timetable.placement,
        timetable.micro_batches,
        costs,
        dependencies.split,
        costs.jitter > 0,
        dependencies.trains,
        timetable.slices,
    )
    releases: dict[Op, float] = {}
    for (device, stage), time in (gathered or {}).items():
        first = next((op for op in timetable.orders[device] if op.stage == stage), None)
        if first is not None and time:
            releases[first] = time
    result = None if costs.jitter else timetable.fixed_orders.run(workload, releases, ports)
    if result is None:
        result = run_orders(workload, timetable.orders, releases, ports)
        _check_complete(timetable, result)
    busy = [sum(workload.times_of(order)) for order in timetable.orders]
    stages = timetable.placement.stages
    share = timetable.placement.devices_per_pipe / stages / timetable.slices
    return Simulation(
        timetable,
        result.spans,
        result.makespan,
        ideal=sum(busy) / max(len(busy), 1),
        peak_activations=tuple(
            peak_stages(order, timetable.trains, stages) * share for order in timetable.orders
        ),
        messages=result.messages,
        costs=costs,
        busy=tuple(time / result.makespan if result.makespan else 0.0 for time in busy),
    )


def run_orders(
    workload: Workload,
    orders: Sequence[Sequence[Op]],
    releases: Mapping[Op, float] | None = None,
    ports: Ports | None = None,
) -> Run:
    policies = [FixedOrder(order) for order in orders]
    return run(workload, policies, releases=releases, ports=ports)


def _check_complete(timetable: Timetable, result: Run) -> None:
    steps = [len(order) for order in result.orders]
    stuck = [device for device, order in enumerate(timetable.orders) if steps[device] < len(order)]
    if not stuck:
        return
    ended = {op for order in result.orders for op in order}
    waits = []
    for device in stuck:
        op = timetable.orders[device][steps[device]]
        missing = [str(need) for need, _ in timetable.dependencies.needs(op) if need not in ended]
        waits.append(f"device {device}: {op} waits for {' and '.join(missing)}")
    first = stuck[0]
    raise deadlock_at(timetable, waits, first, timetable.orders[first][steps[first]])


def peak_stages(order: Sequence[Op], trains: bool = True, stages: int | None = None) -> int:
    """Return the largest number of live activations, in slices of stages: from a forward to the end of its backward.

    A forward device of ``fbd`` keeps none in training. Parts of the head do not count: ops of ``stages`` and later.
    """
    if stages is not None:
        order = [op for op in order if op.stage < stages]
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
