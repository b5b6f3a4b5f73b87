"""``bench fbd``: step times of FBD with emulated layers, next to their simulated times.

Layers wait instead of computing (:mod:`.emulated`), so a host with fewer cores than ranks measures the engine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ds_ext.errors import ConfigError
from ds_ext.pipe_schedules import Timetable, get_schedule
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.simulation import simulate

from .command import Report, add_number, check_at_least, json_item, names_in, table
from .ranks import Job, processors_awake, take_turns

SUMMARY = "step times of FBD and their simulated times, with layers that wait instead of computing"
_LIMIT_S = 60.0
_START_IN_S = 0.005  # enough for a rank to wake up and read the clock


@dataclass(frozen=True)
class Case:
    """Sizes and schedule options of a job."""

    stages: int
    micro_batches: int
    tensor_parallel: int
    options: Mapping[str, Any]

    @property
    def timetable(self) -> Timetable:
        """Order of the ops."""
        return get_schedule("fbd").timetable(self.stages, self.micro_batches, self.options)

    @property
    def ranks(self) -> int:
        """Number of ranks, forward ranks included."""
        placement = self.timetable.placement
        forward = self.tensor_parallel // placement.merged
        return self.stages * (forward + placement.replicas * self.tensor_parallel)


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
SLOW, FAST = "slow_forward_48", "plain_48"  # differ in the speed of the forward devices


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the benchmark."""
    parser.add_argument("--cases", default=",".join(CASES), metavar="A,B", help="%(default)s")
    add_number(parser, "--forward-ms", 40.0, "MS", "forward of a stage; a backward takes twice as long")
    add_number(parser, "--steps", 5, "K", "steps, after one warm-up step")


def measure(args: argparse.Namespace) -> Report:
    """Measure the cases.

    Raises:
        ConfigError: a flag is wrong.
        RankFailure: an engine failed.
    """
    names = names_in(args.cases)
    if not names or not set(names) <= set(CASES):
        raise ConfigError(f"--cases: unknown name (got {args.cases!r}). Use any of {', '.join(CASES)}.")
    check_at_least("--steps", args.steps, 1)
    if not args.forward_ms > 0:
        raise ConfigError(f"--forward-ms: must be greater than 0 (got {args.forward_ms:g}).")
    costs = Costs(args.forward_ms, args.forward_ms, args.forward_ms)
    times = _times(names, args.steps, costs)
    simulated = {name: simulate(CASES[name].timetable, costs).makespan for name in names}
    items: list[dict[str, Any]] = []
    rows: list[tuple[str, ...]] = [("case", "ranks", "simulated", "median", "best", "median/simulated")]
    for name in names:
        case, expected, median = CASES[name], simulated[name], statistics.median(times[name])
        sizes = {"ranks": case.ranks, "stages": case.stages, "micro_batches": case.micro_batches}
        items.append(json_item(name, {**sizes, **case.options, "simulated": expected}, times[name], "ms"))
        figures = (f"{value:.1f}" for value in (expected, median, min(times[name])))
        rows.append((name, str(case.ranks), *figures, f"{median / expected:.3f}"))
    text = table(rows)
    if {SLOW, FAST} <= set(names):
        measured = min(times[SLOW]) / min(times[FAST])
        text += f"\n{SLOW}/{FAST}: best {measured:.3f}, simulated {simulated[SLOW] / simulated[FAST]:.3f}"
    return Report(items, f"forward {args.forward_ms:g} ms, {args.steps} steps; times in ms", text)


def _times(names: list[str], steps: int, costs: Costs) -> dict[str, list[float]]:
    """Return the time of every step in milliseconds. Cases of the same size take turns."""
    times: dict[str, list[float]] = {}
    sizes = dict.fromkeys((CASES[name].ranks, CASES[name].micro_batches) for name in names)
    with processors_awake():
        for size in sizes:
            same_size = [name for name in names if (CASES[name].ranks, CASES[name].micro_batches) == size]
            ranks, micro_batches = size
            job = Job(build, ranks, _LIMIT_S, micro_batches, costs)
            for name, run in take_turns(same_size, job, 1 + steps).items():
                by_rank = (zip(*answers, strict=True) for answers in run.rounds[1:])
                times[name] = [1000 * (max(ends) - min(starts)) for starts, ends in by_rank]
    return times


# --- on a rank ---


@dataclass(frozen=True)
class FbdEngine:
    """Engine of this rank; ``step()`` trains one step."""

    step: Callable[[], float]
    timetable: Timetable
    device: Any

    def run(self) -> tuple[float, float]:
        """Return (start, end of the last pass) of one step, by time.perf_counter.

        Ranks start together, as in the simulation. With a barrier alone, and more ranks than cores, the last rank would
        start milliseconds after the first.
        """
        import torch
        import torch.distributed as dist

        from .emulated import sleep_until

        self.device.start_step()
        latest = torch.tensor(time.perf_counter() + _START_IN_S, dtype=torch.float64)
        dist.all_reduce(latest, dist.ReduceOp.MAX)
        start = self.device.last_end = float(latest)  # a rank without passes ends where it starts
        sleep_until(start)
        self.step()
        return start, self.device.last_end


def build(name: str, job: Job) -> FbdEngine:
    """Build the engine of a case."""
    from ds_ext.parallel.fbd import FORWARD_ROLE

    from .emulated import EmulatedDevice, set_exact_timers
    from .rivals import emulated_workload

    set_exact_timers()
    case = CASES[name]
    timetable = case.timetable
    device = EmulatedDevice(job.costs, timetable.placement)
    device.split_backwards = timetable.split_backwards
    engine, step = emulated_workload(job, device).in_ours(
        job,
        timetable,
        clock=device,
        tensor_parallel_size=case.tensor_parallel,
        schedule_options=dict(case.options),
    )
    device.repeats = engine.module.role_name != FORWARD_ROLE
    return FbdEngine(step, timetable, device)
