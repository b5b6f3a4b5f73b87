"""Evaluation of extra devices for forwards only (``fbd``), for the subcommands ``plan`` and ``compare``.

A backward device spends f + b + w per micro-batch, like a device of a plain pipeline that stores its activations. So
forward devices save no time by themselves. They pay off if plain pipelines would recompute (4 units instead of 3) or
would not fit: a backward device keeps the activations of one micro-batch, regardless of the number of stages.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ScheduleError
from ..pipe_schedules import Timetable, get_schedule, timetable
from ..pipe_schedules.costs import Costs
from ..pipe_schedules.simulation import Simulation, simulate
from .memory import memory
from .parallel_sizes import MOST_TENSOR_PARALLEL, TRAINED, Cluster, ClusterPlan, plan_cluster, unit_costs
from .stage_costs import message_bytes, split_layers, stage_costs
from .step_time import on_devices
from .text import format_bytes
from .traffic import traffic
from .training_sizes import TrainingSizes

_FBD, _PLAIN = "fbd", "1f1b"


@dataclass(frozen=True)
class FbdCandidate:
    """Sizes of an ``fbd`` job with split backwards, which take no more time or memory than whole ones.

    Args:
        sizes: the model with the layers of every stage; ``data_parallel`` is the number of forward pipelines.
        pipeline: PP, number of stages.
        merged: True if one forward rank does the work of all tensor-parallel ranks.
        micro_batches: micro-batches per forward pipeline and step.
    """

    sizes: TrainingSizes
    pipeline: int
    backward_per_forward: int
    merged: bool
    micro_batches: int

    def timetable(self, micro_batches: int, slowdown: float = 1.0) -> Timetable:
        options = {
            "backward": "split",
            "backward_per_forward": self.backward_per_forward,
            "merge_forward_tensor_parallel": self.sizes.tensor_parallel if self.merged else 1,
            "forward_slowdown": slowdown,
        }
        return get_schedule(_FBD).timetable(self.pipeline, micro_batches, options)

    def memory(self) -> tuple[int, int]:
        """Return the largest memory of a backward and of a forward device, in bytes. It does not depend on N."""
        shortest = self.timetable(self.backward_per_forward)
        totals = dict(enumerate(device.total for device in memory(shortest, self.sizes)))
        forward = [totals.pop(device) for device in shortest.placement.forward_devices]
        return max(totals.values()), max(forward)

    def __str__(self) -> str:
        pipes = self.sizes.data_parallel * self.backward_per_forward
        return (
            f"TP {self.sizes.tensor_parallel} x PP {self.pipeline} x {pipes} backward pipelines, "
            f"{self.backward_per_forward} per forward pipeline, {'merged forward ranks, ' if self.merged else ''}"
            f"recompute {self.sizes.recompute}"
        )

    @property
    def section(self) -> dict[str, Any]:
        """The ``"ds_ext"`` section of the job."""
        train = {"recompute_granularity": self.sizes.recompute}
        layers = self.sizes.stage_layer_counts(self.pipeline)
        if len(set(layers)) > 1:
            train["stage_layers"] = ",".join(map(str, layers))
        return {
            "schedule": _FBD,
            "pipeline_parallel_size": self.pipeline,
            "tensor_parallel_size": self.sizes.tensor_parallel,
            "schedule_options": {"backward": "split"},
            "fbd": {
                "backward_per_forward": self.backward_per_forward,
                "merge_forward_tensor_parallel": self.merged,
            },
            "train": train,
        }


def fbd_candidates(cluster: Cluster, forward: Cluster, sizes: TrainingSizes) -> Iterator[FbdCandidate]:
    """Yield the sizes that use all devices of ``cluster`` for backwards and all of ``forward`` for forwards."""
    assert sizes.stage_layers is None, "layers per stage would fix the number of stages"
    sizes = replace(sizes, micro_batch=cluster.micro_batch or 1)
    tensor_sizes = range(1, MOST_TENSOR_PARALLEL + 1)
    if cluster.tensor_parallel is not None:
        tensor_sizes = (cluster.tensor_parallel,)
    for tensor in tensor_sizes:
        for pipeline in range(2, min(sizes.num_layers, cluster.devices // tensor) + 1):
            pipes, idle = divmod(cluster.devices, tensor * pipeline)
            if idle or sizes.num_attention_heads % tensor or cluster.batch % (pipes * sizes.micro_batch):
                continue
            for forward_tensor in sorted({1, tensor}):
                groups, idle = divmod(forward.devices, forward_tensor * pipeline)
                if idle or not groups or pipes % groups:
                    continue
                n = cluster.batch // (groups * sizes.micro_batch)
                for recompute in TRAINED:
                    split = replace(sizes, tensor_parallel=tensor, data_parallel=groups, recompute=recompute)
                    split = split_layers(split, get_schedule(_FBD).placement(pipeline), _FBD)
                    yield FbdCandidate(split, pipeline, pipes // groups, forward_tensor < tensor, n)


def step_seconds(candidate: FbdCandidate, cluster: Cluster, forward: Cluster, ratios: Costs) -> float:
    """Return the step time in seconds, with the transfer of new weights to the forward devices at its end.

    Messages and weights pass between hosts. The reduction of the first stage follows the last op.
    """
    sizes, network = candidate.sizes, cluster.links
    costs, unit_s = unit_costs(cluster, sizes, ratios, candidate.pipeline)
    message_s = network.between.time(message_bytes(sizes))
    costs = on_devices(
        replace(stage_costs(costs, sizes), comm=message_s / unit_s),
        sizes,
        network,
        candidate.pipeline,
        unit_s,
    )
    order = candidate.timetable(candidate.micro_batches, cluster.flops / forward.flops)
    reduced = traffic(sizes, order.placement, candidate.micro_batches).stages[0]
    copies = range(0, cluster.devices, sizes.tensor_parallel * candidate.pipeline)
    return (
        simulate(order, costs).makespan * unit_s
        + network.all_reduce_time(reduced, copies)
        + candidate.memory()[1] / network.between.bandwidth  # forward devices hold weights only
    )


def compare_with_fbd(
    cluster: Cluster, forward: Cluster, sizes: TrainingSizes, ratios: Costs, alone: ClusterPlan
) -> dict[str, Any]:
    """Compare ``fbd`` on ``cluster`` and ``forward`` with the best plans without forward devices.

    These are the plan ``alone`` for ``cluster``, and a plan for all devices, assuming that every device has the speed
    of the slower kind and the memory of the smaller kind.

    Returns:
        A dict with "pays", "reason" (lines of text) and, for the best candidate, seconds, bytes and "ds_ext" section.
    """
    candidates = list(fbd_candidates(cluster, forward, sizes))
    name = f"fbd with {forward.devices} extra forward devices"
    if not candidates:
        reason = f"{name}: not possible for {cluster.devices} backward devices. Use a divisor of {cluster.devices}."
        return {"pays": False, "reason": reason}

    def load(candidate: FbdCandidate) -> float:
        need, forward_need = candidate.memory()
        return max(need / cluster.memory_bytes, forward_need / forward.memory_bytes)

    loads = [load(candidate) for candidate in candidates]
    if min(loads) > 1:
        smallest = candidates[loads.index(min(loads))]
        return {
            "pays": False,
            "reason": f"{name}: does not fit. It needs {_memory_text(*smallest.memory())}.",
        }
    seconds = {
        index: step_seconds(candidates[index], cluster, forward, ratios)
        for index, share in enumerate(loads)
        if share <= 1
    }
    best = min(seconds, key=lambda index: seconds[index])
    title = f"{name} ({cluster.flops / forward.flops:g} times the time, {format_bytes(forward.memory_bytes)})"
    return _comparison(
        title, candidates[best], seconds[best], _rivals(cluster, forward, sizes, ratios, alone)
    )


def _comparison(
    title: str, best: FbdCandidate, step_s: float, rivals: list[tuple[float, str]]
) -> dict[str, Any]:
    need, forward_need = best.memory()
    least_s = min((seconds for seconds, _ in rivals), default=float("inf"))
    if not rivals:
        verdict = "yes: no other plan fits"
    elif step_s < least_s:
        verdict = f"yes, {1 - step_s / least_s:.1%} less time"
    else:
        verdict = f"no, {step_s / least_s - 1:.1%} more time"
    lines = [
        f"{title}: {step_s:.4g} s",
        f"  sizes     {best}",
        f"  memory    {_memory_text(need, forward_need)}",
        *(f"  without   {text}" for _, text in rivals),
        f"  pays      {verdict}",
    ]
    if step_s < least_s:
        lines.append(f'  "ds_ext"  {json.dumps(best.section)}')
    return {
        "pays": step_s < least_s,
        "reason": "\n".join(lines),
        "step_s": step_s,
        "memory_bytes": need,
        "forward_memory_bytes": forward_need,
        "micro_batches": best.micro_batches,
        "ds_ext": best.section,
    }


def _memory_text(need: int, forward_need: int) -> str:
    return f"{format_bytes(need)} per backward device, {format_bytes(forward_need)} per forward device"


def _rivals(
    cluster: Cluster, forward: Cluster, sizes: TrainingSizes, ratios: Costs, alone: ClusterPlan
) -> list[tuple[float, str]]:
    """Return (seconds, text) of the plans without forward devices that fit."""
    plans = {f"{cluster.devices} devices": alone.best}
    all_devices = cluster.resized(
        cluster.devices + forward.devices,
        min(cluster.memory_bytes, forward.memory_bytes),
        min(cluster.flops, forward.flops),
    )
    with contextlib.suppress(ScheduleError):  # this number of devices may not be divisible
        plans[f"{all_devices.devices} devices"] = plan_cluster(all_devices, sizes, ratios).best
    return [
        (
            plan.step_s,
            f"{name}: {plan.step_s:.4g} s ({plan.candidate.label}, recompute {plan.candidate.recompute_text})",
        )
        for name, plan in plans.items()
        if plan.fits and plan.candidate is not None and plan.step_s is not None
    ]


def comparison_note(simulation: Simulation) -> str | None:
    """Return the cost of forward devices relative to 1F1B, and when they pay off; None for other schedules.

    1F1B has as many pipelines as ``simulation`` has backward pipelines. A merged forward device counts as a fraction of
    a device, because it has one rank.
    """
    order, costs = simulation.timetable, replace(simulation.costs, links={})
    placement = order.placement
    if not placement.forward_devices or not order.trains:
        return None
    plain_timetable = timetable(_PLAIN, placement.devices_per_pipe, order.micro_batches // placement.replicas)
    plain = simulate(plain_timetable, costs)
    recomputing = simulate(
        plain_timetable, replace(costs, backward_input=costs.backward_input + costs.forward)
    )
    backward = placement.replicas * placement.devices_per_pipe
    forward = placement.devices_per_pipe / placement.merged

    def ratio_to(rival: Simulation) -> float:
        device_time = rival.makespan * backward
        return simulation.makespan * (backward + forward) / device_time if device_time else 1.0

    text = (
        f"{order.schedule}: {backward + forward:g} devices, {ratio_to(plain):.2f} times the device time of {_PLAIN}, "
        f"{ratio_to(recomputing):.2f} times with recomputation."
    )
    if ratio_to(plain) <= 1:
        return text
    share = max((plain.makespan / simulation.makespan - 1) * backward / forward, 0.0)
    cheap = f"if a forward device costs less than {share:.2f} of a backward device, or " if share else ""
    kept, plain_kept = max(simulation.peak_activations), max(plain.peak_activations)
    return f"{text} It pays only {cheap}if {plain_kept:g} activations do not fit ({order.schedule} keeps {kept:g})."
