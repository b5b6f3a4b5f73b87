"""Search for the best schedule: every registered one, evaluated for given devices, costs, model and memory.

The search does not depend on the names of schedules. Each schedule declares which of its options are worth evaluating
(:attr:`~ds_ext.pipe_schedules.registry.Schedule.variants`). Each variant is evaluated with every kind of recomputation:
"full" repeats every forward in the backward, "selective" only the core attention, if it stores its scores (arXiv
2205.05198, section 4). With a model, the cost of a stage is that of its layers and the head (:mod:`.stage_costs`).
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..errors import ScheduleError
from ..pipe_schedules import SCHEDULES, Op, Placement, Schedule, Timetable
from ..pipe_schedules.costs import Costs
from ..pipe_schedules.events import Workload
from ..pipe_schedules.list_scheduling.search import lower_bound
from ..pipe_schedules.ops import BACKWARD, FORWARD, KINDS
from ..pipe_schedules.simulation import simulate
from .memory import RECOMPUTATIONS, TrainingSizes, memory
from .stage_costs import split_layers, stage_costs
from .text import costs_text, format_bytes, format_number, join_reasons

SAME = 1e-7  # relative difference up to which times count as equal; stage factors are rounded to 1e-8
_REASONS_SHOWN = 3
_ORDERS = 12  # approximate number of orders that a planned schedule simulates
_SEARCHED_OPS = 60_000  # minimum over all orders of a search that does not reach its bound
_MOST_OPS = 500_000  # maximum per candidate; planning takes about 5 microseconds per op, for up to a million


@dataclass(frozen=True)
class Candidate:
    """One way to run a job, evaluated or refused.

    Attributes:
        costs: costs of each stage, with recomputation.
        planned: True if the schedule plans its order for the costs.
        refusal: why the candidate cannot be used, in one sentence; "" if it can.
        time: makespan of a step in the unit of the costs; None if not simulated.
        memory_bytes: largest memory of a device; None without a model or a simulation.
        replicas: copies of the weights.
        activations: largest peak of live activations on a device, in units of 1/D of the model.
        stages: stages of the model.
        layers: transformer layers of every stage.
        unpriced: True if a lower bound on its time ruled out the candidate.
        timetable: simulated timetable; None if not simulated.
    """

    schedule: str
    options: Mapping[str, Any]
    recompute: str
    costs: Costs
    planned: bool
    refusal: str = ""
    time: float | None = None
    bubble: float | None = None
    memory_bytes: int | None = None
    replicas: int = 1
    activations: float = 0.0
    stages: int = 0
    layers: tuple[int, ...] | None = None
    unpriced: bool = False
    timetable: Timetable | None = field(default=None, compare=False, repr=False)

    @property
    def label(self) -> str:
        """Name and options, such as ``interleaved chunks=3``."""
        return " ".join([self.schedule, *(f"{key}={format_number(v)}" for key, v in self.options.items())])

    @property
    def settings(self) -> dict[str, Any]:
        """The "schedule_options" of a job: the options, and the costs if the order is planned for them."""
        if self.planned and self.costs != Costs():
            return {**self.options, "costs": costs_text(self.costs)}
        return dict(self.options)

    @property
    def size(self) -> tuple[float, ...]:
        """Key that sorts by memory: bytes, or, without a model, copies of the weights and then activations."""
        if self.memory_bytes is not None:
            return (self.memory_bytes,)
        return (self.replicas, self.activations)

    @property
    def tie_order(self) -> tuple[object, ...]:
        """Key that sorts candidates of equal time: least memory, then fewest stages, then name."""
        return (*self.size, self.stages, self.schedule)


@dataclass(frozen=True)
class Candidates:
    """All candidates, ranked: usable ones by time, then those that are too large by bytes, then the rest.

    Attributes:
        memory_bytes: memory limit of a device; None: no limit.
        margin: relative saving below which a candidate was not evaluated.
    """

    ranked: tuple[Candidate, ...]
    memory_bytes: int | None = None
    margin: float = 0.0

    @property
    def best(self) -> Candidate | None:
        """Usable candidate with the least time, then the least memory; None if nothing fits."""
        return self.ranked[0] if self.ranked and not self.ranked[0].refusal else None

    @property
    def usable(self) -> tuple[Candidate, ...]:
        """Candidates without a refusal."""
        return tuple(c for c in self.ranked if not c.refusal)

    @property
    def smallest(self) -> Candidate | None:
        """Candidate that needs the least memory among those that are too large."""
        large = [c for c in self.ranked if _is_too_large(c.memory_bytes, self.memory_bytes)]
        return min(large, key=lambda c: c.tie_order, default=None)

    def reason(self) -> str:
        """Return why the best candidate is the best, or why none is usable."""
        best = self.best
        if best is None:
            return self._why_none()
        others = [c for c in self.usable[1:] if c.schedule != best.schedule]
        if not others:
            return f"{best.label}: {self._why_only()}."
        second = min(others, key=lambda c: (c.time, c.tie_order))
        time, longer = best.time or 0.0, second.time or 0.0
        if longer <= time * (1 + SAME):
            return f"{best.label}: same step time as {second.label}, with no more memory."
        ratio = (
            f"{longer / time - 1:.1%} longer" if longer < 2 * time else f"{longer / time:.2f} times as long"
        )
        return f"{best.label}: shortest step. Next schedule: {second.label}, {ratio}."

    def _why_only(self) -> str:
        if any(c.unpriced for c in self.ranked):
            saving = f"{self.margin:.0%} or more" if self.margin else "time"
            return f"shortest step of all schedules evaluated. No other can save {saving}"
        if self.memory_bytes is not None:
            return f"only schedule that fits {format_bytes(self.memory_bytes)}"
        return "only possible schedule"

    def _why_none(self) -> str:
        smallest, limit = self.smallest, self.memory_bytes
        if smallest is None or smallest.memory_bytes is None or limit is None:
            reasons = join_reasons(sorted({c.refusal.removesuffix(".") for c in self.ranked}))
            hidden = len(reasons) - _REASONS_SHOWN
            more = f"; {hidden} more reasons" if hidden > 0 else ""
            return f"no schedule is possible: {'; '.join(reasons[:_REASONS_SHOWN])}{more}."
        recompute = "" if smallest.recompute == "none" else f" with {smallest.recompute} recomputation"
        return (
            f"no schedule fits {format_bytes(limit)}. The smallest, {smallest.label}{recompute}, needs "
            f"{format_bytes(smallest.memory_bytes)}, {format_bytes(smallest.memory_bytes - limit)} too much."
        )


@dataclass(frozen=True)
class Request:
    """Sizes, costs and limits to choose a schedule for.

    Args:
        devices: D, devices of a pipeline group.
        micro_batches: N, micro-batches per pipeline group and step, over all pipes.
        costs: costs of 1/D of the model without recomputation.
        sizes: the model; its ``recompute`` is ignored. None: layers and memory are not considered.
        memory_bytes: memory limit of a device; None: no limit.
        recompute: kinds of recomputation to evaluate.
        cheap_ops: number of ops that a schedule may plan even if its bound rules it out.
        margin: relative saving below which a candidate is not evaluated.
        stage_layers: layers of every stage, in the format of the scripts' flag; None: balanced by work.
        max_stages: number of pipeline layers of the model, one per stage at least; None: unknown.

    Raises:
        ScheduleError: a size is not positive, or there is a memory limit without a model.
    """

    devices: int
    micro_batches: int
    costs: Costs = field(default_factory=Costs)
    sizes: TrainingSizes | None = None
    memory_bytes: int | None = None
    recompute: tuple[str, ...] = RECOMPUTATIONS
    cheap_ops: int = 30_000  # a tenth of a second
    margin: float = 0.0
    stage_layers: str | None = None
    max_stages: int | None = None

    def __post_init__(self) -> None:
        for name in ("devices", "micro_batches", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ScheduleError(f"{name}: must be at least 1 (got {value}).")
        if self.memory_bytes is not None and self.sizes is None:
            raise ScheduleError(
                f"memory limit: needs the sizes of the model (got {format_bytes(self.memory_bytes)}, no sizes)."
            )
        if not set(self.recompute) <= set(RECOMPUTATIONS):
            kinds = ", ".join(self.recompute)
            raise ScheduleError(f"recompute: unknown kind (got {kinds}). Use {', '.join(RECOMPUTATIONS)}.")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of recomputation that differ for this model."""
        if self.sizes is None:
            return RECOMPUTATIONS[:1]
        differ = tuple(k for k in self.recompute if k != "selective" or self.sizes.attention_scores)
        return differ or self.recompute


def choose(request: Request) -> Candidates:
    """Evaluate every registered schedule with its variants and recomputations.

    Variants are priced in the order of their lower bounds, slow ones last. A variant that cannot beat the best one
    is listed with its bound instead: with a margin any variant, otherwise only one that is slow to plan.
    """
    rows, variants = list[Candidate](), list[_Variant]()
    for variant in _variants(request):
        try:
            insort(variants, variant, key=lambda v: v.pricing_order)
        except ScheduleError as error:
            rows.append(variant.candidate(refusal=_first_sentence(error)))
    best: tuple[float, ...] | None = None
    for variant in variants:
        if best is not None and _cannot_win(variant.bound, best, variant.slow_to_plan, request.margin):
            refusal = _bound_refusal(variant.bound, request.margin)
            rows.append(variant.candidate(refusal=refusal, unpriced=not variant.bound[0]))
            continue
        try:
            row = variant.price()
        except ScheduleError as error:
            rows.append(variant.candidate(refusal=_first_sentence(error)))
            continue
        rows.append(row)
        reached = _sort_key(bool(row.refusal), row.time or 0.0, row.memory_bytes or 0)
        best = reached if best is None else min(best, reached)
    limit = request.memory_bytes
    return Candidates(_rank(_refuse_duplicates(rows), limit), limit, request.margin)


def _cannot_win(bound: tuple[float, ...], best: tuple[float, ...], slow: bool, margin: float) -> bool:
    """Return whether a candidate with this lower bound cannot beat the best one (by the margin, if there is one)."""
    if margin and bound[0] == best[0] == 0:
        return bound[1] > best[1] * (1 - margin)
    return (slow or margin > 0) and bound > best


def _sort_key(too_large: bool, time: float, size: float) -> tuple[float, ...]:
    """Return a key that sorts fitting candidates by time, then too large ones by bytes."""
    return (1, size) if too_large else (0, time)


def _bound_refusal(bound: tuple[float, ...], margin: float) -> str:
    """Return why a candidate with this lower bound is not planned."""
    large, least = bound
    if large:
        return f"Not planned: memory of at least {format_bytes(math.ceil(least))}, above the limit."
    problem = f"so it cannot save {margin:.0%}" if margin else "above another"
    return f"Not planned: time of at least {least:.4g}, {problem}."


@dataclass(frozen=True)
class _Variant:
    """Schedule with options and recomputation, before it is evaluated."""

    request: Request
    schedule: Schedule
    options: Mapping[str, Any]
    recompute: str

    @cached_property
    def placement(self) -> Placement:
        """Placement of the stages. Raises ScheduleError if the schedule does not support the sizes."""
        placement = self.schedule.placement(self.request.devices, self.options)
        name, n = self.schedule.name, self.request.micro_batches
        most = self.request.max_stages
        if most is not None and placement.stages > most:
            raise ScheduleError(
                f"{name}: has {placement.stages} stages, more than the {most} pipeline layers of the model."
            )
        if placement.forward_devices:
            raise ScheduleError(
                f"{name}: needs {placement.num_devices} devices for {placement.devices_per_pipe} stages, with separate "
                f"forward devices (got {self.request.devices})."
            )
        if n % placement.replicas:
            raise ScheduleError(
                f"{name}: micro-batches must be a multiple of {placement.replicas} pipes (got {n})."
            )
        if self._ops(placement) > _MOST_OPS:
            raise ScheduleError(f"{name}: more than {_MOST_OPS:,} ops (got {self._ops(placement):,}).")
        return placement

    def _ops(self, placement: Placement) -> int:
        return (len(KINDS) - 1) * placement.stages * self.request.micro_batches

    @cached_property
    def sizes(self) -> TrainingSizes | None:
        """Model with the layers of each stage; None without a model. Raises ScheduleError if they do not fit."""
        sizes = self.request.sizes
        if sizes is None:
            return None
        sizes = replace(sizes, recompute=self.recompute)
        return split_layers(sizes, self.placement, self.schedule.name, self.request.stage_layers)

    @cached_property
    def costs(self) -> Costs:
        """Costs of each stage, with recomputation. Raises ScheduleError if they do not fit the stages."""
        costs = self.request.costs if self.sizes is None else stage_costs(self.request.costs, self.sizes)
        return costs.fit(self.placement)

    @cached_property
    def slow_to_plan(self) -> bool:
        """True for a planned order of many ops; with equal costs and free messages the search ends early."""
        ops, f = self._ops(self.placement) * _ORDERS, self.costs.forward
        ends_early = self.costs == Costs(f, f, f) and self.request.micro_batches % self.request.devices == 0
        ops = ops if ends_early else max(ops, _SEARCHED_OPS)
        return self.schedule.planned and ops > self.request.cheap_ops

    @cached_property
    def bound(self) -> tuple[float, ...]:
        """Lower bound on the sort key of any order."""
        n, need, placement = self.request.micro_batches, 0, self.placement
        if self.sizes is not None:
            one_micro_batch = tuple(
                tuple(Op(kind, 0, stage) for stage in placement.stages_of(d) for kind in (FORWARD, BACKWARD))
                for d in range(placement.num_devices)
            )
            order = Timetable("", placement, n, one_micro_batch)
            # Another order of the stages may need smaller buffers.
            need = max(device.total - device.buffers for device in memory(order, self.sizes))
        # Split backwards shorten the waits, so the bound also holds for whole ones. Jitter may shorten all ops, and
        # sums of the same times differ by rounding.
        least = lower_bound(Workload(placement, n, self.costs, split=True))
        least *= (1 - self.costs.jitter) * (1 - SAME)
        too_large = _is_too_large(need, self.request.memory_bytes)
        return _sort_key(too_large, float(f"{least:.6g}") if self.request.margin else least, need)

    @cached_property
    def pricing_order(self) -> tuple[bool, tuple[float, ...], int]:
        """Key that sorts variants before they are priced. Raises ScheduleError if the sizes are not supported."""
        # Among ties, the fewest stages come first, because a margin may skip all later candidates.
        return self.slow_to_plan, self.bound, self.placement.stages

    def price(self) -> Candidate:
        """Build and simulate the timetable. Raises ScheduleError if the schedule does not support the sizes."""
        request, sizes = self.request, self.sizes
        timetable = self.schedule.timetable(request.devices, request.micro_batches, self.options, self.costs)
        simulation = simulate(timetable, self.costs)
        need, limit = None if sizes is None else _largest_bytes(timetable, sizes), request.memory_bytes
        return self.candidate(
            refusal=f"It needs {format_bytes(need)}." if need and _is_too_large(need, limit) else "",
            time=simulation.makespan,
            bubble=simulation.bubble,
            memory_bytes=need,
            replicas=timetable.placement.replicas,
            activations=max(simulation.peak_activations),
            stages=timetable.placement.stages,
            costs=self.costs,
            timetable=timetable,
            layers=None if sizes is None else sizes.stage_layers,
        )

    def candidate(self, **values: Any) -> Candidate:
        """Return the candidate with these values."""
        values = {"costs": self.request.costs, **values}
        return Candidate(
            self.schedule.name, self.options, self.recompute, planned=self.schedule.planned, **values
        )


def _largest_bytes(timetable: Timetable, sizes: TrainingSizes) -> int:
    """Return the memory of the device that needs the most."""
    return max(device.total for device in memory(timetable, sizes))


def _variants(request: Request) -> Iterator[_Variant]:
    for recompute in request.kinds:
        for _, schedule in sorted(SCHEDULES.items()):
            for options in schedule.variants(request.devices, request.micro_batches):
                yield _Variant(request, schedule, options, recompute)


def _refuse_duplicates(rows: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield the candidates; every one that equals an earlier one in all figures is refused."""
    seen: dict[tuple[object, ...], Candidate] = {}
    for row in rows:
        key = (row.schedule, row.recompute, row.time, row.bubble, row.memory_bytes, row.activations)
        if row.refusal or row.time is None:
            yield row
        elif key in seen:
            yield replace(row, refusal=f"Same as {seen[key].label}.")
        else:
            seen[key] = row
            yield row


def _rank(rows: Iterable[Candidate], limit_bytes: int | None) -> tuple[Candidate, ...]:
    """Return usable candidates by time, then too large ones by bytes, then the others; ties are in ``tie_order``."""
    usable, large, others = [], [], []
    for row in rows:
        refused = large if _is_too_large(row.memory_bytes, limit_bytes) else others
        (refused if row.refusal else usable).append(row)
    return (*_by_time(usable), *sorted(large, key=lambda c: c.tie_order), *others)


def _by_time(usable: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates by time, after the least in ``tie_order`` of those within ``SAME`` of the minimum time."""
    ranked = sorted(usable, key=lambda c: (c.time, c.tie_order))
    times = [c.time or 0.0 for c in ranked]
    num_ties = bisect_right(times, times[0] * (1 + SAME)) if times else 0
    best = min(ranked[:num_ties], key=lambda c: c.tie_order, default=None)
    return sorted(ranked, key=lambda c: c is not best)


def _is_too_large(need_bytes: int | None, limit_bytes: int | None) -> bool:
    return need_bytes is not None and limit_bytes is not None and need_bytes > limit_bytes


def _first_sentence(error: ScheduleError) -> str:
    return str(error).split(". ", 1)[0].removesuffix(".") + "."
