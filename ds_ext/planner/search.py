"""Search for the best schedule: every registered one, evaluated for given devices, costs, model and memory.

The search does not depend on the names of schedules. Each schedule declares which of its options are worth evaluating
(:attr:`~ds_ext.pipe_schedules.registry.Schedule.variants`). Each variant is evaluated with every kind of recomputation:
"full" repeats every forward in the backward, "selective" only the core attention, if it stores its scores (arXiv
2205.05198, section 4). With a model, the cost of a stage is that of its layers and the head (:mod:`.stage_costs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from ..errors import ConfigError, ScheduleError
from ..parallel.crossing import rank_orders
from ..parallel.layout import ParallelLayout
from ..parallel.network import Network
from ..parallel.slices import BALANCED, EQUAL
from ..pipe_schedules import SCHEDULES, Op, Placement, Schedule, Timetable
from ..pipe_schedules.costs import Costs
from ..pipe_schedules.events import Workload
from ..pipe_schedules.list_scheduling.search import brief_search, lower_bound
from ..pipe_schedules.ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, KINDS
from ..pipe_schedules.reductions import Reductions, eager_reductions
from ..pipe_schedules.simulation import Simulation, simulate
from .activations import layer_activations, stage_activations
from .candidates import (
    ESTIMATE_ERROR,
    SAME,
    Candidate,
    Candidates,
    is_too_large,
    rank_candidates,
    refuse_duplicates,
)
from .memory import DeviceMemory, memory
from .stage_costs import slice_costs, slice_tokens, split_layers, stage_costs
from .step_time import NetworkStep, least_collectives_s, on_devices
from .text import format_bytes
from .traffic import traffic
from .training_sizes import RECOMPUTATIONS, TrainingSizes

_ORDERS = 12  # approximate number of orders that a planned schedule simulates
_SEARCHED_OPS = 60_000  # minimum over all orders of a search that does not reach its bound
_NEAR = 0.25  # groups that take this much longer than the best one are not evaluated
_NEAR_SLICES = 0.1  # the same for planned orders with slices, by their closed forms
_ORDERS_KEPT = 64
_PREVIEWED = 2  # micro-batches per device of an order that predicts those for many
_MOST_OPS = 500_000  # maximum per candidate; planning takes about 5 microseconds per op, for up to a million
_BRIEF_EXCESS = 1.2  # memory of an order that is searched briefly, relative to one that is not; rarely more
_UNKNOWN = (math.inf, 0.0)  # sort key

_SortKey = tuple[
    float, float
]  # 0 and the time of a candidate that fits, 1 and the bytes of one that is too large


@dataclass(frozen=True)
class Request:
    """Sizes, costs and limits to choose a schedule for.

    Args:
        devices: D, devices of a pipeline group.
        micro_batches: N, micro-batches per pipeline group and step, over all pipes.
        costs: costs of 1/D of the model without recomputation.
        sizes: the model; :meth:`kinds` sets its ``recompute``. None: layers and memory are not considered.
        memory_bytes: memory limit of a device; None: no limit.
        cheap_ops: number of ops that a schedule may plan even if its bound rules it out.
        margin: relative saving below which a candidate is not evaluated.
        stage_layers: layers of every stage, in the format of the scripts' flag; None: balanced by work.
        max_stages: number of pipeline layers of the model, one per stage at least; None: unknown.
        intervals: intervals of full recomputation to evaluate.
        network: hosts for the parallel sizes in ``sizes``. Candidates are simulated with its messages and collectives.
            Their orders are planned for free messages, so that candidates share them.
        unit_s: unit of the costs in seconds. With a network, times of candidates are in seconds.
        unsharded_alone: a single copy of the weights uses no ZeRO.
        slices: with several, only schedules that have slices are evaluated.
        lengths: tokens of every slice.
        head_parts: every device computes a part of the head. Schedules without support are refused.
        plans_orders: schedules that plan their order are evaluated.
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
    intervals: tuple[int, ...] = (1,)
    network: Network | None = None
    unit_s: float = 1.0
    unsharded_alone: bool = False
    slices: int = 1
    lengths: str | tuple[int, ...] = BALANCED
    head_parts: bool = False
    plans_orders: bool = True

    def __post_init__(self) -> None:
        for name in ("devices", "micro_batches", "memory_bytes", "slices"):
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

    def kinds(self) -> Iterator[Request]:
        """Yield a request for every kind and interval of recomputation that differs for this model."""
        sizes, kinds = self.sizes, self.recompute
        if sizes is None:
            kinds = RECOMPUTATIONS[:1]
        elif not sizes.attention_scores:
            kinds = tuple(kind for kind in kinds if kind != "selective") or kinds
        for kind in kinds:
            for interval in self.intervals if kind == "full" else (1,):
                yield self.with_recomputation(kind, interval)

    def with_recomputation(self, kind: str, interval: int) -> Request:
        sizes = self.sizes and replace(self.sizes, recompute=kind, recompute_interval=interval)
        return replace(self, sizes=sizes, recompute=(kind,), intervals=(interval,))

    @property
    def bound(self) -> _SortKey:
        """Lower bound on the sort key of every schedule; the average device counts. 0 without a network."""
        sizes = self.sizes
        if self.network is None or sizes is None:
            return (0.0, 0.0)
        parameters = sizes.num_layers * sizes.layer_parameters
        kept = sizes.bytes.weights + sizes.bytes.gradients
        plain = sizes.num_layers - -(-sizes.num_layers // sizes.recompute_interval)
        activations = plain * layer_activations(sizes, "none").kept
        activations += (sizes.num_layers - plain) * layer_activations(sizes, sizes.recompute).kept
        need = (parameters * kept + activations) / self.devices
        return _sort_key(is_too_large(int(need), self.memory_bytes), self._least_time(sizes), int(need))

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of every slice of a sample; empty for one."""
        sizes = self.sizes
        if self.slices == 1 or sizes is None:
            return ()
        shards = sizes.tensor_parallel if sizes.sequence_parallel else 1
        try:
            return slice_tokens(sizes, self.slices, self.lengths, shards)
        except ConfigError as error:
            raise ScheduleError(str(error)) from None

    def on_network(self, costs: Costs) -> Costs:
        """Return the costs with the tensor-parallel all-reduces of the network."""
        if self.network is None or self.sizes is None:
            return costs
        return on_devices(costs, self.sizes, self.network, self.devices, self.unit_s, self.slices)

    def collectives(self, replicas: int, reduced: float, gathered: float) -> float:
        """Return a lower bound on the time of the collectives after the last op, in the unit of candidates' times.

        ``replicas`` are copies of the weights in a pipeline group. ``reduced`` and ``gathered`` are parameters whose
        gradients are reduced, and whose weights are gathered, after the last op.
        """
        sizes = self.sizes
        if self.network is None or sizes is None:
            return 0.0
        volumes = reduced * sizes.bytes.reduced, gathered * sizes.bytes.weights * sizes.bytes.sharded
        if sizes.overlap_across_steps and sizes.bytes.sharded:
            volumes = volumes[0] / 2, 0.0  # scattered, and beside the next step
        return least_collectives_s(
            self.network, sizes.tensor_parallel, replicas * sizes.data_parallel, *volumes
        )

    def _least_time(self, sizes: TrainingSizes) -> float:
        """Return a lower bound on the time of every schedule: the average work of a device."""
        costs = self.on_network(self.costs)
        repeated = sizes.repeated_share * sizes.num_layers / (sizes.num_layers + sizes.head_work())
        layers = sizes.num_layers / self.devices * sizes.layer_parameters
        work = costs.forward + costs.backward_input + costs.backward_weight + repeated * self.costs.forward
        makespan = self.micro_batches * work * (1 - costs.jitter) * (1 - SAME)
        return _rounded(makespan * self.unit_s + self.collectives(1, 0.0, layers))


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
    variant = _Variant(request, SCHEDULES[candidate.schedule], candidate.options, _Shared())
    return variant.price(simulate_large=False)


@dataclass
class _Group:
    """Rows and bounds of a group of requests.

    Attributes:
        least: lower bound on what is excluded.
        best: sort key of the best candidate.
        closed_form: the same of the best one that is not slow to plan, and its request.
        smallest: row and variant of the smallest candidate that is too large.
    """

    margin: float
    rows: list[Candidate] = field(default_factory=list)
    least: _SortKey = _UNKNOWN
    best: _SortKey | None = None
    closed_form: tuple[_SortKey, Request | None] = _UNKNOWN, None
    smallest: tuple[int, _Variant] | None = None

    @property
    def complexity(self) -> tuple[object, ...]:
        """Complexity of the simplest candidate within the margin of the best one."""
        if self.best is None or self.best[0] or not self.margin:
            return ()
        limit = self.best[1] * (1 + self.margin)
        return min(row.complexity for row in self.rows if not row.refusal and (row.time or 0.0) <= limit)

    def add(self, row: Candidate, variant: _Variant) -> None:
        """Add a row with a price."""
        if row.refusal and (self.smallest is None or row.tie_order < self.rows[self.smallest[0]].tie_order):
            self.smallest = len(self.rows), variant
        self.rows.append(row)
        key = _sort_key(bool(row.refusal), row.time or 0.0, row.memory_bytes or 0)
        self.best = min(self.best or key, key)
        if not variant.slow_to_plan and key < self.closed_form[0]:
            self.closed_form = key, variant.request


class _Search:
    """Best-first search over requests, then over their variants, by lower bounds on the time."""

    def __init__(self, groups: Sequence[Sequence[Request]], most: float = math.inf) -> None:
        self._request = groups[0][0]
        self._limit = _UNKNOWN if math.isinf(most) else (0.0, most)
        self._groups = [_Group(self._request.margin) for _ in groups]
        self._shared = _Shared()
        self._counter = count()
        self._queue: list[tuple[bool, _SortKey, int, int, _Group, Request | _Variant]] = []
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

    def _push(self, group: _Group, item: Request | _Variant, bound: _SortKey) -> None:
        slow, stages = (False, 0) if isinstance(item, Request) else (item.slow_to_plan, item.placement.stages)
        # Among ties, the fewest stages come first, because a margin may skip all later candidates.
        heappush(self._queue, (slow or bound[0] > 0, bound, stages, next(self._counter), group, item))

    def _times(self) -> list[float]:
        return [group.best[1] for group in self._groups if group.best is not None and not group.best[0]]

    def _most(self) -> _SortKey:
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

    def _expand(self, group: _Group, request: Request, bound: _SortKey) -> None:
        if bound > self._most():
            group.least = min(group.least, bound)
            return
        for variant in _variants(request, self._shared):
            try:
                self._push(group, variant, (0.0, variant.least_time))
            except ScheduleError as error:
                group.rows.append(variant.candidate(refusal=_first_sentence(error)))

    def _evaluate(self, group: _Group, variant: _Variant, bound: _SortKey) -> None:
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

    def _tighter(self, variant: _Variant, bound: _SortKey, most: _SortKey) -> Iterator[_SortKey]:
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
                yield variant.preview


def _cannot_win(bound: _SortKey, best: _SortKey, slow: bool, margin: float, simpler: bool) -> bool:
    """Return whether a candidate with this lower bound cannot be chosen: it saves too little, and is not simpler."""
    if margin and bound[0] == best[0] == 0:
        return bound[1] > best[1] * (1 + margin if simpler else 1 - margin)
    return (slow or margin > 0) and bound > best


def _sort_key(too_large: bool, time: float, size: float) -> _SortKey:
    """Return a key that sorts fitting candidates by time, then too large ones by bytes."""
    return (1, size) if too_large else (0, time)


def _rounded(time: float) -> float:
    """Return a time whose ties do not depend on the order of sums."""
    return float(f"{time:.6g}")


def _bound_refusal(bound: _SortKey, margin: float) -> str:
    large, least = bound
    if large:
        return f"Not planned: memory of at least {format_bytes(math.ceil(least))}, above the limit."
    problem = f"so it cannot save {margin:.0%}" if margin else "above another"
    return f"Not planned: time of at least {least:.4g}, {problem}."


def _variants(request: Request, shared: _Shared) -> Iterator[_Variant]:
    for _, schedule in sorted(SCHEDULES.items()):
        for options in schedule.variants(request.devices, request.micro_batches):
            # Slices keep so little that limits on activations change nothing.
            if request.slices > 1 and (not schedule.has_slices or "max_activations" in options):
                continue
            # Orders are planned for the smallest micro-batch only: it has the shortest bubble and needs the least.
            if request.plans_orders or not schedule.planned:
                yield _Variant(request, schedule, options, shared)


@dataclass(frozen=True)
class _Order:
    """Timetable of a candidate, and its simulation with the costs for which it is planned."""

    timetable: Timetable
    costs: Costs

    @cached_property
    def simulation(self) -> Simulation:
        """Step without a network."""
        return simulate(self.timetable, self.costs)

    @cached_property
    def reductions(self) -> Reductions:
        """Stages to reduce after every op, as in the job plan."""
        return eager_reductions(self.simulation)


class _Method(NamedTuple):
    """Schedule with options for a number of devices."""

    name: str
    options: tuple[tuple[str, Any], ...]
    devices: int
    divides_head: bool

    @property
    def schedule(self) -> Schedule:
        return SCHEDULES[self.name].dividing_head(self.divides_head)

    def placement(self) -> Placement:
        return self.schedule.placement(self.devices, dict(self.options))

    def order(self, micro_batches: int, costs: Costs, slices: int) -> _Order:
        options = dict(self.options)
        return _Order(self.schedule.timetable(self.devices, micro_batches, options, costs, slices), costs)

    def stages(
        self, costs: Costs, sizes: TrainingSizes | None, layers: str | None, tokens: tuple[int, ...]
    ) -> tuple[Costs, tuple[int, ...] | None]:
        """Return the costs and the layers of every stage. Slices of other ``tokens`` than balanced ones have costs."""
        placement = self.placement()
        if sizes is not None:
            sizes = split_layers(sizes, placement, self.name, layers)
            costs = slice_costs(stage_costs(costs, sizes, placement.head_parts), sizes, tokens)
        return costs.fit(placement), sizes and sizes.stage_layers


class _Shared:
    """Stages and orders that several candidates have in common, such as those of different tensor-parallel sizes."""

    def __init__(self) -> None:
        self.placement, self.stages = cache(_Method.placement), cache(_Method.stages)
        self.order = lru_cache(_ORDERS_KEPT)(_Method.order)
        self.brief_order = lru_cache(_ORDERS_KEPT)(brief_search()(_Method.order))


@dataclass(frozen=True)
class _Variant:
    """Schedule with options and recomputation, before it is evaluated."""

    request: Request
    schedule: Schedule
    options: Mapping[str, Any]
    shared: _Shared

    @cached_property
    def _method(self) -> _Method:
        options = tuple(self.options.items())
        return _Method(self.schedule.name, options, self.request.devices, self.request.head_parts)

    @cached_property
    def placement(self) -> Placement:
        request, placement = self.request, self.shared.placement(self._method)
        name, n, most = self.schedule.name, request.micro_batches, request.max_stages
        if most is not None and placement.stages > most:
            raise ScheduleError(
                f"{name}: has {placement.stages} stages, more than the {most} pipeline layers of the model."
            )
        if request.network is not None and request.devices == 1 < placement.stages:
            raise ScheduleError(f"{name}: has {placement.stages} stages, more than one for one device.")
        if placement.forward_devices:
            raise ScheduleError(
                f"{name}: needs {placement.num_devices} devices for {placement.devices_per_pipe} stages, with separate "
                f"forward devices (got {request.devices})."
            )
        if n % placement.replicas:
            raise ScheduleError(
                f"{name}: micro-batches must be a multiple of {placement.replicas} pipes (got {n})."
            )
        if self._ops(placement) > _MOST_OPS:
            raise ScheduleError(f"{name}: more than {_MOST_OPS:,} ops (got {self._ops(placement):,}).")
        return placement

    def _ops(self, placement: Placement) -> int:
        ops = (len(KINDS) - 1) * placement.stages + 2 * placement.head_parts
        return ops * self.request.micro_batches * self.request.slices

    @cached_property
    def _stages(self) -> tuple[Costs, tuple[int, ...] | None]:
        request = self.request
        tokens = () if request.lengths == BALANCED else request.tokens
        whole = {"tensor_parallel": 1, "data_parallel": 1, "micro_batch": 1, "sequence_parallel": False}
        sizes = request.sizes and replace(request.sizes, **whole)
        return self.shared.stages(self._method, request.costs, sizes, request.stage_layers, tokens)

    @cached_property
    def sizes(self) -> TrainingSizes | None:
        """Model with the layers of each stage; None without a model."""
        sizes = self.request.sizes and replace(self.request.sizes, stage_layers=self._stages[1])
        if sizes and self.request.unsharded_alone and sizes.data_parallel * self.placement.replicas == 1:
            return replace(sizes, zero_stage=0)
        return sizes

    @property
    def complexity(self) -> tuple[object, ...]:
        placement = self.placement
        return self.candidate(
            replicas=placement.replicas,
            stages=placement.stages,
            sizes=self.request.sizes,
            micro_batches=self.request.micro_batches,
        ).complexity

    @property
    def costs(self) -> Costs:
        return self._stages[0]

    @cached_property
    def slow_to_plan(self) -> bool:
        """True for a planned order of many ops; with equal costs and free messages the search ends early."""
        request, f = self.request, self.costs.forward
        is_even = request.micro_batches % request.devices == 0 and request.slices == 1
        ends_early = is_even and replace(self.costs, head=0.0) == Costs(f, f, f)
        ops = max(self._ops(self.placement) * _ORDERS, 0 if ends_early else _SEARCHED_OPS)
        return self.schedule.planned and ops > request.cheap_ops

    @cached_property
    def network_costs(self) -> Costs:
        return self.request.on_network(self.costs)

    def _workload(self, micro_batches: int, costs: Costs) -> Workload:
        return Workload(self.placement, micro_batches, costs, split=True, slices=self.request.slices)

    @cached_property
    def least_time(self) -> float:
        """Lower bound on the time of any order."""
        request, placement = self.request, self.placement
        # Split backwards shorten the waits, so the bound also holds for whole ones. Jitter may shorten all ops, and
        # sums of the same times differ by rounding.
        least = lower_bound(self._workload(request.micro_batches, self.network_costs))
        least *= request.unit_s * (1 - self.costs.jitter) * (1 - SAME)
        if request.network is not None and self.sizes is not None:
            parameters = self.sizes.stage_parameters(placement)
            average = sum(parameters) / placement.num_devices
            least += request.collectives(placement.replicas, min(parameters), average)
        return _rounded(least) if request.margin else least

    @cached_property
    def bound(self) -> _SortKey:
        """Lower bound on the sort key of any order."""
        return self.bound_within(math.inf)

    @cached_property
    def _one_micro_batch(self) -> tuple[DeviceMemory, ...]:
        """Memory of every device for one micro-batch at a time, at least; empty without a model."""
        placement, sizes, slices = self.placement, self.sizes, self.request.slices
        if sizes is None:
            return ()

        def devices(*backwards: str) -> tuple[DeviceMemory, ...]:
            passes = [(FORWARD, j) for j in range(slices)]
            passes += [(kind, j) for j in reversed(range(slices)) for kind in backwards]
            orders = tuple(
                tuple(Op(kind, 0, stage, j) for stage in placement.stages_of(d) for kind, j in passes)
                for d in range(placement.num_devices)
            )
            return self._memory(Timetable("", placement, self.request.micro_batches, orders, slices), sizes)

        whole, split = devices(BACKWARD), devices(BACKWARD_INPUT, BACKWARD_WEIGHT)
        return tuple(
            min(parts, key=lambda device: device.activations) for parts in zip(whole, split, strict=True)
        )

    def bound_within(self, time: float) -> _SortKey:
        """Return a lower bound on the sort key of the orders that take at most ``time``.

        The average of the live activations is the sum of their lifetimes, divided by the time (Little's law). Those of
        slices are short.
        """
        placement, request = self.placement, self.request
        workload = self._workload(request.micro_batches, self.network_costs)
        kind, needs, sizes = workload.gradient_kind, [0], self.sizes
        averages = sizes is not None and time < math.inf and request.slices == 1
        kept = stage_activations(sizes, placement) if sizes and averages else ()
        for device, parts in enumerate(self._one_micro_batch):
            average = 0.0
            if kept:
                for stage, pipe in placement.chunks[device]:
                    if stage >= placement.stages:  # parts of the head keep little
                        continue
                    starts = workload.earliest_starts[pipe]
                    life = starts[kind][stage] + workload.times[kind][stage] - starts[FORWARD][stage]
                    average += kept[stage].kept * life * request.micro_batches / placement.replicas
                average *= request.unit_s * (1 - self.costs.jitter) / (1 + self.costs.jitter) / time
            # Another order of the stages may need smaller buffers.
            needs.append(parts.total - parts.buffers + max(0, int(average) - parts.activations))
        need = max(needs)
        if not is_too_large(need, request.memory_bytes):
            return 0.0, self.least_time
        # Orders that take longer may fit, unless even one micro-batch at a time is too large.
        return (1.0, need) if time == math.inf else max(self.bound, (0.0, time * (1 + SAME)))

    @property
    def brief_preview(self) -> _SortKey:
        """Sort key from the memory of :meth:`preview`, whose order is only searched for briefly."""
        n, excess = min(self.request.micro_batches, self._previewed), 1.0 if self.bound[0] else _BRIEF_EXCESS
        return self._order_key(self.shared.brief_order, n, excess)[0]

    @cached_property
    def preview(self) -> _SortKey:
        """Sort key that the order for a few micro-batches predicts; (0, 0) if there are not many more of them.

        In the steady state, more micro-batches need no more memory, and no fewer waits than fill and drain.
        """
        if self.request.micro_batches < 2 * self._previewed:
            return 0.0, 0.0
        key, order = self._order_key(self.shared.order, self._previewed)
        if order is None or key[0]:
            return key
        least = lower_bound(self._workload(order.timetable.micro_batches, self.costs))
        waits = (order.simulation.makespan - least) * self.request.unit_s * (1 - self.costs.jitter)
        return 0.0, self.least_time + max(waits, 0.0)

    def _memory(self, timetable: Timetable, sizes: TrainingSizes) -> tuple[DeviceMemory, ...]:
        return memory(timetable, sizes, self.request.tokens or EQUAL)

    @property
    def _previewed(self) -> int:
        return _PREVIEWED * self.request.devices

    def _order_key(
        self, build: Callable[..., _Order], micro_batches: int, excess: float = 1.0
    ) -> tuple[_SortKey, _Order | None]:
        """Return the sort key from the memory of an order, divided by ``excess``, and the order."""
        request, sizes = self.request, self.sizes
        if sizes is None:
            return (0.0, 0.0), None
        try:
            order = build(self._method, micro_batches, self.costs, request.slices)
            need = int(max(device.total for device in self._memory(order.timetable, sizes)) / excess)
        except ScheduleError:  # price() has the reason
            return (0.0, 0.0), None
        return _sort_key(is_too_large(need, request.memory_bytes), self.least_time, need), order

    def price(self, simulate_large: bool) -> Candidate:
        """Build and simulate the timetable. One that is too large is simulated only if ``simulate_large``."""
        request, sizes = self.request, self.sizes
        order = self.shared.order(self._method, request.micro_batches, self.costs, request.slices)
        timetable = order.timetable
        need = None if sizes is None else max(device.total for device in self._memory(timetable, sizes))
        too_large = is_too_large(need, request.memory_bytes)
        worst = None if need is None else int(need * (1 + ESTIMATE_ERROR))
        values: dict[str, Any] = {
            "refusal": f"It needs {format_bytes(need)}." if need and too_large else "",
            "memory_bytes": need,
            "tight": is_too_large(worst, request.memory_bytes),
            "replicas": timetable.placement.replicas,
            "stages": timetable.placement.stages,
            "costs": self.costs,
            "sizes": sizes,
            "micro_batches": request.micro_batches,
            "slice_lengths": request.tokens,
        }
        if too_large and not simulate_large:
            return self.candidate(**values)
        values["activations"] = max(order.simulation.peak_activations)
        if request.network is None or sizes is None:
            values |= {"time": order.simulation.makespan, "bubble": order.simulation.bubble}
        else:
            values |= self._network_step(order, request.network, sizes)
        return self.candidate(**values)

    def _network_step(self, order: _Order, network: Network, sizes: TrainingSizes) -> dict[str, Any]:
        """Return the fields of the candidate that depend on the network, for the best rank order."""
        timetable, unit_s = order.timetable, self.request.unit_s
        layout = ParallelLayout(timetable.placement, sizes.tensor_parallel, sizes.data_parallel)
        volumes = traffic(sizes, timetable.placement, timetable.micro_batches)
        orders = rank_orders(layout)
        layouts = [replace(layout, rank_order=rank_order) for rank_order in orders]
        job = NetworkStep(timetable, self.network_costs, network, volumes, unit_s, order.reductions)
        best, step = job.best(layouts)
        return {
            "time": step.step_s,
            "bubble": step.simulation.bubble,
            "rank_order": orders[best],
            "reductions_s": step.reductions_s,
            "gather_s": step.gather_s,
        }

    def candidate(self, **values: Any) -> Candidate:
        values = {"costs": self.request.costs, "slices": self.request.slices, **values}
        schedule, (recompute,) = self.schedule, self.request.recompute
        return Candidate(schedule.name, self.options, recompute, planned=schedule.planned, **values)


def _first_sentence(error: ScheduleError) -> str:
    return str(error).split(". ", 1)[0].removesuffix(".") + "."
