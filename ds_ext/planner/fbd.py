"""Price of devices that only compute forwards (``fbd``), for the verbs ``plan`` and ``compare``.

A backward device works f + b + w for a micro-batch, like a device of a plain pipeline that stores its activations. So
forward devices save no time as such. They pay where plain pipelines would recompute (4 units instead of 3), or where
nothing else fits: a backward device keeps one micro-batch, however deep the pipeline is.
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
from ..pipe_schedules.simulate import Simulation, simulate
from .candidates import format_bytes
from .memory import ModelSizes, memory
from .parallel_sizes import MOST_TENSOR_PARALLEL, TRAINED, Cluster, Cuts, parallel_sizes, unit_costs
from .stage_costs import cut, stage_costs

_FBD, _PLAIN = "fbd", "1f1b"


@dataclass(frozen=True)
class Way:
    """One way to cut backward and forward devices.

    Backwards are split: that takes no longer than whole ones, and no more memory.

    Args:
        sizes: of the model, with the layers of every stage; ``data_parallel`` counts forward pipelines.
        pipeline: PP, the stages.
        each: backward pipelines of a forward pipeline.
        merged: one forward rank does the work of all tensor-parallel ranks.
        micro_batches: of a forward pipeline and step.
    """

    sizes: ModelSizes
    pipeline: int
    each: int
    merged: bool
    micro_batches: int

    def timetable(self, micro_batches: int, slowdown: float = 1.0) -> Timetable:
        """Return the order of a forward pipeline and its backward pipelines."""
        options = {
            "backward": "split",
            "backward_per_forward": self.each,
            "merge_forward_tensor_parallel": self.sizes.tensor_parallel if self.merged else 1,
            "forward_slowdown": slowdown,
        }
        return get_schedule(_FBD).timetable(self.pipeline, micro_batches, options)

    def memory(self) -> tuple[int, int]:
        """Return the bytes of the worst backward and the worst forward device, for any number of micro-batches."""
        made = self.timetable(self.each)
        totals = dict(enumerate(rank.total for rank in memory(made, self.sizes)))
        forward = [totals.pop(device) for device in made.placement.forward_devices]
        return max(totals.values()), max(forward)

    def __str__(self) -> str:
        pipes = self.sizes.data_parallel * self.each
        return (
            f"TP {self.sizes.tensor_parallel} x PP {self.pipeline} x {pipes} backward pipelines, {self.each} a forward "
            f"pipeline, {'merged forward ranks, ' if self.merged else ''}recompute {self.sizes.recompute}"
        )

    @property
    def section(self) -> dict[str, Any]:
        """The ``"ds_ext"`` section of a job that is cut this way."""
        train, layers = {"recompute_granularity": self.sizes.recompute}, self.sizes.layers_of(self.pipeline)
        if len(set(layers)) > 1:
            train["stage_layers"] = ",".join(map(str, layers))
        return {
            "schedule": _FBD,
            "pipeline_parallel_size": self.pipeline,
            "tensor_parallel_size": self.sizes.tensor_parallel,
            "schedule_options": {"backward": "split"},
            "fbd": {"backward_per_forward": self.each, "merge_forward_tensor_parallel": self.merged},
            "train": train,
        }


def ways_to_cut(cluster: Cluster, forward: Cluster, sizes: ModelSizes) -> Iterator[Way]:
    """Yield every way that uses all devices of both kinds."""
    assert isinstance(sizes.layers, int), "layers of every stage belong to one number of stages"
    wanted = cluster.tensor_parallel
    for tensor in [wanted] if wanted else range(1, MOST_TENSOR_PARALLEL + 1):
        for pipeline in range(2, min(sizes.layers, cluster.devices // tensor) + 1):
            pipes, rest = divmod(cluster.devices, tensor * pipeline)
            if rest or sizes.heads % tensor or cluster.batch % (pipes * sizes.micro_batch):
                continue
            for forward_tensor in sorted({1, tensor}):
                groups, rest = divmod(forward.devices, forward_tensor * pipeline)
                if rest or not groups or pipes % groups:
                    continue
                n = cluster.batch // (groups * sizes.micro_batch)
                for recompute in TRAINED:
                    mine = replace(sizes, tensor_parallel=tensor, data_parallel=groups, recompute=recompute)
                    mine = cut(mine, get_schedule(_FBD).placement(pipeline), _FBD)
                    yield Way(mine, pipeline, pipes // groups, forward_tensor < tensor, n)


def step_seconds(way: Way, cluster: Cluster, forward: Cluster, ratios: Costs) -> float:
    """Return the seconds of a step, with the transfer of new weights to the forward devices, which ends it."""
    costs, unit_s = unit_costs(cluster, way.sizes, ratios, way.pipeline)
    made = way.timetable(way.micro_batches, cluster.flops / forward.flops)
    makespan = simulate(made, stage_costs(costs, way.sizes)).makespan
    return makespan * unit_s + way.memory()[1] / cluster.bandwidth  # a forward device keeps weights only


def with_forward_devices(
    cluster: Cluster, forward: Cluster, sizes: ModelSizes, ratios: Costs, alone: Cuts
) -> dict[str, Any]:
    """Compare ``fbd`` on ``cluster`` and ``forward`` with the best plans without roles.

    These are the plan ``alone`` for ``cluster``, and one for all devices, each as slow as the slower kind and with the
    memory of the smaller kind.

    Args:
        forward: the devices that only compute forwards.
        sizes, ratios: as for :func:`.parallel_sizes`.

    Returns:
        "pays", "reason" (the comparison in lines), and what the best way takes: seconds, bytes, "ds_ext" section.
    """
    slowdown = cluster.flops / forward.flops
    speed = "as fast" if slowdown == 1 else f"{slowdown:g} times the time"
    extra = f"with {forward.devices} forward devices besides ({speed}, {format_bytes(forward.memory_bytes)}): {_FBD}"
    every = [(way, *way.memory()) for way in ways_to_cut(cluster, forward, sizes)]
    fitting = [
        w for w, need, forwards in every if need <= cluster.memory_bytes and forwards <= forward.memory_bytes
    ]
    if not every:
        reason = (
            f"they cannot serve {cluster.devices} backward devices evenly. Use a divisor of {cluster.devices}"
        )
        return {"pays": False, "reason": f"{extra} is not possible: {reason}."}
    if not fitting:
        rooms = cluster.memory_bytes, forward.memory_bytes
        need, forwards = min(
            (row[1:] for row in every), key=lambda row: max(row[0] / rooms[0], row[1] / rooms[1])
        )
        reason = (
            f"it needs {format_bytes(need)} a backward device and {format_bytes(forwards)} a forward device"
        )
        return {"pays": False, "reason": f"{extra} is not possible: {reason}."}
    step_s, best = min(
        ((step_seconds(w, cluster, forward, ratios), w) for w in fitting), key=lambda row: row[0]
    )
    need, forwards = best.memory()
    rivals = {f"the {cluster.devices} devices alone": alone.found[0]}
    everything = replace(
        cluster,
        devices=cluster.devices + forward.devices,
        memory_bytes=min(cluster.memory_bytes, forward.memory_bytes),
        flops=min(cluster.flops, forward.flops),
    )
    slow = ", as slow as the slowest" if slowdown > 1 else ""
    with contextlib.suppress(ScheduleError):  # that many devices may not be divisible
        together = parallel_sizes(everything, sizes, ratios).found[0]
        rivals[f"all {everything.devices} without roles{slow}"] = together
    times = [
        (plan.step_s, f"{name}, {plan.step_s:.4g} s ({plan.row.label}, recompute {plan.row.recompute})")
        for name, plan in rivals.items()
        if plan.fits and plan.row is not None and plan.step_s is not None
    ]
    least_s = min((seconds for seconds, _ in times), default=float("inf"))
    than = f"than {'the better of ' * (len(times) > 1)}{' and '.join(text for _, text in times)}"
    sizes_text = f"{format_bytes(need)} a backward and {format_bytes(forwards)} a forward device"
    lines = [f"{extra}, {best}: {step_s:.4g} s, {sizes_text}"]
    if step_s >= least_s:
        lines.append(f"  it does not pay: it takes {step_s / least_s - 1:.1%} longer {than}")
    else:
        gain = f"{1 - step_s / least_s:.1%} less time {than}" if times else "nothing fits without it"
        lines += [f"  it pays: {gain}", f'  to train so: "ds_ext": {json.dumps(best.section)}']
    return {
        "pays": step_s < least_s,
        "reason": "\n".join(lines),
        "step_s": step_s,
        "memory_bytes": need,
        "forward_memory_bytes": forwards,
        "micro_batches": best.micro_batches,
        "ds_ext": best.section,
    }


def comparison_note(simulation: Simulation) -> str | None:
    """Return what forward devices cost against 1F1B, in device time, and when they pay; None for other schedules.

    1F1B has as many pipelines as ``simulation`` has backward pipelines. A merged forward device counts as the part of
    a device that its one rank is.
    """
    made, costs = simulation.timetable, replace(simulation.costs, links={})
    place = made.placement
    if not place.forward_devices or not made.trains:
        return None
    order = timetable(_PLAIN, place.devices_per_pipe, made.micro_batches // place.replicas)
    plain, again = (
        simulate(order, costs),
        simulate(order, replace(costs, backward_input=costs.backward_input + costs.forward)),
    )
    backward, forward = place.replicas * place.devices_per_pipe, place.devices_per_pipe / place.merged
    ours = simulation.makespan * (backward + forward)
    ratio = ours / (plain.makespan * backward) if plain.makespan else 1.0
    again_ratio = ours / (again.makespan * backward) if again.makespan else 1.0
    text = (
        f"{made.schedule} takes {backward + forward:g} devices: {ratio:.2f} times the device time of {_PLAIN} for the "
        f"same micro-batches, {again_ratio:.2f} times that of {_PLAIN} with recomputation."
    )
    if ratio <= 1:
        return text
    share = max((plain.makespan / simulation.makespan - 1) * backward / forward, 0.0)
    worth = f"where a forward device costs less than {share:.2f} of a backward device, or " if share else ""
    kept, plain_kept = max(simulation.peak_activations), max(plain.peak_activations)
    return f"{text} It pays only {worth}where {plain_kept:g} activations do not fit ({made.schedule} keeps {kept:g})."
