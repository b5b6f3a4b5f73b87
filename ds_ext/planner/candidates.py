"""Ways to run a job that the planner compares, and their ranking."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..parallel.rank_order import RankOrder
from ..pipe_schedules.costs import Costs
from .text import costs_text, format_bytes, format_number, join_reasons
from .training_sizes import TrainingSizes

ESTIMATE_ERROR = 0.06  # by which a job may need more memory than its estimate; docs/plans.md has measurements
SAME = 1e-7  # relative difference up to which times count as equal; stage factors are rounded to 1e-8
_REASONS_SHOWN = 3


@dataclass(frozen=True)
class Candidate:
    """One way to run a job, evaluated or refused.

    Attributes:
        costs: costs of each stage, with recomputation.
        planned: True if the schedule plans its order for the costs.
        refusal: why the candidate cannot be used, in one sentence; "" if it can.
        time: makespan of a step in the unit of the costs; None if not simulated.
        memory_bytes: largest memory of a device; None without a model or a simulation.
        tight: True if the memory exceeds the limit should the estimate be too low by its error.
        replicas: copies of the weights.
        activations: largest peak of live activations on a device, in units of 1/D of the model.
        sizes: the model with the layers of every stage; None without a model or a simulation.
        slice_lengths: tokens of every slice, in a simulation with several and with a model.
        unpriced: True if a lower bound ruled out the candidate: on its time, or on its ``memory_bytes``.
        rank_order: order with the shortest step; None without a network.
        reductions_s, gather_s: parts of the step after the last op, in seconds.
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
    tight: bool = False
    replicas: int = 1
    activations: float = 0.0
    stages: int = 0
    sizes: TrainingSizes | None = field(default=None, compare=False)
    micro_batches: int = 0
    slices: int = 1
    slice_lengths: tuple[int, ...] = ()
    unpriced: bool = False
    rank_order: RankOrder | None = None
    reductions_s: float = 0.0
    gather_s: float = 0.0

    @property
    def label(self) -> str:
        """Name, options and slices, such as ``interleaved chunks=3 in 4 slices``."""
        options = (f"{key}={format_number(v)}" for key, v in self.options.items())
        return " ".join([self.schedule, *options, *([f"in {self.slices} slices"] if self.slices > 1 else [])])

    @property
    def layers(self) -> tuple[int, ...] | None:
        return None if self.sizes is None else self.sizes.stage_layers

    @property
    def recompute_text(self) -> str:
        """Kind of recomputation, with its interval, such as ``full/2``."""
        every = 1 if self.sizes is None else self.sizes.recompute_interval
        return self.recompute if every == 1 else f"{self.recompute}/{every}"

    @property
    def settings(self) -> dict[str, Any]:
        """The "schedule_options" of a job: the options, and the costs for which the order or head parts are planned."""
        if (self.planned or self.costs.head) and self.costs != Costs():
            return {**self.options, "costs": costs_text(self.costs)}
        return dict(self.options)

    @property
    def memory_order(self) -> tuple[float, ...]:
        """Key that sorts by memory: bytes, or, without a model, copies of the weights and then activations."""
        if self.memory_bytes is not None:
            return (self.memory_bytes,)
        return (self.replicas, self.activations)

    @property
    def tie_order(self) -> tuple[object, ...]:
        """Key that sorts candidates of equal time."""
        return (*self.memory_order, self.stages, self.schedule)

    @property
    def complexity(self) -> tuple[object, ...]:
        """Key that sorts candidates of about equal time: first those that keep the headroom free, then the simplest."""
        repeated = self.sizes.repeated_share if self.sizes is not None else 0.0
        stages = self.stages * self.replicas
        return (self.tight, self.slices, repeated, stages, self.micro_batches, self.planned)


@dataclass(frozen=True)
class Candidates:
    """All candidates, ranked: usable ones by time, then those that are too large by bytes, then the rest.

    Attributes:
        memory_bytes: memory limit of a device; None: no limit.
        margin: relative saving below which a candidate was not evaluated.
        least: lower bound on the time of the candidates that are not evaluated; infinite if all are.
        least_bytes: lower bound on the memory of those that are not evaluated because they are too large.
    """

    ranked: tuple[Candidate, ...]
    memory_bytes: int | None = None
    margin: float = 0.0
    least: float = math.inf
    least_bytes: float = math.inf

    @property
    def best(self) -> Candidate | None:
        """Usable candidate with the least time, then the least memory; None if nothing fits or another may win."""
        best = self.ranked[0] if self.ranked and not self.ranked[0].refusal else None
        return None if best and (best.time or 0.0) * (1 - self.margin) > self.least else best

    @property
    def usable(self) -> tuple[Candidate, ...]:
        return tuple(c for c in self.ranked if not c.refusal)

    @property
    def smallest(self) -> Candidate | None:
        large = [c for c in self.ranked if is_too_large(c.memory_bytes, self.memory_bytes)]
        return min(large, key=lambda c: c.tie_order, default=None)

    def reason(self) -> str:
        """Return why the best candidate is the best, or why none is usable."""
        best = self.best
        if best is None and self.least < math.inf:
            return f"not planned: takes at least {self.least:.4g}."
        if best is None:
            return self._why_none()
        others = [c for c in self.usable[1:] if c.schedule != best.schedule]
        if not others:
            return f"{best.label}: {self._why_only()}."
        second = min(others, key=lambda c: (c.time, c.tie_order))
        time, longer = best.time or 0.0, second.time or 0.0
        if longer < time * (1 - SAME):
            return f"{best.label}: simplest within {self.margin:.0%} of the shortest step, that of {second.label}."
        if longer <= time * (1 + SAME):
            return f"{best.label}: same step time as {second.label}, with no more memory."
        ratio = (
            f"{longer / time - 1:.1%} longer" if longer < 2 * time else f"{longer / time:.2f} times as long"
        )
        return f"{best.label}: shortest step. Next schedule: {second.label}, {ratio}."

    def _why_only(self) -> str:
        if any(c.unpriced and c.memory_bytes is None for c in self.ranked):
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
        need = format_bytes(smallest.memory_bytes)
        over = format_bytes(smallest.memory_bytes - limit)
        need = f"at least {need}" if smallest.unpriced else f"{need}, {over} too much"
        return f"no schedule fits {format_bytes(limit)}. The smallest, {smallest.label}{recompute}, needs {need}."


def refuse_duplicates(rows: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield the candidates; every one that equals an earlier one in all figures is refused."""
    seen: dict[tuple[object, ...], Candidate] = {}
    for row in rows:
        parts = row.recompute_text, row.slices
        key = (row.schedule, parts, row.time, row.bubble, row.memory_bytes, row.activations)
        if row.refusal or row.time is None:
            yield row
        elif key in seen:
            yield replace(row, refusal=f"Same as {seen[key].label}.")
        else:
            seen[key] = row
            yield row


def rank_candidates(
    rows: Iterable[Candidate], limit_bytes: int | None, margin: float, shortest: float
) -> tuple[Candidate, ...]:
    """Return usable candidates by time, then too large ones by bytes, then the others; ties are in ``tie_order``.

    The first usable one is the simplest of those within the margin of the time ``shortest``.
    """
    usable, large, others = [], [], []
    for row in rows:
        if not row.refusal:
            usable.append(row)
        elif is_too_large(row.memory_bytes, limit_bytes):
            large.append(row)
        else:
            others.append(row)
    usable.sort(key=lambda c: (c.time, c.tie_order))
    ties = _ties(usable, shortest * (1 + margin))
    best = min(
        ties, key=lambda c: (*c.complexity, c.time, c.tie_order) if margin else c.tie_order, default=None
    )
    usable.sort(key=lambda c: c is not best)
    return (*usable, *sorted(large, key=lambda c: c.tie_order), *others)


def _ties(ranked: Sequence[Candidate], within: float) -> Sequence[Candidate]:
    """Return the candidates with about the least time, or with at most the time ``within``."""
    times = [c.time for c in ranked if c.time is not None]
    return ranked[: bisect_right(times, max(within, times[0] * (1 + SAME)))] if times else ()


def is_too_large(need_bytes: int | None, limit_bytes: int | None) -> bool:
    """Return whether a need exceeds the limit. None: unknown, or no limit."""
    return need_bytes is not None and limit_bytes is not None and need_bytes > limit_bytes
