"""Step time on several hosts: the simulated timetable, with reductions of gradients that overlap with it.

Each distinct pipeline group is simulated once. A device starts the reduction of a stage at the op of its eager
reduction (:mod:`..pipe_schedules.reductions`). The collective begins when all ranks of the group have started it and
the process group is free. The engine waits for all reductions before the optimizer step. ZeRO-1 then gathers the
weights, which may overlap with the next step: each stage's first op starts when its weights are there.

Collectives on a shared port share its rate. A message between hosts waits for earlier messages of its ports, and takes
twice as long beside a collective, unless all messages are short. Pipeline groups that send through one port collide
once, with the first message, and then take turns. Not modeled: by how much messages delay collectives, the optimizer's
arithmetic, and collectives of single numbers (loss, norm, overflow).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any

from ..parallel.crossing import Traffic
from ..parallel.layout import ParallelLayout
from ..parallel.network import HOST_PORTS, Network
from ..pipe_schedules import Timetable
from ..pipe_schedules.costs import Costs
from ..pipe_schedules.events import ProcessGroups
from ..pipe_schedules.gathers import order_of_first_use
from ..pipe_schedules.ports import Collective, Ports
from ..pipe_schedules.reductions import Reductions
from ..pipe_schedules.simulation import Simulation, simulate
from .activations import layer_activations
from .messages import Messages, PipelineGroup, messages_of
from .training_sizes import TrainingSizes

_EXACT = 2  # number of bounds of a layout, after which its step is known
_Span = tuple[Collective, float, float]  # its start and end
_Busy = tuple[tuple[tuple[float, float], ...], ...]  # (start, end) of the collectives of every device


@dataclass(frozen=True)
class StepTime:
    """Parts of a step, in seconds.

    Attributes:
        simulation: simulation of the slowest pipeline group, in the unit of its costs.
        drawn: the same with the reductions and gathers of its devices, which delay its first ops if they overlap.
        makespan_s: time until the last op.
        reductions_s: further time until the last reduction: the exposed reduction time.
        gather_s: time of the last all-gather of ZeRO-1; or by how much the gathers delay a step that they overlap.
    """

    simulation: Simulation
    drawn: Simulation
    makespan_s: float
    reductions_s: float
    gather_s: float

    @property
    def step_s(self) -> float:
        return self.makespan_s + self.reductions_s + self.gather_s


def on_devices(
    costs: Costs, sizes: TrainingSizes, network: Network, devices: int, unit_s: float, slices: int = 1
) -> Costs:
    """Return stage costs with the all-reduces of the layers over the tensor-parallel group, and element-wise ops.

    A layer all-reduces its output twice in the forward, and its input's gradient twice in the backward (arXiv
    1909.08053, section 3). They do not overlap with computation. The head counts as layers of the same work. Sequence
    parallelism sends as many bytes (arXiv 2205.05198, section 4.2.2), and in the backward of a layer that is not
    recomputed the two inputs again. The slowest group counts for all devices.

    If the network has a rate of the devices' memory, every byte that a layer keeps is written and read in a forward,
    and in a repeated one. The backward reads it again, and writes and reads its gradient.

    Args:
        costs: costs of every stage, from :func:`.stage_costs.stage_costs`.
        devices: D.
        unit_s: unit of the costs in seconds.
        slices: parts of every micro-batch, each with its all-reduces.
    """
    share = (sizes.num_layers + sizes.head_work()) / devices / unit_s
    repeated = sizes.repeated_share if sizes.recompute == "full" else 0.0
    recomputed = -(-sizes.num_layers // sizes.recompute_interval) / sizes.num_layers
    forward = backward = 0.0
    if sizes.tensor_parallel > 1:
        size = sizes.token_bytes * sizes.tokens * sizes.hidden_size // slices
        forward = 2 * slices * _tensor_all_reduce_s(size, sizes.tensor_parallel, network) * share
        backward = (1 + repeated) * forward
        if sizes.sequence_parallel:  # an all-gather is half an all-reduce
            backward += forward / 2 * (1 - recomputed * (sizes.recompute == "full"))
    if network.memory_bandwidth is not None:
        byte_s = share / network.memory_bandwidth
        kept, less = (layer_activations(sizes, kind).kept for kind in ("none", sizes.recompute))
        forward += 2 * kept * byte_s
        backward += (3 * kept + 2 * (kept - less) * recomputed) * byte_s
    if not forward:
        return costs
    return replace(costs, forward=costs.forward + forward, backward_input=costs.backward_input + backward)


@lru_cache(maxsize=256)  # the planner asks for the same sizes many times
def _tensor_all_reduce_s(size: int, ranks: int, network: Network) -> float:
    return max(network.all_reduce_time(size, group) for group in _tensor_groups(ranks, network))


def _tensor_groups(size: int, network: Network) -> list[range]:
    """Return one tensor-parallel group for each way in which groups are spread over hosts."""
    groups_by_shape: dict[tuple[int, ...], range] = {}
    for first in range(0, network.hosts.world_size, size):
        group = range(first, min(first + size, network.hosts.world_size))
        hosts = [network.hosts.host(rank) for rank in group]
        groups_by_shape.setdefault(tuple(host - hosts[0] for host in hosts), group)
    return list(groups_by_shape.values())


def least_collectives_s(
    network: Network, tensor: int, copies: int, reduced_bytes: float, gathered_bytes: float
) -> float:
    """Return a lower bound on the time of a reduction and of an all-gather over all copies of the weights.

    Args:
        copies: data-parallel ranks x replicas.
        reduced_bytes: gradients that are reduced after the last op.
        gathered_bytes: weights that are gathered; 0 without ZeRO.
    """
    rate, slots = network.inside.bandwidth, max(network.hosts.slots)
    if copies * tensor > slots:
        rings = 1 if network.ports == HOST_PORTS else -(-slots // tensor)
        rate = min(rate, network.between.bandwidth * rings)
    return (2 * reduced_bytes + gathered_bytes) * (copies - 1) / copies / rate


@dataclass(frozen=True)
class NetworkStep:
    """Step of a timetable on a network, for any layout with the timetable's placement, without forward ranks.

    Args:
        costs: times of the ops; their message times are replaced.
        volumes: bytes of messages, of the gradients of every stage, and of weights.
        unit_s: unit of the costs in seconds.
        reductions: op -> stages to reduce after it, by device, from the simulation in the job plan.
    """

    timetable: Timetable
    costs: Costs
    network: Network
    volumes: Traffic
    unit_s: float
    reductions: Reductions
    _simulations: dict[tuple[Any, ...], Simulation] = field(default_factory=dict, init=False)

    def time(self, layout: ParallelLayout) -> StepTime:
        return _LayoutStep(self, layout, self.messages.pipeline_groups(layout)).time()

    @cached_property
    def messages(self) -> Messages:
        timetable, size = self.timetable, self.volumes.message
        n, slices = timetable.micro_batches, timetable.slices
        return messages_of(timetable.placement, n, slices, self.costs, self.network, size, self.unit_s)

    def best(self, layouts: Sequence[ParallelLayout]) -> tuple[int, StepTime]:
        """Return the index of the layout with the shortest step, and this step.

        Bounds become tighter only for the layouts that could be best: the messages of a port, then a step without
        shared ports, then the step.
        """
        if len(layouts) == 1:
            return 0, self.time(layouts[0])
        # Time, index, number of the bound, step; sums of the same times in a different order differ by rounding.
        queue: list[tuple[float, int, int, StepTime | None]] = [
            (self._rounded(self.messages.least_time(layout) * self.unit_s), index, 0, None)
            for index, layout in enumerate(layouts)
        ]
        heapify(queue)
        while True:
            _, index, bound, step = heappop(queue)
            if step is not None and bound == _EXACT:
                return index, step
            groups = self.messages.pipeline_groups(layouts[index])
            if bound == 0 and any(group.shared for group in groups):
                bound, groups = 1, {PipelineGroup(group.messages) for group in groups}
            else:
                bound = _EXACT
            step = _LayoutStep(self, layouts[index], groups).time()
            heappush(queue, (self._rounded(step.step_s), index, bound, step))

    def least_makespan(self, layouts: Sequence[ParallelLayout]) -> float:
        """Return the shortest makespan of the layouts, in the unit of the costs, without collectives."""
        all_groups = (self.messages.pipeline_groups(layout) for layout in layouts)
        return min(max(self.simulate(group, {}, ()).makespan for group in groups) for groups in all_groups)

    @staticmethod
    def _rounded(time: float) -> float:
        return float(f"{time:.7g}")

    def simulate(
        self, group: PipelineGroup, gathered: Mapping[tuple[int, int], float], busy: _Busy
    ) -> Simulation:
        """Return the simulation of the last of the pipeline groups that take turns."""
        key = group, tuple(gathered.values()), busy
        if key not in self._simulations:
            messages = dict(zip(self.messages.links, group.messages, strict=True))
            collectives: dict[int, list[tuple[float, float]]] = {}
            for port, spans in zip(group.port_of, busy, strict=False):
                for end in (port, ~port):
                    collectives.setdefault(end, []).extend(spans)
            ports = Ports(dict(group.shared), collectives) if group.shared else None
            costs = replace(self.costs, comm=0.0, links=messages)
            turns = ((users - 1) * (messages[link] - latency) for link, (latency, _, users) in group.shared)
            lag = max(turns, default=0.0)
            self._simulations[key] = _delayed(simulate(self.timetable, costs, gathered, ports), lag)
        return self._simulations[key]


def _delayed(simulation: Simulation, lag: float) -> Simulation:
    if not lag:
        return simulation
    spans = tuple(tuple((op, start + lag, end + lag) for op, start, end in row) for row in simulation.spans)
    return replace(simulation, spans=spans, makespan=simulation.makespan + lag)


class _ProcessGroup:
    """Replicas of a device in all pipeline groups, and their collectives.

    The groups of all tensor-parallel ranks communicate at the same time; the slowest one counts.

    Attributes:
        tied: pairs of devices, one of them in the group, that sum the gradients of tied weights.
        tied_bytes: size of these gradients.
    """

    def __init__(
        self, devices: Sequence[int], layout: ParallelLayout, network: Network, volumes: Traffic
    ) -> None:
        self.devices, self._layout, self._volumes = tuple(devices), layout, volumes
        self._network = network.shared(layout.tensor_parallel_size)
        self._ranks = self._ranks_of(devices)
        self.crosses_hosts = network.hosts.cross(self._ranks[0])
        # On the processors that compute, collectives do not overlap with ops.
        self.needs_processors = network.needs_processors(self._ranks[0])
        self.lanes = 1 if self.needs_processors else network.lanes
        pairs = layout.placement.tied_pairs if volumes.tied else ()
        self.tied = [pair for pair in pairs if {*pair} & {*devices}]
        self.tied_bytes = len(self.tied) // layout.placement.replicas * volumes.tied
        # The device of the first stage sums the gradients of several head parts one after the other.
        seconds = (
            sum(self._tie_s(network, pair) for pair in pairs if first in pair)
            for first in {first for first, _ in self.tied}
        )
        self.tie = Collective("tie", None, self.devices, max(seconds, default=0.0))

    def _ranks_of(self, devices: Sequence[int]) -> list[list[int]]:
        """Return the ranks of devices in all pipeline groups, by tensor-parallel rank."""
        tensor, groups = range(self._layout.tensor_parallel_size), range(self._layout.data_parallel_size)
        return [[self._layout.rank(device, data, t) for data in groups for device in devices] for t in tensor]

    def _tie_s(self, network: Network, pair: tuple[int, int]) -> float:
        """Return the seconds in which the two ends of a tied weight sum its gradient, in the slowest pipeline group."""
        ends = zip(*(chain.from_iterable(self._ranks_of([device])) for device in pair), strict=True)
        return max(network.all_reduce_time(self._volumes.tied, ranks) for ranks in ends)

    def reduction(self, stage: int | None) -> Collective:
        """Return the reduction of the gradients of a stage; None: of tied weights."""
        size = self.tied_bytes if stage is None else self._volumes.stages[stage]
        if self._volumes.overlaps and self._network.scatters:
            return self._collective("reduce", stage, size, size, self._network.all_gather_time)
        return self._collective("reduce", stage, size, 2 * size, self._network.all_reduce_time)

    def gather(self, stage: int | None, size: float) -> Collective:
        """Return the all-gather of ``size`` bytes of weights; stage None: of all stages."""
        return self._collective("gather", stage, size, size, self._network.all_gather_time)

    def _collective(
        self, kind: str, stage: int | None, size: float, passed: float, time: Callable[[float, Any], float]
    ) -> Collective:
        """Return a collective that passes ``passed`` bytes through a ring."""
        name = kind if stage is None else f"{kind}@{stage}"
        seconds = max(time(size, ranks) for ranks in self._ranks)
        if self._network.ports != HOST_PORTS:
            return Collective(name, stage, self.devices, seconds)
        transfer_s = min(seconds, self._network.port_time(passed, self._ranks[0]))
        hosts = frozenset(map(self._network.hosts.host, self._ranks[0]))
        return Collective(name, stage, self.devices, seconds - transfer_s, transfer_s, hosts)


class _LayoutStep:
    """Step of a layout whose pipeline groups have the messages of ``groups``, with its collectives."""

    def __init__(self, job: NetworkStep, layout: ParallelLayout, groups: Collection[PipelineGroup]) -> None:
        self._job, self._groups = job, sorted(groups)
        self._process_groups = [
            _ProcessGroup(devices, layout, job.network, job.volumes)
            for devices in layout.placement.replica_groups
        ]

    def time(self) -> StepTime:
        step = self._period()
        if not self._job.volumes.overlaps:
            return step
        later = self._period(self._gathers(step.simulation))
        return replace(step, gather_s=max(0.0, later.step_s - step.step_s), drawn=later.drawn)

    def _period(self, gathers: Sequence[_Span] = ()) -> StepTime:
        """Return a step after steps like it, whose ``gathers`` run beside its first ops.

        Messages are simulated without collectives first, and then beside them.
        """
        gathered = {
            (device, gather.stage): end_s / self._job.unit_s
            for gather, _, end_s in gathers
            for device in gather.devices
            if gather.stage is not None
        }
        step = self._after([self._job.simulate(group, gathered, ()) for group in self._groups], gathers)
        busy = self._busy(step.drawn) if any(group.shared for group in self._groups) else ()
        if any(busy):
            step = self._after([self._job.simulate(group, gathered, busy) for group in self._groups], gathers)
        return step

    def _busy(self, drawn: Simulation) -> _Busy:
        """Return the times at which collectives between hosts use the port of every device."""
        crossing = {d for group in self._process_groups if group.crosses_hosts for d in group.devices}
        return tuple(
            tuple((start, end) for _, start, end in row) if device in crossing else ()
            for device, row in enumerate(drawn.collectives)
        )

    def _gathers(self, simulation: Simulation) -> list[_Span]:
        """Return the gathers of all stages. Those of a device start with the step, one after the other."""
        weights, stages, queues = self._job.volumes.weights, self._job.volumes.stages, []
        for group in self._process_groups:
            order = order_of_first_use(simulation, group.devices[0])
            share = weights[group.devices[0]] / (sum(stages[stage] for stage in order) or 1.0)
            queues.append({group.gather(stage, share * stages[stage]): 0.0 for stage in order})
        return self._run(queues)

    def _run(self, queues: Sequence[Mapping[Collective, float]]) -> list[_Span]:
        """Run the collectives of every process group, each not before its time."""
        return ProcessGroups(queues).run([group.lanes for group in self._process_groups])

    def _after(self, simulations: Sequence[Simulation], gathers: Sequence[_Span]) -> StepTime:
        """Return the step with the reductions after the ops and, unless they overlap, the gathers after these.

        ``gathers`` run since the start of the step.
        """
        volumes, groups = self._job.volumes, self._process_groups
        slowest = max(simulations, key=lambda simulation: simulation.makespan)
        makespan_s = slowest.makespan * self._job.unit_s
        ties = [self._tie(group, simulations) for group in groups]
        starts = [self._starts(group, simulations) for group in groups]
        for group, start_s, (_, _, tie_s) in zip(groups, starts, ties, strict=True):
            if group.tied_bytes:
                start_s[group.reduction(None)] = tie_s
            if group.needs_processors:
                start_s |= {reduction: max(makespan_s, time_s) for reduction, time_s in start_s.items()}
        reductions, later = self._run(starts), list[_Span]()
        reduced_s = max([makespan_s, *(end_s for _, _, end_s in reductions)])
        if volumes.zero_stage and not volumes.overlaps:
            gather = (group.gather(None, volumes.weights[group.devices[0]]) for group in groups)
            later = self._run([{collective: reduced_s} for collective in gather])
        last_s = max([reduced_s, *(end_s for _, _, end_s in later)])
        drawn = replace(slowest, collectives=self._rows([*gathers, *ties, *reductions, *later]))
        return StepTime(slowest, drawn, makespan_s, reduced_s - makespan_s, last_s - reduced_s)

    def _tie(self, group: _ProcessGroup, simulations: Sequence[Simulation]) -> _Span:
        """Return the sum of the gradients of tied weights, after the last op of all devices that have them."""
        devices = {*chain.from_iterable(group.tied)}
        ends = [s.spans[device][-1][2] for s in simulations for device in devices if s.spans[device]]
        begin_s = max(ends, default=0.0) * self._job.unit_s
        return group.tie, begin_s, begin_s + group.tie.latency

    def _starts(self, group: _ProcessGroup, simulations: Sequence[Simulation]) -> dict[Collective, float]:
        """Return the second at which all members of a process group start each reduction, in their common order."""
        ends: dict[int, float] = {}  # by stage
        for simulation in simulations:
            for device in group.devices:
                reductions = self._job.reductions[device]
                for op, _, end in simulation.spans[device]:
                    for stage in reductions.get(op, ()):
                        ends[stage] = max(ends.get(stage, 0.0), end)
        return {group.reduction(stage): end * self._job.unit_s for stage, end in ends.items()}

    def _rows(self, collectives: Iterable[_Span]) -> tuple[tuple[_Span, ...], ...]:
        """Return the collectives of every device in the unit of the costs, without those that take no time."""
        unit_s, rows = self._job.unit_s, [list[_Span]() for _ in self._job.timetable.orders]
        for collective, begin_s, end_s in collectives:
            for device in collective.devices if end_s > begin_s else ():
                rows[device].append((collective, begin_s / unit_s, end_s / unit_s))
        return tuple(map(tuple, rows))
