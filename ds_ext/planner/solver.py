"""The best order that exists, by constraint programming: an oracle for small sizes, and orders for measured costs.

Needs OR-tools (``pip install 'ds_ext[solve]'``). The model is that of job-shop scheduling: an interval per
computation, no two on a device at once, results before their use, and for memory a cumulative constraint over the
time from a forward to the end of its backward. Micro-batches of a pipe are interchangeable: they enter in order.
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
from ..pipe_schedules.events import Work
from ..pipe_schedules.list_scheduling.search import lower_bound
from ..pipe_schedules.simulate import Simulation, simulate

_MOST_TICKS = 10_000_000  # of a step; the solver counts in integers


@dataclass(frozen=True)
class Optimum:
    """What the solver found. Times are in the costs' unit.

    ``bound`` is proven: no order of these computations on these devices takes less. ``given`` is the time of the
    timetable whose computations they are, which may keep more activations than were allowed.
    """

    timetable: Timetable
    makespan: float
    bound: float
    given: float

    @property
    def proven(self) -> bool:
        """Whether no other order takes less time than this one."""
        return self.makespan <= self.bound * (1 + 1e-9)


def optimise(
    timetable: Timetable,
    costs: Costs | None = None,
    *,
    max_activations: float | None = None,
    time_limit_s: float = 60.0,
    workers: int = 0,
) -> Optimum:
    """Search for the order of ``timetable``'s computations that takes the least time, starting from its own.

    Args:
        costs: F = I = W = 1 and free messages if None; their jitter does not count.
        max_activations: most that a device may keep, in D-ths of the model; None for any number.
        time_limit_s: then the best order so far is returned, with the bound as far as it is proven.
        workers: threads of the solver; 0 for as many as there are cores.

    Raises:
        ConfigError: OR-tools is not installed.
        ScheduleError: ``timetable`` cannot run, or nothing was found that keeps to ``max_activations``.
    """
    cp_model = _import_solver()
    if max_activations is not None and not max_activations > 0:
        raise ScheduleError(
            f"max_activations must be more than 0 (D-ths of the model); got {max_activations}."
        )
    costs = replace(costs or Costs(), jitter=0.0)
    given = simulate(timetable, costs)
    problem = _Problem(cp_model, given, costs)
    if max_activations is not None:
        problem.limit_memory(max_activations)
    if max_activations is None or max(given.peak_activations) <= max_activations + 1e-9:
        problem.start_from(given)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = workers
    status = solver.solve(problem.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        limit = (
            "" if max_activations is None else f" that keeps at most {max_activations:g} activations a device"
        )
        if status == cp_model.INFEASIBLE:
            raise ScheduleError(
                f"{timetable.schedule}: there is no order{limit} (infeasible: more time cannot help). Allow more "
                f"activations."
            )
        raise ScheduleError(
            f"{timetable.schedule}: no order{limit} was found in {solver.wall_time:.1f} s "
            f"({solver.status_name(status).lower()}). Allow more activations or more than {time_limit_s:g} s."
        )
    found = problem.timetable(solver)
    makespan = simulate(found, costs).makespan
    if makespan > given.makespan and (
        max_activations is None or max(given.peak_activations) <= max_activations + 1e-9
    ):
        found, makespan = timetable, given.makespan
    # What the placement alone allows is often more than a short search can prove.
    work = Work(timetable.placement, timetable.micro_batches, costs, split=bool(timetable.split_backwards))
    known = lower_bound(work) if timetable.trains else 0.0
    bound = min(max(solver.best_objective_bound * problem.tick, known), makespan)
    return Optimum(found, makespan, bound, given.makespan)


class _Problem:
    """The model. Times are rounded down to ticks, so that its bound is one of the problem itself."""

    def __init__(self, cp_model: Any, given: Simulation, costs: Costs) -> None:
        made = given.timetable
        self.model, self.given, self.costs = cp_model.CpModel(), given, costs
        times = costs.durations(made.placement)
        lengths = {op: times[op.kind][op.stage] for order in made.orders for op in order}
        self.tick = _tick([*lengths.values(), costs.comm], given.makespan)
        self.horizon = self.ticks(given.makespan) + len(lengths)
        self.length = {op: self.ticks(length) for op, length in lengths.items()}
        self.start = {op: self.model.new_int_var(0, self.horizon, str(op)) for op in lengths}
        makespan = self.model.new_int_var(0, self.horizon, "makespan")
        for rank, order in enumerate(made.orders):
            self._one_at_a_time(order)
            for op in order:
                self.model.add(makespan >= self.start[op] + self.length[op])
                for need, owner in made.dependencies.of(op):
                    delay = self.ticks(costs.delay(owner, rank))
                    self.model.add(self.start[op] >= self.start[need] + self.length[need] + delay)
        for m in range(1, made.micro_batches):
            if made.pipe(m) == made.pipe(m - 1):
                self.model.add(self.start[Op("F", m - 1, 0)] <= self.start[Op("F", m, 0)])
        self.model.minimize(makespan)

    def ticks(self, time: float) -> int:
        """A time as a whole number of ticks."""
        return math.floor(time / self.tick + 1e-6)

    def _one_at_a_time(self, order: tuple[Op, ...]) -> None:
        self.model.add_no_overlap(
            [self.model.new_fixed_size_interval_var(self.start[op], self.length[op], str(op)) for op in order]
        )

    def limit_memory(self, max_activations: float) -> None:
        """A device keeps at most so many activations, from the start of a forward to the end of its backward."""
        placement = self.given.timetable.placement
        room = math.floor(max_activations * placement.stages / placement.num_devices + 1e-9)
        for order in self.given.timetable.orders:
            kept = []
            for forward, last in _lives(order):
                size = self.model.new_int_var(0, self.horizon, "")
                end = self.start[last] + self.length[last]
                kept.append(self.model.new_interval_var(self.start[forward], size, end, ""))
            self.model.add_cumulative(kept, [1] * len(kept), room)

    def start_from(self, known: Simulation) -> None:
        """A solution to improve."""
        for spans in known.spans:
            for op, start, _ in spans:
                self.model.add_hint(self.start[op], self.ticks(start))

    def timetable(self, solver: Any) -> Timetable:
        """The order that was found: every device by the starts; of equal starts, what takes no time first."""
        made = self.given.timetable

        def order(ops: tuple[Op, ...]) -> tuple[Op, ...]:
            place = {op: i for i, op in enumerate(ops)}
            return tuple(
                sorted(ops, key=lambda op: (solver.value(self.start[op]), self.length[op], place[op]))
            )

        return replace(made, schedule=f"{made.schedule}, optimised", orders=tuple(map(order, made.orders)))


def _lives(order: tuple[Op, ...]) -> Iterator[tuple[Op, Op]]:
    """(forward, last part of its backward) of every activation of a device."""
    last = {(op.stage, op.micro_batch): op for op in order if op.kind in ("B", "W")}
    for op in order:
        if op.kind == "F" and (op.stage, op.micro_batch) in last:
            yield op, last[op.stage, op.micro_batch]


def _tick(times: list[float], makespan: float) -> float:
    """The largest time of which all are multiples; if that is very small, a share of the step."""
    shares = [Fraction(time).limit_denominator(10_000) for time in set(times) if time]
    if not shares:
        raise ScheduleError("there is nothing to optimise: all computations take no time.")
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
            f"optimise needs OR-tools, which cannot be imported here ({error}): pip install 'ds_ext[solve]'."
        ) from None
    return cp_model
