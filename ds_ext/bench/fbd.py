"""``bench fbd``: steps with forwards on ranks of their own, with emulated compute, beside their simulated times.

Every case has its own number of ranks. Layers wait as long as they would compute (:mod:`.emulated`), so a host with
fewer cores than ranks measures the engine and not itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..errors import ConfigError
from ..pipe_schedules import Timetable, get_schedule
from ..pipe_schedules.costs import Costs
from ..pipe_schedules.simulate import simulate
from .awake import processors_awake
from .ranks import Job, take_turns
from .report import describe_machine, machine

SUMMARY = "steps of FBD against their simulated time, with emulated compute"
_WAIT_S = 60.0
_START_IN_S = 0.005  # what a rank needs to wake up and to look at the clock


@dataclass(frozen=True)
class Case:
    """Sizes of a job; ``groups`` pipeline groups are one."""

    stages: int
    micro_batches: int
    tensor_parallel: int
    options: Mapping[str, Any]

    @property
    def timetable(self) -> Timetable:
        """What it runs."""
        return get_schedule("fbd").timetable(self.stages, self.micro_batches, self.options)

    @property
    def ranks(self) -> int:
        """Processes that it takes."""
        place = self.timetable.placement
        forward = self.tensor_parallel // place.merged
        return self.stages * (forward + place.replicas * self.tensor_parallel)


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "plain": Case(4, 8, 1, {}),
        "plain_48": Case(4, 48, 1, {}),
        "slow_forward_48": Case(4, 48, 1, {"forward_slowdown": 3.0}),
        "merged": Case(2, 8, 2, {"merge_forward_tensor_parallel": 2}),
        "three": Case(2, 12, 1, {"backward_per_forward": 3}),
        "three_48": Case(2, 48, 1, {"backward_per_forward": 3}),
        "split": Case(4, 8, 1, {"backward": "split"}),
    }
)
SLOW, SLOW_BASE = "slow_forward_48", "plain_48"  # the same on forward devices as fast as the others


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    parser.add_argument("--cases", default=",".join(CASES), metavar="A,B", help="%(default)s")
    parser.add_argument(
        "--forward-ms",
        type=float,
        default=40.0,
        metavar="MS",
        help="of a stage; a backward takes twice as long (%(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=5, metavar="K", help="steps after one to warm up (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 0; raises DsExtError for a wrong request or an engine that fails."""
    names = [name for name in args.cases.split(",") if name]
    unknown = [name for name in names if name not in CASES]
    if unknown or not names or args.steps < 1 or not args.forward_ms > 0:
        raise ConfigError(
            f"bench fbd: cases are of {', '.join(CASES)}, at least one; --steps is at least 1 and --forward-ms more "
            f"than 0; got {args.cases!r}, {args.steps} and {args.forward_ms:g}."
        )
    costs = Costs(args.forward_ms, args.forward_ms, args.forward_ms)
    times: dict[str, list[float]] = {}
    with processors_awake():
        # Those of one size in turn, so that what disturbs the machine disturbs them alike.
        for (ranks, micro_batches), alike in _by_size(names).items():
            job = Job(ranks, micro_batches, costs, 4.0, _WAIT_S, "ds_ext.bench.fbd")
            for name, rounds in take_turns(alike, job, args.steps, 1, _WAIT_S).items():
                ranks_of = (zip(*answers, strict=True) for answers in rounds)
                times[name] = [1000 * (max(ends) - min(starts)) for starts, ends in ranks_of]
    found = [(n, CASES[n], simulate(CASES[n].timetable, costs).makespan, times[n]) for n in names]
    if args.json:
        print(json.dumps([_as_json(*row) for row in found], indent=1))
    else:
        print(describe_machine())
        for name, case, simulated, spans in found:
            median = statistics.median(spans)
            print(
                f"{name:<15} {case.ranks} ranks  simulated {simulated:7.1f} ms  measured {median:7.1f} ms "
                f"({median / simulated - 1:+.1%}; best {min(spans):.1f})"
            )
        if {SLOW, SLOW_BASE} <= set(times):
            slow, base = ((min(times[name]), CASES[name]) for name in (SLOW, SLOW_BASE))
            planned = simulate(slow[1].timetable).makespan / simulate(base[1].timetable).makespan
            print(
                f"forward devices {slow[1].options['forward_slowdown']:g} times as slow cost "
                f"{slow[0] / base[0] - 1:.1%} of the step, best against best; simulated {planned - 1:.1%}"
            )
    return 0


def _by_size(names: list[str]) -> dict[tuple[int, int], list[str]]:
    """The cases with as many ranks and micro-batches, in the order of the first of each."""
    found: dict[tuple[int, int], list[str]] = {}
    for name in names:
        found.setdefault((CASES[name].ranks, CASES[name].micro_batches), []).append(name)
    return found


def _as_json(name: str, case: Case, simulated: float, times: list[float]) -> dict[str, Any]:
    return {
        "name": name,
        "params": {
            "ranks": case.ranks,
            "stages": case.stages,
            "micro_batches": case.micro_batches,
            **case.options,
            "simulated": simulated,
            "machine": machine(),
        },
        "median": statistics.median(times),
        "best": min(times),
        "unit": "ms",
        "repeats": len(times),
    }


@dataclass
class Built:
    """An engine of this rank that runs a step when it is told."""

    step: Any
    timetable: Timetable
    device: Any

    def run(self) -> tuple[float, float]:
        """Start of the step and end of this rank's last computation, of time.perf_counter.

        All ranks start together, as in the simulation: the last ones leave a barrier of more ranks than processors
        milliseconds after the first.
        """
        self.device.start_step()
        start = _together()
        self.device.last_end = start  # of a rank that computes nothing
        self.step()
        return start, self.device.last_end


def _together() -> float:
    """Wait until a time that all ranks agree on, and give it; of the clock that all processes of a host share."""
    import torch
    import torch.distributed as dist

    start = torch.tensor(time.perf_counter() + _START_IN_S, dtype=torch.float64)
    dist.all_reduce(start, dist.ReduceOp.MAX)
    while (left := float(start) - time.perf_counter()) > 0:
        time.sleep(max(left - _START_IN_S / 50, 0.0))
    return float(start)


def build(name: str, job: Job) -> Built:
    """The engine of this rank for the case ``name``."""
    import torch.nn.functional as F
    from deepspeed.pipe import LayerSpec

    from ..engine import PipelineModule, initialize
    from ..parallel.fbd import FORWARD_ROLE
    from .emulated import EmulatedDevice, EmulatedLayer, exact_timers, make_batches, rows_of
    from .rivals import SameBatches, config_of

    exact_timers()
    case = CASES[name]
    timetable = case.timetable
    section = {
        "schedule": "fbd",
        "pipeline_parallel_size": case.stages,
        "tensor_parallel_size": case.tensor_parallel,
        "schedule_options": dict(case.options),
        "transport_options": {"timeout_s": job.timeout_s},
    }
    config = {**config_of(job, timetable.placement.replicas), "ds_ext": section}
    device = EmulatedDevice(job.costs, timetable.placement)
    device.split_backwards = timetable.split_backwards
    layers = [LayerSpec(EmulatedLayer, stage, device) for stage in range(case.stages)]
    model = PipelineModule(layers, config, loss_fn=F.mse_loss, clock=device, partition_method="uniform")
    device.repeats = model.role != FORWARD_ROLE
    engine, *_ = initialize(model=model, config=config)
    batches = SameBatches(make_batches(job.micro_batches, rows_of(job.message_kb)))
    return Built(lambda: engine.train_batch(batches), timetable, device)
