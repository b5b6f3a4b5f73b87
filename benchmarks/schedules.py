"""``bench schedules``: step times of schedules in real engines with emulated layers.

The engines run as in training, with processes, messages, autograd, reductions and the optimizer. Only their layers
wait instead of computing (:mod:`.emulated`), so a few cores can emulate many devices. The step time shows the effect of
the op order and the engine's overhead.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from ds_ext.cli.schedule_flags import add_import_flag
from ds_ext.errors import ConfigError, ScheduleError
from ds_ext.pipe_schedules import SCHEDULES, Timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.simulation import Simulation, simulate

from .command import (
    Report,
    add_device_flag,
    add_number,
    add_size_flags,
    check_at_least,
    costs_on,
    count_gpus,
    in_slices,
    json_item,
    names_in,
    read_request,
    slices_of,
    table,
    timetable_for,
)
from .ranks import Job, Run, Worker, processors_awake, take_turns

SUMMARY = "step times of schedules and rivals, with layers that wait instead of computing"
RIVALS = (
    "deepspeed_1f1b",
    "deepspeed_dualpipev",
    "torch_1f1b",
    "torch_interleaved_1f1b",
    "torch_zbv",
    "torch_dualpipev",
)
VARIANTS = ("bitpipe:mode=greedy",)  # measured by default in addition to all schedules
_WAIT_S, _LIMIT_FACTOR = 30.0, 40.0  # the time limit: 30 s and 40 times the work of N + D micro-batches
_HEAD = (
    "schedule",
    "best",
    "median",
    "simulated",
    "ideal",
    "best/ideal",
    "simulated/ideal",
    "best/simulated",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the benchmark."""
    add_size_flags(parser, num_devices=4, micro_batches=8)
    add_number(parser, "--forward-ms", 20.0, "MS", "forward of 1/D of the model")
    parser.add_argument("--input-gradient-ms", type=float, metavar="MS", help="default: --forward-ms")
    parser.add_argument("--weight-gradient-ms", type=float, metavar="MS", help="default: --forward-ms")
    add_number(parser, "--jitter", 0.0, "S", "scale each time by 1 - S to 1 + S, redrawn in every step")
    add_number(parser, "--link-ms", 0.0, "MS", "delay of messages in our engines; plans ignore it")
    add_number(parser, "--message-kb", 4.0, "KB", "size of an activation")
    add_number(parser, "--head", 0.0, "X", "time of the head, relative to 1/D of the model")
    parts = "our schedules compute a part of the head on every device, not all of it on the last stage"
    parser.add_argument("--vocabulary-parallel-head", action="store_true", help=parts)
    schedules = "NAME[:OPTION=VALUE], or none (default: all that support the sizes)"
    parser.add_argument("--schedules", metavar="A,B", help=schedules)
    slices = "of our schedules, each number in turn (%(default)s)"
    parser.add_argument("--sequence-slices", default="1", metavar="K1,K2", help=slices)
    parser.add_argument("--rivals", default=",".join(RIVALS), metavar="A,B", help="or none (%(default)s)")
    add_number(parser, "--steps", 5, "K", "steps, after one warm-up step")
    add_device_flag(parser)
    add_import_flag(parser)


def measure(args: argparse.Namespace) -> Report:
    """Measure our schedules and their rivals.

    Raises:
        ConfigError: a flag is wrong, or nothing is left to measure.
        ScheduleError: a named schedule does not support the sizes.
    """
    rivals = _rivals(args)
    gpus = count_gpus(args.device)
    ours = _our_schedules(args)
    if not ours + rivals:
        raise ConfigError("--schedules, --rivals: nothing to measure (got none and none). Name at least one.")
    # Our schedules and rivals alternate.
    names = [name for pair in zip_longest(ours, rivals) for name in pair if name is not None]
    job = _job(args)
    with processors_awake():
        runs = take_turns(names, job, 1 + args.steps, keep_going=True)
    results = [_result(name, run, job) for name, run in runs.items()]
    failed = any(result.error for result in results if result.name in ours)
    text = as_table(results)
    if 0 < gpus < job.num_ranks:
        text += f"\n{job.num_ranks} ranks on {gpus} GPU(s), which run the kernels of one process at a time."
    return Report(as_json(results, _params(job)), _title(job, args.steps), text, failed)


def build(name: str, job: Job) -> Worker:
    """Build this rank's part of an engine."""
    from . import rivals

    return rivals.build(name, job)


# --- the request ---


def _our_schedules(args: argparse.Namespace) -> list[str]:
    """Return the requests to run. Prints those that do not support the sizes, unless they were named."""
    check_at_least("--num-devices", args.num_devices, 2)
    check_at_least("--steps", args.steps, 1)
    for flag, value in (("--message-kb", args.message_kb), ("--forward-ms", args.forward_ms)):
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{flag}: must be greater than 0 (got {value:g}).")
    costs, parts = _costs(args), args.vocabulary_parallel_head
    if parts and not costs.head:
        raise ConfigError("--vocabulary-parallel-head: needs the time of the head (got none). Add --head X.")
    found = []
    schedules = [*SCHEDULES, *VARIANTS] if args.schedules is None else names_in(args.schedules)
    numbers = _slices(args.sequence_slices)
    for request in [in_slices(name, slices) for name in schedules for slices in numbers]:
        try:
            _check_sizes(request, args.num_devices, args.micro_batches, costs, parts)
            found.append(request)
        except ScheduleError as error:
            if args.schedules is not None:
                raise
            print(f"left out: {request}: {error}", file=sys.stderr)
    return found


def _slices(text: str) -> list[int]:
    """Return the numbers of slices in ``--sequence-slices``."""
    numbers = names_in(text)
    if not numbers or not all(number.isdecimal() and int(number) for number in numbers):
        raise ConfigError(f"--sequence-slices: must be numbers from 1 up, such as 1,4 (got {text!r}).")
    return [int(number) for number in numbers]


def _check_sizes(request: str, devices: int, micro_batches: int, costs: Costs, divides_head: bool) -> None:
    """Reject sizes that the engine cannot run: DeepSpeed counts the same number of micro-batches on every replica."""
    placement = timetable_for(request, devices, micro_batches, costs, divides_head).placement
    if placement.forward_devices:
        raise ScheduleError(f"{request} needs extra devices. Use python -m ds_ext bench fbd.")
    if micro_batches % placement.replicas:
        raise ScheduleError(
            f"--micro-batches: {request} needs a multiple of its {placement.replicas} pipes (got {micro_batches}). "
            f"Use {micro_batches - 1} or {micro_batches + 1}."
        )


def _rivals(args: argparse.Namespace) -> list[str]:
    names = names_in(args.rivals)
    for name in names:
        if name not in RIVALS:
            raise ConfigError(f"--rivals: unknown name (got {name!r}). Use {', '.join(RIVALS)}, or none.")
    if args.link_ms and args.device == "cuda":
        raise ConfigError(
            f"--link-ms: delays messages between CPU ranks only (got {args.link_ms:g}). Remove --device."
        )
    if args.link_ms and names:
        if names != list(RIVALS):
            raise ConfigError(
                f"--link-ms: delays messages of our engines only (got {args.link_ms:g}). Remove --rivals."
            )
        return []
    return names


def _costs(args: argparse.Namespace) -> Costs:
    forward = args.forward_ms
    b, w = (forward if ms is None else ms for ms in (args.input_gradient_ms, args.weight_gradient_ms))
    return Costs(
        forward=forward,
        backward_input=b,
        backward_weight=w,
        comm=args.link_ms,
        jitter=args.jitter,
        head=args.head,
    )


def _job(args: argparse.Namespace) -> Job:
    costs = _costs(args)
    work_ms = (args.num_devices + args.micro_batches) * (
        costs.forward + costs.backward_input + costs.backward_weight + 2 * costs.comm
    )
    timeout_s = _WAIT_S + _LIMIT_FACTOR * (1 + args.head) * work_ms / 1000
    modules = tuple(args.modules)
    sizes = args.num_devices, timeout_s, args.micro_batches
    parts = args.vocabulary_parallel_head
    return Job(build, *sizes, costs, args.message_kb, modules, args.device, parts)


# --- the results ---


@dataclass
class Result:
    """Measurements of one engine.

    Attributes:
        simulation: simulation of the last step; None if the engine did not start.
        times_ms: duration of every step after the first.
        simulated_ms: simulated duration of the same steps.
        losses: losses of all steps.
        error: reason of a failure, in one line.
    """

    name: str
    simulation: Simulation | None = None
    times_ms: list[float] = field(default_factory=list)
    simulated_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def measured_ms(self) -> list[float]:
        """Durations; empty after a failure."""
        return [] if self.error else self.times_ms


def _result(name: str, run: Run, job: Job) -> Result:
    result = Result(name, error=run.error)
    if run.timetable is not None:
        result.simulation = simulate(run.timetable, costs_on(run.timetable.placement, job.costs))
    for step, answers in enumerate(run.rounds):
        assert run.timetable is not None
        result.simulation = _simulation(name, run.timetable, job, step)
        starts, ends, computed, losses = zip(*answers, strict=True)
        result.losses.append(next((loss for loss in losses if loss is not None), math.nan))
        if step == 0:  # a warm-up, in which torch runs additional passes to infer the shapes
            continue
        expected_ms = result.simulation.ideal * job.num_ranks
        if not math.isclose(sum(computed), expected_ms, rel_tol=1e-6):
            result.error = (
                f"step {step}: passes took {sum(computed):g} ms in total, expected {expected_ms:g} ms"
            )
            break
        result.times_ms.append(1000 * (max(ends) - min(starts)))
        result.simulated_ms.append(result.simulation.makespan)
    return result


def _simulation(name: str, timetable: Timetable, job: Job, step: int) -> Simulation:
    """Simulate a step with its jitter."""
    costs = replace(job.costs, seed=job.costs.seed + step)
    if name not in RIVALS and read_request(name)[0].dynamic is not None:
        timetable = timetable_for(name, job.num_ranks, job.micro_batches, costs)
    return simulate(timetable, costs_on(timetable.placement, costs))


def as_json(results: Sequence[Result], params: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the items of ``--json``; an engine that failed has "error" in its params, and null for its times."""
    items = []
    for result in results:
        item_params: dict[str, Any] = {**params, "sequence_slices": slices_of(result.name)}
        if result.simulation is not None:
            item_params["simulated"] = statistics.median(result.simulated_ms or [result.simulation.makespan])
            item_params["ideal"] = result.simulation.ideal
        item_params |= {"losses": result.losses} if result.error is None else {"error": result.error}
        items.append(json_item(result.name, item_params, result.measured_ms, "ms"))
    return items


def as_table(results: Sequence[Result]) -> str:
    """Return one line per engine, and below the table the errors."""
    errors = [f"{result.name} failed: {result.error}" for result in results if result.error]
    return "\n".join([table([_HEAD, *map(_row, results)]), *errors])


def _row(result: Result) -> tuple[str, ...]:
    times, simulation = result.measured_ms, result.simulation
    if simulation is None:
        return (result.name, "failed", *[""] * 6)
    ideal, simulated = simulation.ideal, statistics.median(result.simulated_ms or [simulation.makespan])
    expected, expected_ratio = (f"{simulated:.1f}", f"{ideal:.1f}"), f"{simulated / ideal:.3f}"
    if not times:
        return (result.name, "failed", "", *expected, "", expected_ratio, "")
    best, median = min(times), statistics.median(times)
    ratio = min(time / expected_ms for time, expected_ms in zip(times, result.simulated_ms, strict=True))
    measured = f"{best:.1f}", f"{median:.1f}"
    return (result.name, *measured, *expected, f"{best / ideal:.3f}", expected_ratio, f"{ratio:.3f}")


def _params(job: Job) -> dict[str, Any]:
    return {
        "stages": job.num_ranks,
        "micro_batches": job.micro_batches,
        "forward_ms": job.costs.forward,
        "input_gradient_ms": job.costs.backward_input,
        "weight_gradient_ms": job.costs.backward_weight,
        "head": job.costs.head,
        "vocabulary_parallel_head": job.vocabulary_parallel_head,
        "jitter": job.costs.jitter,
        "link_ms": job.costs.comm,
        "message_kb": job.message_kb,
        "device": job.device,
    }


def _title(job: Job, steps: int) -> str:
    costs = job.costs
    return (
        f"{job.num_ranks} devices, {job.micro_batches} micro-batches, {steps} steps; of 1/{job.num_ranks} of the "
        f"model: forward {costs.forward:g} ms, input gradient {costs.backward_input:g} ms, weight gradient "
        f"{costs.backward_weight:g} ms"
        + (f"; head {costs.head:g}{' in parts' * job.vocabulary_parallel_head}" if costs.head else "")
        + (f"; link {costs.comm:g} ms" if costs.comm else "")
        + (f"; jitter {costs.jitter:g}" if costs.jitter else "")
        + f"; activation {job.message_kb:g} KiB"
    )
