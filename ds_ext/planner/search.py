"""Which schedule to take: every registered one, priced and weighed for given devices, costs, model and memory.

Nothing here knows a schedule by name: each says itself which of its options are worth trying
(:attr:`~ds_ext.pipe_schedules.registry.Schedule.variants`). Recomputation is tried with each: "full" computes every
forward again in the backward, "selective" the attention's core, where that stores its scores at all (arXiv
2205.05198, section 4). With a model every stage costs what its layers and the head cost (:mod:`.stage_costs`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..errors import ScheduleError
from ..pipe_schedules import SCHEDULES, Op, Placement, Schedule, Timetable
from ..pipe_schedules.costs import Costs
from ..pipe_schedules.events import Work
from ..pipe_schedules.list_scheduling.search import lower_bound
from ..pipe_schedules.ops import BACKWARD, FORWARD, KINDS
from ..pipe_schedules.simulate import simulate
from .candidates import SAME, Candidate, Choice, format_bytes
from .memory import ModelSizes, memory
from .stage_costs import cut, stage_costs

RECOMPUTE = ("none", "selective", "full")
_PLANS = 12  # orders that a planned schedule looks at, about
_SEARCH = 60_000  # computations of all that it looks at when none meets the bound, at least
_MOST_OPS = 500_000  # of one candidate; planning takes about 5 microseconds for each of up to a million


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Args:
        devices: D, of one pipeline group.
        micro_batches: N, of a pipeline group and step, all pipes together.
        costs: of one D-th of the model without recomputation.
        sizes: of the model; None: neither its layers nor memory are looked at. Its ``recompute`` does not count.
        memory_bytes: what a device has; None: no limit.
        recompute: the kinds of recomputation to try.
        cheap_ops: computations that a schedule may plan in any case; more, only while it can still be the best.
        margin: share of the time that a better one must save to be worth looking for, whatever it takes to price.
        stage_layers: the layers of every stage, as the scripts' flag; None: by their work.

    Raises:
        ScheduleError: a size is not positive, or a limit is given without a model.
    """

    devices: int
    micro_batches: int
    costs: Costs = field(default_factory=Costs)
    sizes: ModelSizes | None = None
    memory_bytes: int | None = None
    recompute: tuple[str, ...] = RECOMPUTE
    cheap_ops: int = 30_000  # a tenth of a second
    margin: float = 0.0
    stage_layers: str | None = None

    def __post_init__(self) -> None:
        for name in ("devices", "micro_batches", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ScheduleError(f"choosing a schedule: {name} must be at least 1; got {value}.")
        if self.memory_bytes is not None and self.sizes is None:
            raise ScheduleError(
                "choosing a schedule: a memory limit needs the sizes of the model that is to fit."
            )
        if not set(self.recompute) <= set(RECOMPUTE):
            raise ScheduleError(
                f"choosing a schedule: recompute is of {', '.join(RECOMPUTE)}; got {', '.join(self.recompute)}."
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those kinds of recomputation that make a difference."""
        if self.sizes is None:
            return RECOMPUTE[:1]
        differ = tuple(k for k in self.recompute if k != "selective" or self.sizes.attention_scores)
        return differ or self.recompute


def choose(request: Request) -> Choice:
    """Price every registered schedule with its variants and recomputations. Raises ScheduleError.

    Orders that take long to plan are only made while they could still be the best: their times and memory have bounds
    that are known at once. What is left out is in the table with its bound.
    """
    table, trials = [], []
    for trial in _trials(request):
        try:
            # Of equals the simplest first: with a margin it may be the only one.
            trials.append((trial.costly, trial.promise, trial.placement.stages, trial))
        except ScheduleError as error:
            table.append(trial.row(refusal=_first_sentence(error)))
    best: tuple[float, ...] | None = None
    for costly, promise, _, trial in sorted(trials, key=lambda t: t[:3]):
        if best is not None and _hopeless(promise, best, costly, request.margin):
            table.append(trial.row(refusal=_not_priced(promise, request.margin), unpriced=not promise[0]))
            continue
        try:
            row = trial.price()
        except ScheduleError as error:
            table.append(trial.row(refusal=_first_sentence(error)))
            continue
        table.append(row)
        reached = _rank(bool(row.refusal), row.time or 0.0, row.memory_bytes or 0)
        best = reached if best is None else min(best, reached)
    return Choice(tuple(_sorted(_without_twins(table))), request.memory_bytes, request.margin)


def _hopeless(promise: tuple[float, ...], best: tuple[float, ...], costly: bool, margin: float) -> bool:
    """Whether what keeps its promise would not be the best, or with a margin not better by that."""
    if margin and promise[0] == best[0] == 0:
        return promise[1] > best[1] * (1 - margin)
    return (costly or margin > 0) and promise > best


def _rank(too_large: bool, time: float, size: float) -> tuple[float, ...]:
    """What fits comes before what does not; the one by time, the other by bytes."""
    return (1, size) if too_large else (0, time)


def _not_priced(promise: tuple[float, ...], margin: float) -> str:
    large, least = promise
    need = f"needs {format_bytes(math.ceil(least))}" if large else f"takes {least:.4g}"
    than = f"not {margin:.0%} less than another one" if margin else "more than another one"
    return f"Not planned: it {need} at least, {than}."


@dataclass(frozen=True)
class _Trial:
    """A schedule with options and recomputation that may be tried."""

    request: Request
    schedule: Schedule
    options: Mapping[str, Any]
    recompute: str

    @cached_property
    def costs(self) -> Costs:
        """Of a stage each, with recomputation. Raises ScheduleError when they do not fit the stages."""
        costs = self.request.costs if self.sizes is None else stage_costs(self.request.costs, self.sizes)
        costs.check_fits(self.placement)
        return costs

    @cached_property
    def sizes(self) -> ModelSizes | None:
        """The model, cut into the schedule's stages. Raises ScheduleError when it has too few layers."""
        sizes = self.request.sizes
        if sizes is None:
            return None
        sizes = replace(sizes, recompute=self.recompute)
        return cut(sizes, self.placement, self.schedule.name, self.request.stage_layers)

    @cached_property
    def placement(self) -> Placement:
        """Raises ScheduleError when the schedule cannot have these sizes."""
        placement = self.schedule.placement(self.request.devices, self.options)
        if placement.forward_devices:
            raise ScheduleError(
                f"{self.schedule.name} takes {placement.num_devices} devices for {placement.devices_per_pipe} stages, "
                f"as forwards have devices of their own; there are {self.request.devices}."
            )
        n = self.request.micro_batches
        if n % placement.replicas:
            raise ScheduleError(
                f"{self.schedule.name} shares the micro-batches evenly between {placement.replicas} pipes; got {n}."
            )
        if self._ops(placement) > _MOST_OPS:
            raise ScheduleError(f"{self._ops(placement):,} computations are more than {_MOST_OPS:,}.")
        return placement

    def _ops(self, placement: Placement) -> int:
        return (len(KINDS) - 1) * placement.stages * self.request.micro_batches

    @cached_property
    def costly(self) -> bool:
        """Whether it takes more than a moment to plan; with equal costs and free messages the bound is soon met."""
        ops, f = self._ops(self.placement) * _PLANS, self.costs.forward
        soon = self.costs == Costs(f, f, f) and self.request.micro_batches % self.request.devices == 0
        return self.schedule.planned and (ops if soon else max(ops, _SEARCH)) > self.request.cheap_ops

    @cached_property
    def promise(self) -> tuple[float, ...]:
        """No order of it can rank before this."""
        n, need = self.request.micro_batches, 0
        if self.sizes is not None:
            one = tuple(
                tuple(
                    Op(kind, 0, stage)
                    for stage in self.placement.stages_of(d)
                    for kind in (FORWARD, BACKWARD)
                )
                for d in range(self.placement.num_devices)
            )
            need = max(m.total for m in memory(Timetable("", self.placement, n, one), self.sizes))
        # A split backward is waited for less, so this bounds a whole one too. Jitter may make all faster, and sums
        # of the same times differ by rounding.
        least = lower_bound(Work(self.placement, n, self.costs, split=True))
        least *= (1 - self.costs.jitter) * (1 - SAME)
        return _rank(self._too_large(need), float(f"{least:.6g}") if self.request.margin else least, need)

    def _too_large(self, need: int) -> bool:
        limit = self.request.memory_bytes
        return limit is not None and need > limit

    def price(self) -> Candidate:
        """Made and simulated. Raises ScheduleError."""
        request = self.request
        made = self.schedule.timetable(request.devices, request.micro_batches, self.options, self.costs)
        priced = simulate(made, self.costs)
        need = None if self.sizes is None else max(m.total for m in memory(made, self.sizes))
        refusal = f"It needs {format_bytes(need)}." if need is not None and self._too_large(need) else ""
        return self.row(
            refusal=refusal,
            time=priced.makespan,
            bubble=priced.bubble,
            memory_bytes=need,
            weights=made.placement.replicas,
            activations=max(priced.peak_activations),
            stages=made.placement.stages,
            costs=self.costs,
            layers=self.sizes.layers
            if self.sizes is not None and isinstance(self.sizes.layers, tuple)
            else None,
        )

    def row(self, **found: Any) -> Candidate:
        """A row of the table with what was found."""
        found = {"costs": self.request.costs, **found}
        return Candidate(
            self.schedule.name, self.options, self.recompute, planned=self.schedule.planned, **found
        )


def _trials(request: Request) -> Iterator[_Trial]:
    for recompute in request.kinds:
        for _, schedule in sorted(SCHEDULES.items()):
            for options in schedule.variants(request.devices, request.micro_batches):
                yield _Trial(request, schedule, options, recompute)


def _without_twins(table: list[Candidate]) -> Iterator[Candidate]:
    """Variants that come out alike are refused, but for the first."""
    seen: dict[tuple[object, ...], Candidate] = {}
    for row in table:
        key = (row.schedule, row.recompute, row.time, row.bubble, row.memory_bytes, row.activations)
        if row.refusal or row.time is None:
            yield row
        elif key in seen:
            yield replace(row, refusal=f"The same as {seen[key].label}.")
        else:
            seen[key] = row
            yield row


def _sorted(rows: Iterator[Candidate]) -> list[Candidate]:
    """The best first, of equals in time by :attr:`.Candidate.order`; then by time; the refused by bytes, at the end."""
    table = list(rows)
    fits = sorted((c for c in table if not c.refusal), key=lambda c: (c.time, c.order))
    if fits:
        least = (fits[0].time or 0.0) * (1 + SAME)
        best = min((c for c in fits if (c.time or 0.0) <= least), key=lambda c: c.order)
        fits = [best, *(c for c in fits if c is not best)]
    large = [c for c in table if c.refusal and c.memory_bytes is not None]
    rest = [c for c in table if c.refusal and c.memory_bytes is None]
    return [*fits, *sorted(large, key=lambda c: c.order), *rest]


def _first_sentence(error: ScheduleError) -> str:
    return str(error).split(". ", 1)[0].removesuffix(".") + "."
