"""Step time of ``simulate --hosts`` and ``show --hosts``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigError, ScheduleError
from ..parallel.crossing import traffic_between_hosts
from ..parallel.layout import ParallelLayout, data_parallel_size
from ..parallel.network import Network
from ..parallel.rank_order import RankOrder, parse_rank_order
from ..pipe_schedules import Timetable
from ..pipe_schedules.costs import Costs
from ..pipe_schedules.placement import Placement
from ..pipe_schedules.reductions import eager_reductions
from ..pipe_schedules.simulation import Simulation
from ..planner.stage_costs import split_layers
from ..planner.step_time import NetworkStep, StepTime, on_devices
from ..planner.text import format_bytes
from ..planner.traffic import traffic
from ..planner.training_sizes import TrainingSizes
from .network_flags import describe_network, flops_of, network_of


@dataclass(frozen=True)
class HostStep:
    network: Network
    layout: ParallelLayout
    step: StepTime
    bytes_between: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "step_s": self.step.step_s,
            "makespan_s": self.step.makespan_s,
            "exposed_reduction_s": self.step.reductions_s,
            "gather_s": self.step.gather_s,
            "bytes_between_hosts": self.bytes_between,
            "rank_order": str(self.layout.rank_order),
            "data_parallel_size": self.layout.data_parallel_size,
        }

    def lines(self) -> Iterator[str]:
        hosts, links = describe_network(self.network)
        layout, step = self.layout, self.step
        sizes = f"TP {layout.tensor_parallel_size} x PP {layout.placement.num_devices} x DP {layout.data_parallel_size}"
        yield f"  hosts             {hosts}, {sizes}, ranks numbered {layout.rank_order}"
        yield f"  links             {links}"
        yield f"  step              {step.step_s:.4g} s"
        yield f"    ops             {step.makespan_s:.4g} s  (with messages and tensor-parallel all-reduces)"
        yield f"    reductions      {step.reductions_s:.4g} s  (exposed, after the last op)"
        if step.gather_s:
            yield f"    all-gather      {step.gather_s:.4g} s  (weights, ZeRO stage 1)"
        yield f"  between hosts     {format_bytes(self.bytes_between)} per step"


def step_on_hosts(
    args: argparse.Namespace, simulation: Simulation, model: TrainingSizes | None
) -> HostStep | None:
    """Return the step time on the hosts of the flags; None without ``--hosts``."""
    network = network_of(args)
    if network is None:
        return None
    if model is None:
        raise ScheduleError("--hosts: needs a model (got no model). Add --model gpt-10b.")
    timetable, costs = simulation.timetable, simulation.costs
    _check_supported(timetable, costs)
    placement = timetable.placement
    data = args.data_parallel or _data_parallel_size(network, placement, model.tensor_parallel)
    order = RankOrder() if args.rank_order is None else parse_rank_order(args.rank_order)
    layout = ParallelLayout(placement, model.tensor_parallel, data, order)
    sizes = split_layers(replace(model, data_parallel=data), placement, timetable.schedule)
    devices = placement.devices_per_pipe
    # Seconds of one unit of the costs, in which a forward of 1/devices of the model takes costs.forward.
    device_flops = sizes.micro_batch * sizes.forward_flops / devices
    unit_s = device_flops / (model.tensor_parallel * flops_of(args)) / costs.forward
    volumes = traffic(sizes, placement, timetable.micro_batches)
    network_costs = on_devices(costs, sizes, network, devices, unit_s)
    reductions = eager_reductions(simulation)
    step = NetworkStep(timetable, network_costs, network, volumes, unit_s, reductions).time(layout)
    bytes_between = traffic_between_hosts(layout, network.hosts, volumes, timetable.micro_batches).bytes
    return HostStep(network, layout, step, bytes_between)


def _check_supported(timetable: Timetable, costs: Costs) -> None:
    if costs.comm or costs.links:
        raise ScheduleError(
            f"--costs: the links of --hosts determine the times of messages (got comm={costs.comm:g} and "
            f"{len(costs.links)} links). Remove comm and links."
        )
    if not costs.forward:
        raise ScheduleError("--costs: f must be above 0 with --hosts (got 0).")
    if not timetable.trains:
        raise ScheduleError("--forward-only: not supported with --hosts (got both). Remove one.")
    if timetable.placement.forward_devices:
        raise ScheduleError(
            f"--hosts: schedules with forward devices are not modeled on several hosts (got {timetable.schedule}). "
            "Remove --hosts."
        )


def _data_parallel_size(network: Network, placement: Placement, tensor_parallel: int) -> int:
    """Return the number of pipeline groups for which the hosts have slots."""
    try:
        return data_parallel_size(network.hosts.world_size, placement, tensor_parallel)
    except ConfigError:
        raise ScheduleError(
            f"--hosts: slots must be a multiple of {placement.num_devices} devices x --tensor-parallel "
            f"{tensor_parallel} (got {network.hosts}, {network.hosts.world_size} slots). Use other hosts or sizes."
        ) from None
