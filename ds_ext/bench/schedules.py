"""``bench schedules``: the step time of schedules in real engines, with compute that only waits.

The engines run as they do in training: processes, messages, autograd, reductions, the optimizer. Only their layers
wait instead of computing (:mod:`.emulated`), so that a few cores stand for many devices, and what is measured is the
order of work and the engine's own time.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from ..cli.schedule_flags import add_import_flag
from ..errors import ConfigError, ScheduleError
from ..pipe_schedules import SCHEDULES
from ..pipe_schedules.costs import Costs
from ..pipe_schedules.simulate import Simulation, simulate
from .awake import processors_awake
from .ranks import Job, RankFailure, RankGroup, prepare_host
from .report import Result, as_json, as_table, describe_machine
from .requests import read_request, timetable_for

SUMMARY = "step times of schedules and rivals, with layers that wait instead of computing"
RIVALS = (
    "deepspeed_1f1b",
    "deepspeed_dualpipev",
    "torch_1f1b",
    "torch_interleaved_1f1b",
    "torch_zbv",
    "torch_dualpipev",
)
VARIANTS = ("bitpipe:mode=greedy",)  # measured too when nothing is asked for
_WAIT_S, _LIMIT_FACTOR = 30.0, 40.0  # every wait ends after so long and so many times what is to be done


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    parser.add_argument(
        "--stages", type=int, default=4, metavar="D", help="devices, one rank each (%(default)s)"
    )
    parser.add_argument(
        "--micro-batches", type=int, default=8, metavar="N", help="micro-batches per step (%(default)s)"
    )
    parser.add_argument(
        "--forward-ms",
        type=float,
        default=20.0,
        metavar="MS",
        help="forward of one D-th of the model (%(default)s)",
    )
    parser.add_argument("--input-gradient-ms", type=float, metavar="MS", help="default: as the forward")
    parser.add_argument("--weight-gradient-ms", type=float, metavar="MS", help="default: as the forward")
    parser.add_argument(
        "--jitter",
        type=float,
        default=0.0,
        metavar="S",
        help="times vary evenly within 1 - S and 1 + S, anew in every step, the same for every schedule (%(default)s)",
    )
    parser.add_argument(
        "--link-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="messages of our engines are held back that long, with the jitter, which no plan is told (%(default)s)",
    )
    parser.add_argument(
        "--message-kb", type=float, default=4.0, metavar="KB", help="size of an activation (%(default)s)"
    )
    parser.add_argument(
        "--schedules",
        metavar="A,B",
        help="NAME[:OPTION=VALUE]; default: all that can have these sizes; none: rivals only",
    )
    parser.add_argument(
        "--rivals", default=",".join(RIVALS), metavar="A,B", help="or none; default: %(default)s"
    )
    parser.add_argument(
        "--steps", type=int, default=5, metavar="K", help="steps after one to warm up (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    add_import_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 0, or 1 if one of our schedules failed; raises DsExtError for a wrong request."""
    ours, left_out = _schedules(args)
    rivals = _rivals(args)
    if not ours + rivals:
        raise ConfigError("there is nothing to measure: give --schedules or --rivals.")
    loaded = describe_machine()
    with _sigterm_cleans_up(), processors_awake():
        results = _measure(_take_turns(ours, rivals), _job(args), args.steps)
    if args.json:
        print(json.dumps(as_json(results, _params(args)), indent=1))
    else:
        print(_title(args), loaded, sep="\n")
        print(as_table(results))
    for name, reason in left_out:
        print(f"{name} left out: {reason}", file=sys.stderr if args.json else sys.stdout)
    return int(any(result.error for result in results if result.name in ours))


def _schedules(args: argparse.Namespace) -> tuple[list[str], list[tuple[str, str]]]:
    """Names of our schedules to run, and (name, why) of those that cannot have the sizes."""
    if args.stages < 2:
        raise ConfigError(f"--stages must be at least 2, as one stage is no pipeline; got {args.stages}.")
    if args.steps < 1:
        raise ConfigError(f"--steps must be at least 1; got {args.steps}.")
    if not (math.isfinite(args.message_kb) and args.message_kb > 0):
        raise ConfigError(f"--message-kb must be more than 0; got {args.message_kb:g}.")
    if not args.forward_ms > 0:
        raise ConfigError(f"--forward-ms must be more than 0; got {args.forward_ms:g}.")
    _costs(args)
    names = [*SCHEDULES, *VARIANTS] if args.schedules is None else _names(args.schedules)
    fitting, left_out = [], []
    for name in names:
        try:
            _check_sizes(name, args)
            fitting.append(name)
        except ScheduleError as error:
            if args.schedules is not None:
                raise
            left_out.append((name, str(error)))
    return fitting, left_out


def _check_sizes(name: str, args: argparse.Namespace) -> None:
    """Refuse what the engine cannot run: DeepSpeed counts the same number of micro-batches on every replica."""
    micro_batches = args.micro_batches
    placement = timetable_for(name, args.stages, micro_batches, _costs(args)).placement
    replicas = placement.replicas
    if placement.forward_devices:
        raise ScheduleError(
            f"{name} has ranks for forwards besides: measure it with `python -m ds_ext bench fbd`."
        )
    if micro_batches % replicas:
        raise ScheduleError(
            f"{name} has {replicas} pipes that take as many micro-batches each; got {micro_batches}. Use "
            f"{micro_batches - 1} or {micro_batches + 1}."
        )


def _rivals(args: argparse.Namespace) -> list[str]:
    names = _names(args.rivals)
    unknown = [name for name in names if name not in RIVALS]
    if unknown:
        raise ConfigError(f"rival {unknown[0]!r} is not known; known: {', '.join(RIVALS)}, or none.")
    if args.link_ms and names:
        if names != list(RIVALS):
            raise ConfigError(
                f"--link-ms {args.link_ms:g} holds back the messages of our engines only; leave --rivals out."
            )
        return []
    return names


def _names(text: str) -> list[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    return [] if found == ["none"] else list(dict.fromkeys(found))


def _take_turns(ours: Sequence[str], rivals: Sequence[str]) -> list[str]:
    """Ours and rivals in turn, as long as both last."""
    pairs = [list(pair) for pair in zip(ours, rivals, strict=False)]
    shorter = len(pairs)
    return [name for pair in pairs for name in pair] + [*ours[shorter:], *rivals[shorter:]]


def _costs(args: argparse.Namespace) -> Costs:
    forward = args.forward_ms
    b, w = (forward if ms is None else ms for ms in (args.input_gradient_ms, args.weight_gradient_ms))
    return Costs(forward=forward, backward_input=b, backward_weight=w, comm=args.link_ms, jitter=args.jitter)


def _job(args: argparse.Namespace) -> Job:
    costs = _costs(args)
    ideal_s = args.micro_batches * (costs.forward + costs.backward_input + costs.backward_weight) / 1000
    timeout_s = _WAIT_S + _LIMIT_FACTOR * ideal_s
    modules = tuple(args.modules)
    return Job(args.stages, args.micro_batches, costs, args.message_kb, timeout_s, modules=modules)


def _measure(names: Sequence[str], job: Job, steps: int) -> list[Result]:
    """Start every engine, then one step of each in turn, so that what disturbs the machine disturbs them alike."""
    prepare_host()
    results = [Result(name) for name in names]
    with tempfile.TemporaryDirectory(prefix="ds_ext_bench_") as folder:
        groups = {name: RankGroup(name, job, Path(folder)) for name in names}
        try:
            for result in results:
                _tell(f"starting {result.name}")
                _start(result, groups[result.name], job)
            for step in range(1 + steps):
                _tell(f"step {step} of {steps}" if step else "warming up")
                for result in results:
                    if result.error is None:
                        _step(result, groups[result.name], step)
        finally:
            for group in groups.values():
                group.close()
    _tell("")
    return results


@contextmanager
def _sigterm_cleans_up() -> Iterator[None]:
    """SIGTERM leaves as Ctrl-C does, through the clean-up."""

    def leave(number: int, frame: Any) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start(result: Result, group: RankGroup, job: Job) -> None:
    try:
        result.simulation = simulate(group.start(), job.costs)
    except RankFailure as failure:
        result.error = str(failure)
        group.close()


def _step(result: Result, group: RankGroup, step: int) -> None:
    """The first one, 0, is to warm up."""
    simulation = result.simulation = _expected(result, group.job, step)
    try:
        timing = group.step(_WAIT_S + _LIMIT_FACTOR * simulation.makespan / 1000)
    except RankFailure as failure:
        result.error = str(failure)
        group.close()
        return
    result.losses.append(timing.loss)
    if step == 0:  # torch runs passes of its own there, to learn the shapes
        return
    wanted_ms = simulation.ideal * group.job.devices
    if not math.isclose(timing.computed_ms, wanted_ms, rel_tol=1e-6):
        result.error = (
            f"its passes took {timing.computed_ms:g} ms in all, and should have taken {wanted_ms:g}"
        )
        group.close()
    result.times_ms.append(timing.milliseconds)
    result.simulated_ms.append(simulation.makespan)


def _expected(result: Result, job: Job, step: int) -> Simulation:
    """What a step should take with its draw of the jitter."""
    assert result.simulation is not None
    made, costs = result.simulation.timetable, replace(job.costs, seed=job.costs.seed + step)
    if result.name not in RIVALS and read_request(result.name)[0].dynamic is not None:
        made = timetable_for(result.name, job.devices, job.micro_batches, costs)
    return simulate(made, costs)


def _tell(text: str) -> None:
    """What is going on, for somebody who waits at a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _params(args: argparse.Namespace) -> dict[str, Any]:
    costs = _costs(args)
    return {
        "stages": args.stages,
        "micro_batches": args.micro_batches,
        "forward_ms": costs.forward,
        "input_gradient_ms": costs.backward_input,
        "weight_gradient_ms": costs.backward_weight,
        "jitter": costs.jitter,
        "link_ms": costs.comm,
        "message_kb": args.message_kb,
    }


def _title(args: argparse.Namespace) -> str:
    costs = _costs(args)
    jitter = f", message {costs.comm:g}" if costs.comm else ""
    jitter += f", jitter {costs.jitter:g}" if costs.jitter else ""
    return (
        f"{args.stages} ranks, {args.micro_batches} micro-batches; ms of one {args.stages}-th of the model: "
        f"forward {costs.forward:g}, input gradient {costs.backward_input:g}, weight gradient "
        f"{costs.backward_weight:g}{jitter}; messages of {args.message_kb:g} KiB; {args.steps} steps"
    )
