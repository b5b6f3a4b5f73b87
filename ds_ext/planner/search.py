"""Search for the best schedule: every registered one, evaluated for given devices, costs, model and memory.

The search does not depend on the names of schedules. Each schedule declares which of its options are worth evaluating
(:attr:`~ds_ext.pipe_schedules.registry.Schedule.variants`). Each variant is evaluated with every kind of recomputation:
"full" repeats every forward in the backward, "selective" only the core attention, if it stores its scores (arXiv
2205.05198, section 4). With a model, the cost of a stage is that of its layers and the head (:mod:`.stage_costs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count

from ..errors import ScheduleError
from ..pipe_schedules import SCHEDULES
from .candidates import Candidate, Candidates, rank_candidates, refuse_duplicates
from .request import Request, SortKey, sort_key
from .text import format_bytes
from .variant import Shared, Variant, all_variants

_NEAR = 0.25  # groups that take this much longer than the best one are not evaluated
_NEAR_ORDERS = 0.05  # planned orders that take this much longer than the best one are searched for at length
_NEAR_SLICES = 0.1  # the same for planned orders with slices, by their closed forms
_UNKNOWN = (math.inf, 0.0)  # sort key


def choose(request: Request) -> Candidates:
    """Evaluate every registered schedule with its variants and recomputations.

    Variants are priced in the order of their lower bounds, slow ones last. A variant that cannot beat the best one
    is listed with its bound instead: with a margin any variant, otherwise only one that is slow to plan.
    """
    return choose_each([[request]])[0]


def choose_each(
    groups: Sequence[Sequence[Request]],
    progress: Callable[[int, int], None] = lambda done, total: None,
    most: float = math.inf,
) -> list[Candidates]:
    """Evaluate several groups of requests, such as parallel sizes; the best candidate of each group.

    Groups are evaluated only until the choice and the best two groups are known: the choice is the first group within
    the margin of the shortest time. If nothing fits, only the smallest candidate of every group is simulated.

    Args:
        groups: requests of every group, the simplest group first. Among ties in a group, the first request wins. Only
            those with the N of the last one consider orders that are planned.
        progress: called with the number of groups that are decided, and of all.
        most: candidates with a lower bound above this time are not evaluated.
    """
    search = _Search(groups, most)
    search.run(progress)
    return search.candidates()


def price(request: Request, candidate: Candidate) -> Candidate:
    """Evaluate the schedule, options and recomputation of a candidate for a request."""
    interval = 1 if candidate.sizes is None else candidate.sizes.recompute_interval
    request = request.with_recomputation(candidate.recompute, interval)
    variant = Variant(request, SCHEDULES[candidate.schedule], candidate.options, Shared())
    return variant.price(simulate_large=False)


@dataclass
class _Group:
    """Rows and bounds of a group of requests.

    Attributes:
        least: lower bound on what is excluded.
        best: sort key of the best candidate.
        closed_form: the same of the best one that is not slow to plan, and its request.
        smallest: row and variant of the smallest candidate that is too large.
        searched: rows with orders of a brief search, and their variants.
    """

    margin: float
    rows: list[Candidate] = field(default_factory=list)
    least: SortKey = _UNKNOWN
    best: SortKey | None = None
    closed_form: tuple[SortKey, Request | None] = _UNKNOWN, None
    smallest: tuple[int, Variant] | None = None
    searched: dict[int, Variant] = field(default_factory=dict)

    @property
    def complexity(self) -> tuple[object, ...]:
        """Complexity of the simplest candidate within the margin of the best one."""
        if self.best is None or self.best[0] or not self.margin:
            return ()
        limit = self.best[1] * (1 + self.margin)
        return min(row.complexity for row in self.rows if not row.refusal and (row.time or 0.0) <= limit)

    def add(self, row: Candidate, variant: Variant) -> None:
        """Add a row with a price."""
        if row.refusal and (self.smallest is None or row.tie_order < self.rows[self.smallest[0]].tie_order):
            self.smallest = len(self.rows), variant
        if variant.schedule.planned:
            self.searched[len(self.rows)] = variant
        self.rows.append(row)
        key = _rank(row)
        self.best = min(self.best or key, key)
        if not variant.slow_to_plan and key < self.closed_form[0]:
            self.closed_form = key, variant.request

    def search_at_length(self) -> None:
        """Search at length, as a job does, for the orders that may be the best one, after a brief search for all."""
        assert self.best is not None
        limit = self.best[1] * (1 + _NEAR_ORDERS)
        for index, variant in self.searched.items():
            row = self.rows[index]
            if (variant.least_time if row.refusal else row.time or 0.0) <= limit:
                self.rows[index] = variant.price(simulate_large=False, is_brief=False)
        self.best = min(_rank(row) for row in self.rows if not row.unpriced)


class _Search:
    """Best-first search over requests, then over their variants, by lower bounds on the time."""

    def __init__(self, groups: Sequence[Sequence[Request]], most: float = math.inf) -> None:
        self._request = groups[0][0]
        self._limit = _UNKNOWN if math.isinf(most) else (0.0, most)
        self._groups = [_Group(self._request.margin) for _ in groups]
        self._shared = Shared(is_brief=len(groups) > 1)
        self._counter = count()
        self._queue: list[tuple[bool, SortKey, int, int, _Group, Request | Variant]] = []
        for group, requests in zip(self._groups, groups, strict=True):
            for request in requests:
                plans_orders = request.micro_batches == requests[-1].micro_batches
                for kind in replace(request, plans_orders=plans_orders).kinds():
                    self._push(group, kind, kind.bound)

    def run(self, progress: Callable[[int, int], None]) -> None:
        while self._queue:
            _, bound, _, _, group, item = heappop(self._queue)
            progress(sum(group.best is not None for group in self._groups), len(self._groups))
            if isinstance(item, Request):
                self._expand(group, item, bound)
            else:
                self._evaluate(group, item, bound)
        if self._shared.order is self._shared.brief_order and self._times():
            limit = 0.0, min(self._times()) * (1 + _NEAR)
            for group in self._groups:
                if group.best is not None and group.best <= limit:
                    group.search_at_length()
        if not self._times():
            for group in self._groups:
                if group.smallest is not None:
                    row, variant = group.smallest
                    group.rows[row] = variant.price(simulate_large=True)

    def candidates(self) -> list[Candidates]:
        limit, margin = self._request.memory_bytes, self._request.margin
        shortest = min(self._times(), default=math.inf)
        return [
            Candidates(
                rank_candidates(refuse_duplicates(group.rows), limit, margin, shortest),
                limit,
                margin,
                *(group.least[1] if group.least[0] == large else math.inf for large in (0, 1)),
            )
            for group in self._groups
        ]

    def _push(self, group: _Group, item: Request | Variant, bound: SortKey) -> None:
        slow, stages = (False, 0) if isinstance(item, Request) else (item.slow_to_plan, item.placement.stages)
        # Among ties, the fewest stages come first, because a margin may skip all later candidates.
        heappush(self._queue, (slow or bound[0] > 0, bound, stages, next(self._counter), group, item))

    def _times(self) -> list[float]:
        return [group.best[1] for group in self._groups if group.best is not None and not group.best[0]]

    def _most(self) -> SortKey:
        """Return the largest sort key of a candidate that can be the choice or in the best two groups."""
        if len(self._groups) == 1:
            return self._limit
        smallest, second, *_ = [
            *sorted(g.best for g in self._groups if g.best is not None),
            _UNKNOWN,
            _UNKNOWN,
        ]
        if smallest[0]:
            return min(second, self._limit)
        shortest = smallest[1]
        largest = max(
            (0.0, shortest * (1 + self._request.margin)), min(second, (0.0, shortest * (1 + _NEAR)))
        )
        return min(largest, self._limit)

    def _expand(self, group: _Group, request: Request, bound: SortKey) -> None:
        if bound > self._most():
            group.least = min(group.least, bound)
            return
        for variant in all_variants(request, self._shared):
            try:
                self._push(group, variant, (0.0, variant.least_time))
            except ScheduleError as error:
                group.rows.append(variant.candidate(refusal=_first_sentence(error)))

    def _evaluate(self, group: _Group, variant: Variant, bound: SortKey) -> None:
        margin, slow = variant.request.margin, variant.slow_to_plan
        if slow and variant.request.slices > 1 and not self._refines(group, variant.request):
            return
        simpler = not slow and variant.complexity < group.complexity
        most = self._most()
        tighter = bound
        for tighter in self._tighter(variant, bound, most):
            if tighter > bound:
                break
        excluded = tighter > most
        if tighter > bound and not excluded:
            self._push(group, variant, tighter)
            return
        if excluded:
            group.least = min(group.least, tighter)
        if excluded or (group.best is not None and _cannot_win(tighter, group.best, slow, margin, simpler)):
            need = math.ceil(tighter[1]) if tighter[0] else None
            refusal = _bound_refusal(tighter, margin)
            group.rows.append(variant.candidate(refusal=refusal, unpriced=True, memory_bytes=need))
            return
        try:
            group.add(variant.price(simulate_large=len(self._groups) == 1), variant)
        except ScheduleError as error:
            group.rows.append(variant.candidate(refusal=_first_sentence(error)))

    def _refines(self, group: _Group, request: Request) -> bool:
        """Return whether to plan orders with slices, which takes long: for the kind of a good order of closed form."""
        reached, best = group.closed_form
        times = (time for (large, time), _ in (group.closed_form for group in self._groups) if not large)
        return request is best and reached <= (0.0, min(times, default=0.0) * (1 + _NEAR_SLICES))

    def _tighter(self, variant: Variant, bound: SortKey, most: SortKey) -> Iterator[SortKey]:
        """Yield lower bounds on the sort key that take longer and longer to compute."""
        if bound > most:
            return
        yield variant.bound
        if len(self._groups) > 1:
            if variant.slow_to_plan:
                if not most[0]:
                    yield variant.bound_within(most[1])
                yield variant.brief_preview
            if not (variant.slow_to_plan and bound[0]):
                yield from variant.previews()


def _rank(row: Candidate) -> SortKey:
    return sort_key(bool(row.refusal), row.time or 0.0, row.memory_bytes or 0)


def _cannot_win(bound: SortKey, best: SortKey, slow: bool, margin: float, simpler: bool) -> bool:
    """Return whether a candidate with this lower bound cannot be chosen: it saves too little, and is not simpler."""
    (is_too_large, least), (best_is_too_large, reached) = bound, best
    if not margin:  # all candidates are compared, except those that are slow to plan
        return slow and bound > best
    if is_too_large or best_is_too_large:
        return bound > best
    return least > reached * (1 + margin if simpler else 1 - margin)


def _bound_refusal(bound: SortKey, margin: float) -> str:
    large, least = bound
    if large:
        return f"Not planned: memory of at least {format_bytes(math.ceil(least))}, above the limit."
    problem = f"so it cannot save {margin:.0%}" if margin else "above another"
    return f"Not planned: time of at least {least:.4g}, {problem}."


def _first_sentence(error: ScheduleError) -> str:
    return str(error).split(". ", 1)[0].removesuffix(".") + "."
