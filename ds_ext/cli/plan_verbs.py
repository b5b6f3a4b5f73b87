"""What ``python -m ds_ext simulate`` and ``plan`` do: what a schedule costs, in time and bytes, and which to take.

They import neither torch nor deepspeed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace

from ..errors import ScheduleError
from ..pipe_schedules.costs import Costs, read_costs
from ..pipe_schedules.placement import linear
from ..planner.candidates import aligned, format_bytes, parse_bytes
from ..planner.fbd import with_forward_devices
from ..planner.memory import ModelSizes, memory
from ..planner.parallel_sizes import Cluster, join_reasons, message_bytes, parallel_sizes
from ..planner.stage_costs import cut, recomputed
from .model_flags import add_model_flags, model_of
from .plan_text import SHOWN, as_dict, config_of, json_text, table, why
from .schedule_flags import add_import_flag, simulation_of
from .schedule_verbs import EXIT_INVALID, EXIT_OK, describe_sizes

_PATIENCE_S = 2.0  # before a plan says how far it is
_NOT_PRICED = "tensor-parallel communication, gradient reduction, the optimizer's step"


def run_simulate(args: argparse.Namespace) -> int:
    """Print the price, as text or JSON; with a model also its bytes."""
    simulation, model = simulation_of(args), model_of(args)
    if model is not None:
        model = cut(model, simulation.timetable.placement, simulation.timetable.schedule)
    bytes_of = None if model is None else [{**asdict(m), "total": m.total} for m in memory(simulation, model)]
    message = None if model is None else message_bytes(model)
    if args.json:
        further = {
            "busy": list(simulation.busy),
            "memory": bytes_of,
            "message_bytes": message,
            "layers": None if model is None else model.layers,
            "stage_bytes": None if model is None else _stage_bytes(model),
        }
        given = {key: value for key, value in further.items() if value is not None}
        print(json.dumps({**simulation.as_dict(), **given}))
        return EXIT_OK
    timetable = simulation.timetable
    peaks = " ".join(f"{peak:g}" for peak in simulation.peak_activations)
    each = "" if message is None else f", {format_bytes(message)} each"
    print(describe_sizes(timetable))
    print(f"  makespan          {simulation.makespan:g}")
    print(f"  ideal             {simulation.ideal:g}  (computing time of one rank)")
    print(f"  bubble            {simulation.bubble:.1%}")
    print(f"  busy              {' '.join(f'{share:.1%}' for share in simulation.busy)}  (per rank)")
    print(
        f"  peak activations  {peaks}  (per rank, in units of 1/{timetable.placement.num_devices} of the model)"
    )
    print(f"  messages          {simulation.messages}{each}")
    if model is not None and bytes_of is not None:
        print("\n".join([*_stage_lines(model, simulation.costs), *_byte_lines(bytes_of)]))
    return EXIT_OK


def _stage_bytes(model: ModelSizes) -> list[int]:
    """Return the bytes of a micro-batch's activations at every stage."""
    assert not isinstance(model.layers, int), "cut comes before"
    return list(map(math.ceil, model.stage_activations(len(model.layers))))


def _stage_lines(model: ModelSizes, costs: Costs) -> Iterator[str]:
    """The layers of the stages, their costs, and what recomputation adds."""
    assert not isinstance(model.layers, int), "cut comes before"
    yield f"  layers            {' '.join(map(str, model.layers))}  (per stage)"
    if costs.stages is not None:
        factors = " ".join(f"{factor:.3g}" for factor in costs.stages)
        yield f"  costs             {factors}  (per stage, factors: its layers, and the head on the last one)"
    again = recomputed(model.recompute, model.hidden, model.seq)
    if again:
        yield (f"  recompute         {model.recompute}: backwards repeat {again:.0%} of a layer's forward")


def _byte_lines(ranks: Sequence[dict[str, int]]) -> list[str]:
    """A line per rank: weights, gradients, optimizer, activations, total."""
    cells = [["rank", *ranks[0]]]
    cells += [
        [str(rank), *(format_bytes(size) for size in sizes.values())] for rank, sizes in enumerate(ranks)
    ]
    return [f"  {line}" for line in aligned(cells, left=())]


def add_plan_flags(verb: argparse.ArgumentParser) -> None:
    """The flags of ``plan``."""
    verb.add_argument("--devices", type=int, required=True, metavar="N", help="all devices of the job")
    verb.add_argument("--memory", required=True, metavar="80GB", help="of a device")
    verb.add_argument(
        "--global-batch-size", type=int, required=True, metavar="G", help="samples of a step, of all devices"
    )
    verb.add_argument(
        "--tflops",
        type=float,
        default=150.0,
        metavar="T",
        help="10^12 operations a second of a device, as reached in training (%(default)g)",
    )
    verb.add_argument(
        "--bandwidth", default="25GB", metavar="25GB", help="of a message, a second (%(default)s)"
    )
    verb.add_argument(
        "--costs",
        default="f=1,b=1,w=1",
        metavar="f=1,b=1,w=1",
        help="input and weight gradient relative to a forward (%(default)s), or a JSON file",
    )
    verb.add_argument("--tensor-parallel", type=int, metavar="T", help="this size only (all up to 8)")
    verb.add_argument(
        "--forward-devices",
        type=int,
        metavar="F",
        help='extra devices for forwards only: report whether "fbd" on all devices pays',
    )
    verb.add_argument(
        "--forward-slowdown", type=float, metavar="X", help="time of the same work on a forward device (1)"
    )
    verb.add_argument("--forward-memory", metavar="24GB", help="of a forward device (as --memory)")
    verb.add_argument("--json", action="store_true", help="for programs")
    add_import_flag(verb)
    add_model_flags(verb, parallel=False)


def run_plan(args: argparse.Namespace) -> int:
    """Print the best ways to cut the devices, why the first is the best, and the JSON that trains so.

    The exit status is 1 when nothing fits the memory.
    """
    cluster = Cluster(
        args.devices,
        parse_bytes(args.memory),
        args.global_batch_size,
        args.tflops * 1e12,
        parse_bytes(args.bandwidth),
        args.tensor_parallel,
    )
    # Tensor parallelism is the plan's to choose; the flag only narrows it.
    args.tensor_parallel = None
    model = model_of(args)
    if model is None:
        raise ScheduleError("plan needs a model: give --model gpt-10b, or its sizes.")
    if args.zero is None:
        # It takes no longer than averaging gradients: as many bytes are sent.
        model = replace(model, zero_stage=1)
    forward, costs = _forward_devices(args, cluster), read_costs(args.costs)
    with _progress() as progress:
        cuts = parallel_sizes(cluster, model, costs, progress)
    verdict = forward and with_forward_devices(cluster, forward, model, costs, cuts)
    best = cuts.found[0]
    status = EXIT_OK if best.fits else EXIT_INVALID
    config = None if best.row is None else config_of(best, cluster, model)
    if args.json:
        print(json.dumps(as_dict(cuts, config) | ({"fbd": verdict} if verdict else {})))
        return status
    print("\n".join([*_head(args, cluster, model), "", *table(cuts.found[:SHOWN]), "", why(cuts)]))
    if not best.fits and best.row is not None:
        print(f"  Use {_ways(model)}.")
    if verdict:
        print(verdict["reason"])
    if cuts.refused:
        print(f"not possible: {'; '.join(join_reasons(cuts.refused))}.")
    if config is not None and best.fits:
        alone = f" on the {cluster.devices} devices alone" if verdict else ""
        tokenizer = f"--data-path and its tokenizer of {model.vocab:,} entries"
        print(f"  to train so{alone}, with {tokenizer}:\n\n{json_text(config)}")
    return status


def _forward_devices(args: argparse.Namespace, cluster: Cluster) -> Cluster | None:
    """Return the forward devices of the flags. Raises ScheduleError for flags that do not fit each other."""
    given = {name: getattr(args, name) for name in ("forward_slowdown", "forward_memory")}
    flags = {f"--{name.replace('_', '-')}": value for name, value in given.items() if value is not None}
    if args.forward_devices is None and flags:
        raise ScheduleError(f"plan: {min(flags)} needs --forward-devices, their number. Give both.")
    if args.forward_devices is None:
        return None
    slowdown = 1.0 if args.forward_slowdown is None else args.forward_slowdown
    for flag, value in (("--forward-devices", args.forward_devices), ("--forward-slowdown", slowdown)):
        if not value > 0:
            raise ScheduleError(f"plan: {flag} must be more than 0 (got {value:g}).")
    room = parse_bytes(args.forward_memory or args.memory)
    return replace(cluster, devices=args.forward_devices, memory_bytes=room, flops=cluster.flops / slowdown)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Says on a terminal how far a long plan is, and takes it back at the end."""
    start, shown = time.monotonic(), False

    def show(done: int, of: int) -> None:
        nonlocal shown
        if sys.stderr.isatty() and time.monotonic() - start > _PATIENCE_S:
            shown = True
            print(f"\rplan: {done} of {of} sizes ...", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _ways(model: ModelSizes) -> str:
    """What would make a model fit, of what a plan has not tried itself."""
    ways = ["more devices", "devices with more memory"]
    if model.micro_batch > 1:
        ways.append("a smaller --micro-batch-size")
    if not model.zero_stage:
        ways.append("--zero 1")
    return f"{', '.join(ways[:-1])} or {ways[-1]}"


def _head(args: argparse.Namespace, cluster: Cluster, model: ModelSizes) -> list[str]:
    parameters = model.device_parameters(linear(1), 0) / 1e9
    return [
        f"{args.model or 'the model'} ({parameters:.3g} billion parameters) on {cluster.devices} devices of "
        f"{format_bytes(cluster.memory_bytes)}; {cluster.batch} samples a step in micro-batches of {model.micro_batch}",
        f"16-bit weights, {_zero_words(model)}; {args.tflops:g} TFLOP/s a device, messages at "
        f"{format_bytes(cluster.bandwidth)}/s",
        f"not priced: {_NOT_PRICED}; not looked for: schedules that save less than 1 %",
    ]


def _zero_words(model: ModelSizes) -> str:
    return (
        "ZeRO stage 1 where there is more than one copy of the weights"
        if model.zero_stage
        else "ZeRO stage 0"
    )
