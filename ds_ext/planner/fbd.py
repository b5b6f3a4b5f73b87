"""How to cut two kinds of devices for FBD: those that go backward, and those that only compute forwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ScheduleError
from ..pipe_schedules import get_schedule
from ..pipe_schedules.costs import Costs
from ..pipe_schedules.simulate import simulate
from .candidates import format_bytes
from .memory import ModelSizes, memory
from .parallel_sizes import Cluster, either, forward_flops, message_bytes
from .stage_costs import cut, stage_costs

SCHEDULE = "fbd"
_TRAINED = ("none", "full")  # the kinds of recomputation that the scripts have
MOST_TENSOR_PARALLEL = 8


@dataclass(frozen=True)
class ForwardDevices:
    """Devices besides those of a :class:`...Cluster`, which are to compute forwards only.

    Args:
        count: of them.
        slowdown: time of the same work on one of them and on a device of the cluster.
        memory_bytes: of one.

    Raises:
        ScheduleError: one is not positive.
    """

    count: int
    slowdown: float
    memory_bytes: int

    def __post_init__(self) -> None:
        for name in ("count", "slowdown", "memory_bytes"):
            if not getattr(self, name) > 0:
                words = name.replace("_", " ")
                raise ScheduleError(
                    f"plan: {words} of forward devices must be more than 0; got {getattr(self, name)}."
                )


@dataclass(frozen=True)
class Way:
    """One way to cut both kinds of devices: ``groups`` forward pipelines, each for ``backward_per_forward`` others."""

    tensor: int
    pipeline: int
    groups: int
    backward_per_forward: int
    merged: bool
    micro_batches: int
    recompute: str
    backward: str

    @property
    def options(self) -> dict[str, Any]:
        """Of the schedule."""
        return {
            "backward_per_forward": self.backward_per_forward,
            "merge_forward_tensor_parallel": self.tensor if self.merged else 1,
            "backward": self.backward,
        }

    def __str__(self) -> str:
        one = "merged forward ranks, " if self.merged else ""
        one += "" if self.backward == "whole" else f"{self.backward} backwards, "
        return (
            f"TP {self.tensor} x PP {self.pipeline} x {self.groups * self.backward_per_forward} backward pipelines, "
            f"{self.backward_per_forward} a forward pipeline, {one}recompute {self.recompute}"
        )


@dataclass(frozen=True)
class Priced:
    """A way with its step, the bytes of its worst backward and forward device, and the layers of every stage."""

    way: Way
    step_s: float
    memory_bytes: int
    forward_memory_bytes: int
    layers: tuple[int, ...]

    @property
    def section(self) -> dict[str, Any]:
        """What the ``"ds_ext"`` section says of it."""
        way = self.way
        train: dict[str, Any] = {"recompute_granularity": way.recompute}
        if len(set(self.layers)) > 1:
            train["stage_layers"] = ",".join(map(str, self.layers))
        return {
            "schedule": SCHEDULE,
            "pipeline_parallel_size": way.pipeline,
            "tensor_parallel_size": way.tensor,
            "schedule_options": {} if way.backward == "whole" else {"backward": way.backward},
            "fbd": {
                "backward_per_forward": way.backward_per_forward,
                "merge_forward_tensor_parallel": way.merged,
            },
            "train": train,
        }


def ways_to_cut(cluster: Cluster, forward: ForwardDevices, sizes: ModelSizes) -> Iterator[Way]:
    """Every way that uses all devices of both kinds."""
    assert isinstance(sizes.layers, int), "layers of every stage belong to one number of stages"
    tensors = [cluster.tensor_parallel] if cluster.tensor_parallel else [*range(1, MOST_TENSOR_PARALLEL + 1)]
    for tensor in tensors:
        for pipeline in range(2, min(sizes.layers, cluster.devices // tensor) + 1):
            pipes, rest = divmod(cluster.devices, tensor * pipeline)
            if rest or sizes.heads % tensor or cluster.batch % (pipes * sizes.micro_batch):
                continue
            for forward_tensor in sorted({1, tensor}):
                groups, left = divmod(forward.count, forward_tensor * pipeline)
                if left or not groups or pipes % groups:
                    continue
                n, merged = cluster.batch // (groups * sizes.micro_batch), forward_tensor < tensor
                for recompute in _TRAINED:
                    for backward in ("whole", "split"):
                        k = pipes // groups
                        yield Way(tensor, pipeline, groups, k, merged, n, recompute, backward)


def best_way(
    cluster: Cluster, forward: ForwardDevices, sizes: ModelSizes, ratios: Costs
) -> tuple[Priced | None, str]:
    """The way that takes the least time of those that fit, and why there is none.

    What cannot be it, by the work of one device alone, is not simulated.

    Args:
        cluster: of the backward devices.
        sizes, ratios: as for :func:`.parallel_sizes`.
    """
    ways = list(ways_to_cut(cluster, forward, sizes))
    if not ways:
        return None, (
            f"{forward.count} forward and {cluster.devices} backward devices cannot be cut into forward pipelines that "
            f"serve as many backward pipelines each; {_counts_that_do(cluster, forward, sizes)}"
        )
    best: Priced | None = None
    fitting = []
    for way in ways:
        need, forward_need = memory_of(way, sizes)
        if need <= cluster.memory_bytes and forward_need <= forward.memory_bytes:
            fitting.append((_least_s(way, cluster, forward, sizes, ratios), way, need, forward_need))
    for least_s, way, need, forward_need in sorted(fitting, key=lambda row: row[0]):
        if best is None or least_s < best.step_s:
            step_s = step_seconds(way, cluster, forward, sizes, ratios)
            if best is None or step_s < best.step_s:
                layers = _sizes_of(way, sizes).layers_of(way.pipeline)
                best = Priced(way, step_s, need, forward_need, layers)
    return best, "" if best is not None else _need(cluster, forward, sizes, ways)


def _counts_that_do(cluster: Cluster, forward: ForwardDevices, sizes: ModelSizes) -> str:
    """The numbers of forward devices that could be used: all of them divide the backward devices."""
    divisors = [n for n in range(1, cluster.devices + 1) if cluster.devices % n == 0]
    counts = [n for n in divisors if any(ways_to_cut(cluster, replace(forward, count=n), sizes))]
    if counts:
        return f"use {either(counts)} forward devices"
    return (
        f"nor can any other number: the {cluster.devices} are no pipelines of 2 stages or more that share "
        f"{sizes.heads} heads, {sizes.layers} layers and {cluster.batch} samples evenly"
    )


def _sizes_of(way: Way, sizes: ModelSizes) -> ModelSizes:
    trained = replace(sizes, tensor_parallel=way.tensor, data_parallel=way.groups, recompute=way.recompute)
    return cut(trained, get_schedule(SCHEDULE).placement(way.pipeline, way.options), SCHEDULE)


def memory_of(way: Way, sizes: ModelSizes) -> tuple[int, int]:
    """Bytes of the worst backward and forward device; a backward device keeps as much of one micro-batch as of many."""
    made = get_schedule(SCHEDULE).timetable(way.pipeline, way.backward_per_forward, way.options)
    assert made.placement.forward is not None
    need, forward = memory(made, _sizes_of(way, sizes)), made.placement.forward.devices
    return (
        max(rank.total for device, rank in enumerate(need) if device not in forward),
        max(need[device].total for device in forward),
    )


def _costs(way: Way, sizes: ModelSizes, cluster: Cluster, ratios: Costs) -> tuple[Costs, float]:
    """Of a stage each, in forward times of one P-th of the model, and that time in seconds."""
    forward_s = forward_flops(sizes) / way.pipeline / (way.tensor * cluster.flops)
    message = message_bytes(sizes) / cluster.bandwidth / forward_s
    costs = replace(ratios, f=1.0, b=ratios.b / ratios.f, w=ratios.w / ratios.f, comm=message)
    return stage_costs(costs, _sizes_of(way, sizes)), forward_s


def _least_s(way: Way, cluster: Cluster, forward: ForwardDevices, sizes: ModelSizes, ratios: Costs) -> float:
    """What a device works in a step at least: of the mean backward or forward device."""
    costs, forward_s = _costs(way, sizes, cluster, ratios)
    backward = way.micro_batches // way.backward_per_forward * (costs.f + costs.b + costs.w)
    factor = forward.slowdown * way.options["merge_forward_tensor_parallel"]
    shortest = 1 - 1 / way.pipeline  # the last stage's forwards are nobody's
    return max(backward, shortest * way.micro_batches * costs.f * factor) * forward_s * (1 - costs.jitter)


def step_seconds(
    way: Way, cluster: Cluster, forward: ForwardDevices, sizes: ModelSizes, ratios: Costs
) -> float:
    """Of a step as simulated, and until the forward devices have the new weights, for which the next step waits."""
    costs, forward_s = _costs(way, sizes, cluster, ratios)
    options = {**way.options, "forward_slowdown": forward.slowdown}
    made = get_schedule(SCHEDULE).timetable(way.pipeline, way.micro_batches, options, costs)
    assert made.placement.forward is not None
    need = memory(made, _sizes_of(way, sizes))
    weights = max(need[device].weights for device in made.placement.forward.devices)
    return simulate(made, costs).makespan * forward_s + weights / cluster.bandwidth


def _need(cluster: Cluster, forward: ForwardDevices, sizes: ModelSizes, ways: list[Way]) -> str:
    """Of what is nearest to fitting: what it needs and there is."""

    def over(need: tuple[int, int]) -> float:
        return max(need[0] / cluster.memory_bytes, need[1] / forward.memory_bytes)

    backward, forwards = min((memory_of(way, sizes) for way in ways), key=over)
    return (
        f"it needs at least {format_bytes(backward)} a backward device ({format_bytes(cluster.memory_bytes)}) and "
        f"{format_bytes(forwards)} a forward device ({format_bytes(forward.memory_bytes)})"
    )
