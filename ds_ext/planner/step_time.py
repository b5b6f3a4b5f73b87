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

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from ..parallel.crossing import Traffic, messages_between, require_slots
from ..parallel.layout import ParallelLayout
from ..parallel.network import HOST_PORTS, Network
from ..pipe_schedules import Timetable
from ..pipe_schedules.costs import Costs
from ..pipe_schedules.events import Ports
from ..pipe_schedules.gathers import order_of_first_use
from ..pipe_schedules.reductions import Reductions
from ..pipe_schedules.simulation import Collective, Simulation, simulate
from .activations import layer_activations
from .training_sizes import TrainingSizes

_Busy = tuple[tuple[tuple[float, float], ...], ...]  # (start, end) of the collectives of every device
_LEAST_SHARE = 0.005  # of the ops of a micro-batch on a device; shorter messages do not wait for each other


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


def message_links(
    layout: ParallelLayout, network: Network, pairs: Iterable[tuple[int, int]], message: float
) -> list[dict[tuple[int, int], tuple[float, int]]]:
    """Return (sending device, receiving device) -> seconds of a message and users of its port, for pipeline groups.

    The slowest tensor-parallel rank counts. Those of a device send at the same time; the pipeline groups that use a
    port take turns. ``pairs`` are the links between devices; ``message`` is in bytes.
    """
    hosts, tensor = network.hosts, range(layout.tensor_parallel_size)
    links: list[dict[tuple[int, int], tuple[float, int]]] = [{} for _ in range(layout.data_parallel_size)]
    for pair in pairs:
        ranks = [
            [(layout.rank(pair[0], data, t), layout.rank(pair[1], data, t)) for t in tensor]
            for data in range(len(links))
        ]
        senders = [Counter(hosts.host(a) for a, b in group if hosts.cross((a, b))) for group in ranks]
        users = Counter(chain.from_iterable(senders))
        for of_group, group, sending in zip(links, ranks, senders, strict=True):
            seconds = max(
                network.shared(sending[hosts.host(a)]).message_time(message, a, b) for a, b in group
            )
            shares = network.ports == HOST_PORTS and sending
            of_group[pair] = seconds, max(map(users.__getitem__, sending)) if shares else 1
    return links


def step_time(
    timetable: Timetable,
    costs: Costs,
    layout: ParallelLayout,
    network: Network,
    volumes: Traffic,
    unit_s: float,
    reductions: Reductions,
) -> StepTime:
    """Simulate a step on a network; arguments as for :func:`best_step`."""
    return best_step(timetable, costs, [layout], network, volumes, unit_s, reductions)[1]


def best_step(
    timetable: Timetable,
    costs: Costs,
    layouts: Sequence[ParallelLayout],
    network: Network,
    volumes: Traffic,
    unit_s: float,
    reductions: Reductions,
) -> tuple[int, StepTime]:
    """Return the index of the layout with the shortest step on a network, and this step.

    Without shared ports a step is shorter. Only layouts that could be best so are simulated with them.

    Args:
        costs: times of the ops; their message times are replaced.
        layouts: layouts with the timetable's placement, such as one for each rank order; without forward ranks.
        volumes: bytes of messages, of the gradients of every stage, and of weights.
        unit_s: unit of the costs in seconds.
        reductions: op -> stages to reduce after it, by device, from the simulation in the job plan.
    """
    pairs = list(messages_between(timetable.placement, timetable.micro_batches))
    least_s = _LEAST_SHARE * (costs.forward + costs.backward_input + costs.backward_weight) * unit_s
    results: dict[tuple[Any, ...], Simulation] = {}

    def simulated(group: _Group, gathered: Mapping[tuple[int, int], float], busy: _Busy) -> Simulation:
        key = group, tuple(gathered.values()), busy
        if key not in results:
            messages = replace(costs, comm=0.0, links=dict(zip(pairs, group.messages, strict=True)))
            latency = network.between.latency / unit_s
            first = simulate(timetable, messages, gathered, group.ports(latency, busy))
            results[key] = _delayed(first, group.lag(pairs, latency))
        return results[key]

    def step_of(layout: ParallelLayout, groups: Iterable[_Group]) -> StepTime:
        distinct = sorted(set(groups))
        collectives = _Collectives(layout, network, volumes, unit_s, reductions)
        step = collectives.period(distinct, simulated)
        if volumes.overlaps:
            later = collectives.period(distinct, simulated, collectives.gathers(step.simulation))
            step = replace(step, gather_s=max(0.0, later.step_s - step.step_s), drawn=later.drawn)
        return step

    groups_of: list[set[_Group]] = []
    for layout in layouts:
        require_slots(layout, network.hosts)
        groups: set[_Group] = set()
        for data, links in enumerate(
            message_links(layout, network, pairs, volumes.message / timetable.slices)
        ):
            # Of whole micro-batches: a message of a slice takes its share.
            messages = tuple(links[pair][0] * timetable.slices / unit_s for pair in pairs)
            long = {
                pair for pair, (seconds, _) in links.items() if seconds - network.between.latency > least_s
            }
            crossing, port_of = _ports(layout, network, data, long)
            users = tuple(links[pair][1] for pair in crossing)
            groups.add(_Group(messages, crossing, users, port_of))
        groups_of.append(groups)
    if len(layouts) == 1:
        return 0, step_of(layouts[0], groups_of[0])
    bounds = [
        step_of(layout, (group._replace(crossing=(), users=(), port_of=()) for group in groups))
        for layout, groups in zip(layouts, groups_of, strict=True)
    ]

    def key(index: int, step: StepTime) -> tuple[float, int]:
        # Sums of the same times in a different order differ by rounding.
        return float(f"{step.step_s:.7g}"), index

    best: tuple[int, StepTime] | None = None
    for index, bound in sorted(enumerate(bounds), key=lambda pair: key(*pair)):
        if best is not None and key(*best) <= key(index, bound):
            break
        shares = any(group.crossing for group in groups_of[index])
        found = index, step_of(layouts[index], groups_of[index]) if shares else bound
        best = found if best is None else min(best, found, key=lambda pair: key(*pair))
    assert best is not None, "there is a layout"
    return best


class _Group(NamedTuple):
    """Messages of a pipeline group.

    Attributes:
        messages: time on every link, in the unit of the costs.
        crossing: links between hosts with long messages, which share ports.
        users: pipeline groups that use each of these links' ports.
        port_of: port of every device; empty without such links.
    """

    messages: tuple[float, ...]
    crossing: tuple[tuple[int, int], ...]
    users: tuple[int, ...]
    port_of: tuple[int, ...]

    def lag(self, pairs: Sequence[tuple[int, int]], latency: float) -> float:
        """Return by how much the last of the pipeline groups that take turns is behind the first one."""
        messages = dict(zip(pairs, self.messages, strict=True))
        turns = zip(self.crossing, self.users, strict=True)
        return max(((users - 1) * (messages[link] - latency) for link, users in turns), default=0.0)

    def ports(self, latency: float, busy: _Busy) -> Ports | None:
        """Return the ports for the messages; a port receives as its complement."""
        links = {
            (a, b): (latency, (self.port_of[a], ~self.port_of[b]), users)
            for (a, b), users in zip(self.crossing, self.users, strict=True)
        }
        collectives: dict[int, list[tuple[float, float]]] = {}
        for port, spans in zip(self.port_of, busy, strict=False):
            for end in (port, ~port):
                collectives.setdefault(end, []).extend(spans)
        return Ports(links, collectives) if links else None


def _delayed(simulation: Simulation, lag: float) -> Simulation:
    if not lag:
        return simulation
    spans = tuple(tuple((op, start + lag, end + lag) for op, start, end in row) for row in simulation.spans)
    return replace(simulation, spans=spans, makespan=simulation.makespan + lag)


def _ports(
    layout: ParallelLayout, network: Network, data: int, long: Collection[tuple[int, int]]
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """Return the links of a pipeline group between hosts that share ports, and the port of every device.

    A port is the number of the first device that has it.
    """
    ranks = [layout.rank(device, data, 0) for device in range(layout.placement.num_devices)]
    crossing = tuple(sorted((a, b) for a, b in long if network.hosts.cross((ranks[a], ranks[b]))))
    if not crossing:
        return (), ()
    if network.ports != HOST_PORTS:
        return crossing, tuple(range(len(ranks)))
    hosts = [network.hosts.host(rank) for rank in ranks]
    return crossing, tuple(map(hosts.index, hosts))


@dataclass(frozen=True)
class _Collectives:
    """Collectives of the replicas of every device: reductions of gradients, and all-gathers of weights."""

    layout: ParallelLayout
    network: Network
    volumes: Traffic
    unit_s: float
    reductions: Reductions

    def period(
        self,
        groups: Sequence[_Group],
        simulated: Callable[[_Group, Mapping[tuple[int, int], float], _Busy], Simulation],
        gathers: Sequence[_Collective] = (),
    ) -> StepTime:
        """Return a step after steps like it, whose ``gathers`` run beside its first ops.

        Messages are simulated without collectives first, and then beside them.
        """
        gathered = {
            (device, gather.stage): gather.end_s / self.unit_s
            for gather in gathers
            for device in gather.devices
            if gather.stage is not None
        }
        step = self.step([simulated(group, gathered, ()) for group in groups], gathers)
        busy = self._busy(step.drawn) if any(group.crossing for group in groups) else ()
        if any(busy):
            step = self.step([simulated(group, gathered, busy) for group in groups], gathers)
        return step

    def _busy(self, drawn: Simulation) -> _Busy:
        """Return the times at which collectives between hosts use the port of every device."""
        busy: list[tuple[tuple[float, float], ...]] = [()] * len(drawn.collectives)
        for devices in self.layout.placement.replica_groups:
            if self.network.hosts.cross(self._ranks(devices)):
                for device in devices:
                    busy[device] = tuple((c.start, c.end) for c in drawn.collectives[device])
        return tuple(busy)

    def step(self, simulations: Sequence[Simulation], gathers: Sequence[_Collective] = ()) -> StepTime:
        """Return the step of pipeline groups, with the reductions and, unless they overlap, the gathers after it.

        ``gathers`` run since the start of the step; they come from :meth:`gathers`.
        """
        groups = self.layout.placement.replica_groups
        slowest = max(simulations, key=lambda simulation: simulation.makespan)
        makespan_s = slowest.makespan * self.unit_s
        ties = [self._tie(devices, simulations) for devices in groups]
        queues = [
            self._reductions(devices, simulations, makespan_s, tie)
            for devices, tie in zip(groups, ties, strict=True)
        ]
        reduced_s = max(makespan_s, self._run(queues, 0.0))
        last_s = reduced_s
        if self.volumes.zero_stage and not self.volumes.overlaps:
            queues += [[self._gather(None, self.volumes.weights[devices[0]], devices)] for devices in groups]
            last_s = self._run(queues[len(groups) :], reduced_s)
        drawn = replace(slowest, collectives=self._spans([*gathers, *ties, *chain.from_iterable(queues)]))
        return StepTime(slowest, drawn, makespan_s, reduced_s - makespan_s, last_s - reduced_s)

    def gathers(self, simulation: Simulation) -> list[_Collective]:
        """Return the gathers of all stages. Those of a device start with the step, one after the other."""
        groups, volumes = self.layout.placement.replica_groups, self.volumes
        queues = []
        for devices in groups:
            order = order_of_first_use(simulation, devices[0])
            share = volumes.weights[devices[0]] / (sum(volumes.stages[stage] for stage in order) or 1.0)
            queues.append([self._gather(stage, share * volumes.stages[stage], devices) for stage in order])
        self._run(queues, 0.0)
        return [*chain.from_iterable(queues)]

    def _run(self, queues: Sequence[Sequence[_Collective]], start_s: float) -> float:
        """Run the collectives of every group, not before ``start_s``. Return the second at which the last one ends."""
        groups = self.layout.placement.replica_groups
        lanes = [1 if self._needs_processors(devices) else self.network.lanes for devices in groups]
        return _run([*zip(queues, lanes, strict=True)], start_s)

    def _spans(self, collectives: Iterable[_Collective]) -> tuple[tuple[Collective, ...], ...]:
        """Return the collectives of every device in the unit of the costs, without those that take no time."""
        rows: list[list[Collective]] = [[] for _ in range(self.layout.placement.num_devices)]
        for c in collectives:
            if c.end_s > c.begin_s:
                name = c.kind if c.stage is None else f"{c.kind}@{c.stage}"
                span = Collective(name, c.begin_s / self.unit_s, c.end_s / self.unit_s)
                for device in c.devices:
                    rows[device].append(span)
        return tuple(map(tuple, rows))

    def _ranks(self, devices: Sequence[int], tensor_rank: int = 0) -> list[int]:
        """Return the ranks of a collective: all replicas, in all pipeline groups."""
        groups = range(self.layout.data_parallel_size)
        return [self.layout.rank(device, data, tensor_rank) for data in groups for device in devices]

    def _ring_pass(self, devices: Sequence[int], size: float) -> float:
        """Return the seconds of an all-gather or a reduce-scatter, for the slowest tensor-parallel rank.

        The groups of all tensor-parallel ranks run at the same time.
        """
        tensor = self.layout.tensor_parallel_size
        network = self.network.shared(tensor)
        return max(network.all_gather_time(size, self._ranks(devices, t)) for t in range(tensor))

    def _all_reduce(self, devices: Sequence[int], size: float) -> float:
        """Return the seconds of an all-reduce, as :meth:`_ring_pass`."""
        tensor = self.layout.tensor_parallel_size
        network = self.network.shared(tensor)
        return max(network.all_reduce_time(size, self._ranks(devices, t)) for t in range(tensor))

    def _reductions(
        self,
        devices: Sequence[int],
        simulations: Sequence[Simulation],
        makespan_s: float,
        tie: _Collective,
    ) -> list[_Collective]:
        """Return the reductions of replicas in their common order. That of tied weights follows their sum ``tie``.

        On the processors that compute, they do not overlap with ops.
        """
        starts: dict[int, float] = {}  # by stage
        for simulation in simulations:
            for device in devices:
                for op, _, end in simulation.spans[device]:
                    for stage in self.reductions[device].get(op, ()):
                        starts[stage] = max(starts.get(stage, 0.0), end * self.unit_s)
        earliest_s = makespan_s if self._needs_processors(devices) else 0.0
        queue = [
            self._reduction(stage, max(earliest_s, start_s), self.volumes.stages[stage], devices)
            for stage, start_s in starts.items()
        ]
        if ties := len(self._tied_pairs(devices)) // self.layout.placement.replicas:
            start_s = max(earliest_s, tie.end_s)
            queue.append(self._reduction(None, start_s, ties * self.volumes.tied, devices))
        return queue

    def _needs_processors(self, devices: Sequence[int]) -> bool:
        return self.network.needs_processors(self._ranks(devices))

    def _reduction(
        self, stage: int | None, start_s: float, size: float, devices: Sequence[int]
    ) -> _Collective:
        """Return the reduction of ``size`` bytes; stage None: of tied weights."""
        if self.volumes.overlaps and self.network.scatters:
            seconds, passed = self._ring_pass(devices, size), size
        else:
            seconds, passed = self._all_reduce(devices, size), 2 * size
        return self._collective("reduce", stage, start_s, seconds, passed, devices)

    def _gather(self, stage: int | None, size: float, devices: Sequence[int]) -> _Collective:
        """Return the all-gather of ``size`` bytes; stage None: of all stages."""
        return self._collective("gather", stage, 0.0, self._ring_pass(devices, size), size, devices)

    def _collective(
        self,
        kind: str,
        stage: int | None,
        start_s: float,
        seconds: float,
        size: float,
        devices: Sequence[int],
    ) -> _Collective:
        """Return a collective that takes ``seconds`` alone, and passes ``size`` bytes through a ring."""
        what = kind, stage, tuple(devices)
        if self.network.ports != HOST_PORTS:
            return _Collective(*what, start_s, seconds, 0.0, frozenset())
        ranks = self._ranks(devices)
        port_s = self.network.shared(self.layout.tensor_parallel_size).port_time(size, ranks)
        transfer_s = min(seconds, port_s)
        hosts = frozenset(map(self.network.hosts.host, ranks))
        return _Collective(*what, start_s, seconds - transfer_s, transfer_s, hosts)

    def _tied_pairs(self, devices: Sequence[int]) -> list[tuple[int, int]]:
        pairs = self.layout.placement.tied_pairs if self.volumes.tied else ()
        return [pair for pair in pairs if {*pair} & {*devices}]

    def _tie(self, devices: Sequence[int], simulations: Sequence[Simulation]) -> _Collective:
        """Return the sum of the gradients that ``devices`` share with others, after the last op of all of them.

        The device of the first stage sums those of several head parts one after the other.
        """
        layout, seconds = self.layout, defaultdict[int, float](float)
        groups, tensor = range(layout.data_parallel_size), range(layout.tensor_parallel_size)
        held = self._tied_pairs(devices)
        for first in {first for first, _ in held}:
            for pair in self._tied_pairs([first]):
                ranks = ([layout.rank(device, data, t) for device in pair] for data in groups for t in tensor)
                seconds[first] += max(self.network.all_reduce_time(self.volumes.tied, pair) for pair in ranks)
        ends = [
            s.spans[device][-1][2]
            for s in simulations
            for device in chain.from_iterable(held)
            if s.spans[device]
        ]
        begin_s = max(ends, default=0.0) * self.unit_s
        tie = _Collective("tie", None, tuple(devices), begin_s, 0.0, 0.0, frozenset())
        tie.begin_s, tie.end_s = begin_s, begin_s + max(seconds.values(), default=0.0)
        return tie


@dataclass
class _Collective:
    """Collective that waits or runs: first the transfer over the ports, then the latency.

    Attributes:
        kind: ``"reduce"``, ``"gather"`` or ``"tie"``.
        stage: None for tied weights, or a gather of all stages.
        devices: replicas that take part.
        latency_s, transfer_s: remaining time.
        hosts: hosts whose ports it uses; empty: it shares no port.
        begin_s, end_s: its start and its end, as soon as it has ended.
    """

    kind: str
    stage: int | None
    devices: tuple[int, ...]
    start_s: float
    latency_s: float
    transfer_s: float
    hosts: frozenset[int]
    begin_s: float = 0.0
    end_s: float = 0.0

    def slowdown(self, users: Counter[int]) -> int:
        """Return the number of users of its busiest port; ``users`` counts them for every host."""
        return max((users[host] for host in self.hosts), default=1)

    def phase_s(self, users: Counter[int]) -> float:
        """Return the time until the transfer or, after it, the latency ends."""
        return self.transfer_s * self.slowdown(users) if self.transfer_s > 0 else self.latency_s

    def advance(self, passed_s: float, users: Counter[int]) -> None:
        """Subtract the progress in ``passed_s`` seconds, at most :meth:`phase_s`."""
        ends = self.phase_s(users) <= passed_s
        if self.transfer_s > 0:
            self.transfer_s = 0.0 if ends else self.transfer_s - passed_s / self.slowdown(users)
        else:
            self.latency_s = 0.0 if ends else self.latency_s - passed_s


def _run(queues: Sequence[tuple[Sequence[_Collective], int]], now: float) -> float:
    """Run collectives from the second ``now``, and return the second at which the last one ends.

    Collectives share ports equally, as fluids. Those of one process group begin in order. ``queues`` are the
    collectives of every process group, which are modified, and how many run at the same time.
    """
    groups: list[tuple[deque[_Collective], list[_Collective], int]] = [
        (deque(queue), [], lanes) for queue, lanes in queues
    ]
    while any(waiting or running for waiting, running, _ in groups):
        for waiting, running, lanes in groups:
            while waiting and len(running) < lanes and waiting[0].start_s <= now:
                waiting[0].begin_s = now
                running.append(waiting.popleft())
        active = [collective for _, running, _ in groups for collective in running]
        users = Counter(
            host for collective in active if collective.transfer_s > 0 for host in collective.hosts
        )
        starts = [
            waiting[0].start_s - now for waiting, _, _ in groups if waiting and waiting[0].start_s > now
        ]
        passed_s = min([*(collective.phase_s(users) for collective in active), *starts])
        now += passed_s
        for _, running, _ in groups:
            for collective in running:
                collective.advance(passed_s, users)
                collective.end_s = now
            running[:] = [c for c in running if c.transfer_s > 0 or c.latency_s > 0]
    return now
