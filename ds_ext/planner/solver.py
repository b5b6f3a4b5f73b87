"""Optimal order of a timetable's ops by constraint programming, for small sizes.

This module needs OR-tools (``pip install 'ds_ext[solve]'``). The model is a job-shop problem: one interval per op, no
overlap on a device, dependencies between ops, and a cumulative constraint for live activations. The micro-batches of a
pipe are interchangeable, so they enter in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from typing import Any

from ..errors import ConfigError, ScheduleError
from ..pipe_schedules import Op, Timetable
from ..pipe_schedules.costs import Costs
from ..pipe_schedules.events import Workload
from ..pipe_schedules.list_scheduling.search import lower_bound
from ..pipe_schedules.simulation import Simulation, simulate

_MOST_TICKS = 10_000_000  # per step: the solver computes with integers


@dataclass(frozen=True)
class Optimum:
    """Best order found. All times are in the unit of the costs.

    Attributes:
        bound: proven lower bound on the makespan of any order.
        given: makespan of the original timetable, which may exceed the limit on activations.
    """

    timetable: Timetable
    makespan: float
    bound: float
    given: float

    @property
    def proven(self) -> bool:
        return self.makespan <= self.bound * (1 + 1e-9)


def optimise(
    timetable: Timetable,
    costs: Costs | None = None,
    *,
    max_activations: float | None = None,
    time_limit_s: float = 60.0,
) -> Optimum:
    """Search for the shortest order of the ops of ``timetable``, starting from its order.

    Args:
        costs: costs of the ops, without their jitter; None: F = I = W = 1 and free messages.
        max_activations: limit on the live activations of a device, in units of 1/D of the model; None: no limit.
        time_limit_s: seconds after which the best order so far is returned.
    """
    cp_model = _import_solver()
    if max_activations is not None and not max_activations > 0:
        raise ScheduleError(
            f"max_activations: must be greater than 0 (got {max_activations}; the unit is 1/D of the model)."
        )
    costs = replace(costs or Costs(), jitter=0.0)
    original = simulate(timetable, costs)
    problem = _Problem(cp_model, original, costs)
    if max_activations is not None:
        problem.limit_memory(max_activations)
    fits = max_activations is None or max(original.peak_activations) <= max_activations + 1e-9
    if fits:
        problem.start_from(original)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    status = solver.solve(problem.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        limit = "" if max_activations is None else f" with at most {max_activations:g} activations per device"
        if status == cp_model.INFEASIBLE:
            raise ScheduleError(
                f"{timetable.schedule}: no order exists{limit} (infeasible). Allow more activations."
            )
        raise ScheduleError(
            f"{timetable.schedule}: no order found{limit} (got {solver.status_name(status).lower()} after "
            f"{solver.wall_time:.1f} s). Allow more activations or more than {time_limit_s:g} s."
        )
    best = problem.timetable(solver)
    makespan = simulate(best, costs).makespan
    if fits and makespan > original.makespan:
        best, makespan = timetable, original.makespan
    # The bound of the placement is often tighter than the bound that a short search proves.
    work = Workload(
        timetable.placement, timetable.micro_batches, costs, split=bool(timetable.split_backwards)
    )
    known = lower_bound(work) if timetable.trains else 0.0
    bound = min(max(solver.best_objective_bound * problem.tick, known), makespan)
    return Optimum(best, makespan, bound, original.makespan)


class _Problem:
    """Constraint model. Times are rounded down to ticks, so its bound also holds for the exact times."""

    def __init__(self, cp_model: Any, original: Simulation, costs: Costs) -> None:
        timetable = original.timetable
        self.model, self.original, self.costs = cp_model.CpModel(), original, costs
        times = costs.durations(timetable.placement)
        lengths = {op: times[op.kind][op.stage] for order in timetable.orders for op in order}
        self.tick = _tick([*lengths.values(), costs.comm], original.makespan)
        self.horizon = self.ticks(original.makespan) + len(lengths)
        self.length = {op: self.ticks(length) for op, length in lengths.items()}
        self.start = {op: self.model.new_int_var(0, self.horizon, str(op)) for op in lengths}
        makespan = self.model.new_int_var(0, self.horizon, "makespan")
        for device, order in enumerate(timetable.orders):
            self._one_at_a_time(order)
            for op in order:
                self.model.add(makespan >= self.start[op] + self.length[op])
                for need, owner in timetable.dependencies.needs(op):
                    delay = self.ticks(costs.delay(owner, device))
                    self.model.add(self.start[op] >= self.start[need] + self.length[need] + delay)
        for m in range(1, timetable.micro_batches):
            if timetable.pipe(m) == timetable.pipe(m - 1):
                self.model.add(self.start[Op("F", m - 1, 0)] <= self.start[Op("F", m, 0)])
        self.model.minimize(makespan)

    def ticks(self, time: float) -> int:
        return math.floor(time / self.tick + 1e-6)

    def _one_at_a_time(self, order: tuple[Op, ...]) -> None:
        self.model.add_no_overlap(
            [self.model.new_fixed_size_interval_var(self.start[op], self.length[op], str(op)) for op in order]
        )

    def limit_memory(self, max_activations: float) -> None:
        """Limit the live activations of every device, in units of 1/D of the model."""
        placement = self.original.timetable.placement
        limit = math.floor(max_activations * placement.stages / placement.num_devices + 1e-9)
        for order in self.original.timetable.orders:
            kept = []
            for forward, last in _live_spans(order):
                size = self.model.new_int_var(0, self.horizon, "")
                end = self.start[last] + self.length[last]
                kept.append(self.model.new_interval_var(self.start[forward], size, end, ""))
            self.model.add_cumulative(kept, [1] * len(kept), limit)

    def start_from(self, known: Simulation) -> None:
        for spans in known.spans:
            for op, start, _ in spans:
                self.model.add_hint(self.start[op], self.ticks(start))

    def timetable(self, solver: Any) -> Timetable:
        """Return the order that was found. Ops are sorted by start; among ties, shorter ops come first."""
        original = self.original.timetable

        def order(ops: tuple[Op, ...]) -> tuple[Op, ...]:
            place = {op: i for i, op in enumerate(ops)}
            return tuple(
                sorted(ops, key=lambda op: (solver.value(self.start[op]), self.length[op], place[op]))
            )

        return replace(
            original, schedule=f"{original.schedule}, optimised", orders=tuple(map(order, original.orders))
        )


def _live_spans(order: tuple[Op, ...]) -> Iterator[tuple[Op, Op]]:
    """Yield (forward, last op of its backward) of every activation of a device."""
    last = {(op.stage, op.micro_batch): op for op in order if op.kind in ("B", "W")}
    for op in order:
        if op.kind == "F" and (op.stage, op.micro_batch) in last:
            yield op, last[op.stage, op.micro_batch]


def _tick(times: list[float], makespan: float) -> float:
    """Return the greatest common divisor of the times, or a fraction of the makespan if that is too small."""
    shares = [Fraction(time).limit_denominator(10_000) for time in set(times) if time]
    if not shares:
        raise ScheduleError("costs: nothing to optimise (got a duration of 0 for every op).")
    common = reduce(lambda a, b: Fraction(math.gcd(a.numerator * b.denominator, b.numerator * a.denominator),
                                          a.denominator * b.denominator), shares)  # fmt: skip
    exact = all(
        abs(float(share) - time) < 1e-12 for share, time in zip(shares, filter(None, set(times)), strict=True)
    )
    return float(common) if exact and makespan / common <= _MOST_TICKS else makespan / _MOST_TICKS


def _import_solver() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ConfigError(
            f"optimise: OR-tools cannot be imported (got {error}). Install it with `pip install 'ds_ext[solve]'`."
        ) from None
    return cp_model
