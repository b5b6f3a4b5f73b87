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
        assert place.forward is not None
        forward = self.tensor_parallel // place.forward.merged
        return self.stages * (forward + place.replicas * self.tensor_parallel)


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "plain": Case(4, 8, 1, {}),
        "slow_forward": Case(4, 48, 1, {"forward_slowdown": 3.0}),
        "merged": Case(2, 8, 2, {"merge_forward_tensor_parallel": 2}),
        "three": Case(2, 12, 1, {"backward_per_forward": 3}),
        "split": Case(4, 8, 1, {"backward": "split"}),
    }
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    parser.add_argument("--cases", default=",".join(CASES), metavar="A,B", help="%(default)s")
    parser.add_argument(
        "--forward-ms",
        type=float,
        default=20.0,
        metavar="MS",
        help="of a stage; a backward takes twice as long",
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
    found = []
    with processors_awake():
        for name in names:
            case, simulated = CASES[name], simulate(CASES[name].timetable, costs).makespan
            job = Job(case.ranks, case.micro_batches, costs, 4.0, _WAIT_S, "ds_ext.bench.fbd")
            rounds = take_turns([name], job, args.steps, 1, _WAIT_S)[name]
            times = [
                1000 * (max(ends) - min(starts)) for starts, ends in (zip(*r, strict=True) for r in rounds)
            ]
            found.append((name, case, simulated, times))
    if args.json:
        print(json.dumps([_as_json(*row) for row in found], indent=1))
    else:
        print(describe_machine())
        for name, case, simulated, times in found:
            median = statistics.median(times)
            print(
                f"{name:<13} {case.ranks} ranks  simulated {simulated:7.1f} ms  measured {median:7.1f} ms "
                f"({median / simulated - 1:+.1%}; best {min(times):.1f})"
            )
    return 0


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
        """Start of the step and end of this rank's last computation, of time.perf_counter."""
        self.device.start_step()
        start = time.perf_counter()
        self.device.last_end = start  # of a rank that computes nothing
        self.step()
        return start, self.device.last_end


def build(name: str, job: Job) -> Built:
    """The engine of this rank for the case ``name``."""
    import torch.nn.functional as F
    from deepspeed.pipe import LayerSpec

    from ..engine import PipelineModule, initialize
    from ..fbd_layout import FORWARD_ROLE
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
