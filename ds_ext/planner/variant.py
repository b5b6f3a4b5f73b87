"""Price of one schedule with its options for a request: its stages, its order, and lower bounds on both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

from ..errors import ScheduleError
from ..parallel.crossing import rank_orders
from ..parallel.layout import ParallelLayout
from ..parallel.slices import EQUAL
from ..pipe_schedules import SCHEDULES, Op, Placement, Schedule, Timetable
from ..pipe_schedules.costs import Costs
from ..pipe_schedules.events import Workload
from ..pipe_schedules.list_scheduling.search import brief_search, lower_bound
from ..pipe_schedules.ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, KINDS
from ..pipe_schedules.reductions import Reductions, eager_reductions
from ..pipe_schedules.simulation import Simulation, simulate
from .activations import stage_activations
from .candidates import ESTIMATE_ERROR, SAME, Candidate, is_too_large
from .memory import DeviceMemory, memory
from .messages import messages_of
from .request import Request, SortKey, rounded_time, sort_key
from .stage_costs import message_bytes, slice_costs, split_layers, stage_costs
from .step_time import NetworkStep
from .text import format_bytes
from .traffic import traffic
from .training_sizes import TrainingSizes

_ORDERS = 12  # approximate number of orders that a planned schedule simulates
_SEARCHED_OPS = 60_000  # minimum over all orders of a search that does not reach its bound
_ORDERS_KEPT = 64
PREVIEWED = 2  # micro-batches per device of an order that predicts those for many
_GROWTH = (
    1.1  # of the waits in an order for twice as many micro-batches; below it none grow in the steady state
)
_MOST_OPS = 500_000  # maximum per candidate; planning takes about 5 microseconds per op, for up to a million
_BRIEF_EXCESS = 1.2  # memory of an order that is searched briefly, relative to one that is not; rarely more


def all_variants(request: Request, shared: Shared) -> Iterator[Variant]:
    """Yield every schedule with each of its options that the request may use, by name."""
    for name in sorted(SCHEDULES):
        schedule = SCHEDULES[name]
        for options in schedule.variants(request.devices, request.micro_batches):
            # Slices keep so little that limits on activations change nothing.
            if request.slices > 1 and (not schedule.has_slices or "max_activations" in options):
                continue
            # Orders are planned for the smallest micro-batch only: it has the shortest bubble and the least memory.
            if request.plans_orders or not schedule.planned:
                yield Variant(request, schedule, options, shared)


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
        """Return the costs and the layers of every stage, for slices of ``tokens``."""
        placement = self.placement()
        if sizes is not None:
            sizes = split_layers(sizes, placement, self.name, layers)
            costs = slice_costs(stage_costs(costs, sizes, placement.head_parts), sizes, tokens)
        return costs.fit(placement), sizes and sizes.stage_layers


class Shared:
    """Stages and orders that several candidates have in common, such as those of different tensor-parallel sizes.

    ``is_brief``: ``order`` ends its searches after their first guesses.
    """

    def __init__(self, is_brief: bool = False) -> None:
        self.placement, self.stages = cache(_Method.placement), cache(_Method.stages)
        self.searched_order = lru_cache(_ORDERS_KEPT)(_Method.order)
        self.brief_order = lru_cache(_ORDERS_KEPT)(brief_search()(_Method.order))
        self.order = self.brief_order if is_brief else self.searched_order


@dataclass(frozen=True)
class Variant:
    """Schedule with options and recomputation, before it is evaluated."""

    request: Request
    schedule: Schedule
    options: Mapping[str, Any]
    shared: Shared

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
        if self._num_ops(placement) > _MOST_OPS:
            raise ScheduleError(f"{name}: more than {_MOST_OPS:,} ops (got {self._num_ops(placement):,}).")
        return placement

    def _num_ops(self, placement: Placement) -> int:
        ops = (len(KINDS) - 1) * placement.stages + 2 * placement.head_parts
        return ops * self.request.micro_batches * self.request.slices

    @cached_property
    def _stages(self) -> tuple[Costs, tuple[int, ...] | None]:
        request = self.request
        tokens = request.tokens
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
        ops = max(self._num_ops(self.placement) * _ORDERS, 0 if ends_early else _SEARCHED_OPS)
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
        return rounded_time(least) if request.margin else least

    def _layouts(self, sizes: TrainingSizes) -> list[ParallelLayout]:
        layout = ParallelLayout(self.placement, sizes.tensor_parallel, sizes.data_parallel)
        return [replace(layout, rank_order=rank_order) for rank_order in rank_orders(layout)]

    @cached_property
    def least_step(self) -> float:
        """Lower bound on the time of any order, also of its messages."""
        request, network, sizes = self.request, self.request.network, self.sizes
        if network is None or sizes is None:
            return self.least_time
        n, slices, size = request.micro_batches, request.slices, message_bytes(sizes)
        args = (self.placement, n, slices, self.network_costs, network, float(size), request.unit_s)
        messages = messages_of(*args)
        if messages.most_time * request.unit_s <= self.least_time:
            return self.least_time
        least = min(map(messages.least_time, self._layouts(sizes))) * request.unit_s
        return max(self.least_time, rounded_time(least))

    @cached_property
    def bound(self) -> SortKey:
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

    def bound_within(self, time: float) -> SortKey:
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
            return 0.0, self.least_step
        # Orders that take longer may fit, unless even one micro-batch at a time is too large.
        return (1.0, need) if time == math.inf else max(self.bound, (0.0, time * (1 + SAME)))

    @property
    def brief_preview(self) -> SortKey:
        """Sort key from the memory of :meth:`preview`, whose order is only searched for briefly."""
        n, excess = min(self.request.micro_batches, self._previewed), 1.0 if self.bound[0] else _BRIEF_EXCESS
        return self._order_key(self.shared.brief_order, n, excess)[0]

    def previews(self) -> Iterator[SortKey]:
        """Yield sort keys that the orders for a few micro-batches predict, then for more and more.

        In the steady state, more micro-batches need no more memory, and no fewer waits. No key if there are not many
        more of them than in the first order; the last key when waits stop growing.
        """
        n, waits = self._previewed, math.inf
        if 2 * n <= self.request.micro_batches:
            yield self._preview(n, on_network=False)[0]
        while 2 * n <= self.request.micro_batches and self.request.network is not None:
            key, more = self._preview(n, on_network=True)
            yield key
            if more < waits * _GROWTH < math.inf:
                return
            n, waits = 2 * n, more

    def _preview(self, micro_batches: int, on_network: bool) -> tuple[SortKey, float]:
        """Return the sort key that the order for some micro-batches predicts, and its waits for work and messages."""
        if (micro_batches, on_network) not in self._previews:
            key, order = self._order_key(self.shared.order, micro_batches)
            waits = 0.0
            if order is not None and not key[0]:
                costs = self.network_costs if on_network else self.costs
                makespan = self._least_makespan(order) if on_network else order.simulation.makespan
                waits = makespan - lower_bound(self._workload(micro_batches, costs))
                waits = max(0.0, waits * self.request.unit_s * (1 - self.costs.jitter))
                key = 0.0, max(self.least_time + waits, self.least_step)
            self._previews[micro_batches, on_network] = key, waits
        return self._previews[micro_batches, on_network]

    @cached_property
    def _previews(self) -> dict[tuple[int, bool], tuple[SortKey, float]]:
        return {}

    def _least_makespan(self, order: _Order) -> float:
        """Return the makespan on the network for the best rank order."""
        assert self.sizes is not None
        return self._network_step(order, self.sizes, ()).least_makespan(self._layouts(self.sizes))

    def _memory(self, timetable: Timetable, sizes: TrainingSizes) -> tuple[DeviceMemory, ...]:
        return memory(timetable, sizes, self.request.tokens or EQUAL)

    @property
    def _previewed(self) -> int:
        return PREVIEWED * self.request.devices

    def _order_key(
        self, build: Callable[..., _Order], micro_batches: int, excess: float = 1.0
    ) -> tuple[SortKey, _Order | None]:
        """Return the sort key from the memory of an order, divided by ``excess``, and the order."""
        request, sizes = self.request, self.sizes
        if sizes is None:
            return (0.0, 0.0), None
        try:
            order = build(self._method, micro_batches, self.costs, request.slices)
            need = int(max(device.total for device in self._memory(order.timetable, sizes)) / excess)
        except ScheduleError:  # price() has the reason
            return (0.0, 0.0), None
        return sort_key(is_too_large(need, request.memory_bytes), self.least_step, need), order

    def price(self, simulate_large: bool, is_brief: bool = True) -> Candidate:
        """Build and simulate the timetable. One that is too large is simulated only if ``simulate_large``.

        ``is_brief``: its order is that of :class:`Shared`.
        """
        request, sizes = self.request, self.sizes
        build = self.shared.order if is_brief else self.shared.searched_order
        order = build(self._method, request.micro_batches, self.costs, request.slices)
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
            values |= self._on_network(order, sizes)
        return self.candidate(**values)

    def _network_step(self, order: _Order, sizes: TrainingSizes, reductions: Reductions) -> NetworkStep:
        request, timetable = self.request, order.timetable
        assert request.network is not None
        volumes = traffic(sizes, timetable.placement, timetable.micro_batches)
        return NetworkStep(
            timetable, self.network_costs, request.network, volumes, request.unit_s, reductions
        )

    def _on_network(self, order: _Order, sizes: TrainingSizes) -> dict[str, Any]:
        """Return the fields of the candidate that depend on the network, for the best rank order."""
        layouts = self._layouts(sizes)
        best, step = self._network_step(order, sizes, order.reductions).best(layouts)
        return {
            "time": step.step_s,
            "bubble": step.simulation.bubble,
            "rank_order": layouts[best].rank_order,
            "reductions_s": step.reductions_s,
            "gather_s": step.gather_s,
        }

    def candidate(self, **values: Any) -> Candidate:
        values = {"costs": self.request.costs, "slices": self.request.slices, **values}
        schedule, (recompute,) = self.schedule, self.request.recompute
        return Candidate(schedule.name, self.options, recompute, planned=schedule.planned, **values)
