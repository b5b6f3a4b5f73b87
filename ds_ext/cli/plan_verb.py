"""Subcommand ``plan`` of ``python -m ds_ext``: parallel sizes and a schedule for a cluster. Does not import torch."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ScheduleError
from ..gpus import GPUS, Gpu
from ..parallel.network import GLOO
from ..pipe_schedules.costs import Costs, read_costs
from ..pipe_schedules.placement import linear
from ..planner.candidates import ESTIMATE_ERROR
from ..planner.fbd import compare_with_fbd
from ..planner.parallel_sizes import Cluster, ClusterPlan, ParallelSizes, other_head, plan_cluster
from ..planner.rental import (
    STEP_TIME_ERROR,
    fewer_devices,
    figures_of_run,
    plan_for_deadline,
    tokens_within,
)
from ..planner.stage_costs import SLICE_TOKENS
from ..planner.text import (
    HEADROOM,
    aligned,
    format_bytes,
    format_count,
    join_reasons,
    join_words,
    parse_bytes,
    usable_bytes,
)
from ..planner.training_sizes import SCORES_ON_CPU, TrainingSizes
from .model_flags import add_model_flags, model_label, model_of
from .network_flags import RATE, add_network_flags, describe_network, flops_of, network_of
from .schedule_flags import add_head_flag, add_import_flag
from .schedule_verbs import EXIT_INVALID, EXIT_OK, write_file

_SHOWN, _BOUNDS = 10, 3  # rows of the table, and bounds of sizes that are not planned
_MISSED = 3  # numbers of devices that miss the deadline
_LEAST_WITH, _LEAST_WITHOUT = 0.02, 5e-4  # saving of a head in parts, or without them, that is worth a line
_WARMUP, _LEAST_RATE = 0.01, 3e-5  # share of the steps, and their last learning rate
_SAVES = {"save": "checkpoints", "keep_checkpoints": 2}
_SAVE_EVERY_S = 3600
_LONG_GATHER = 0.01  # share of the step
_PATIENCE_S = 2.0  # before the progress is shown
_INTERVAL_S = 10.0  # between its lines, without a terminal
# Usual values for GPT; replace them for a real run. torch's fused Adam needs no compiler and no temporary tensors.
_ADAM: dict[str, Any] = {
    "lr": 3e-4,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "weight_decay": 0.1,
    "torch_adam": True,
    "fused": True,
}


def add_plan_flags(verb: argparse.ArgumentParser) -> None:
    devices = "number of devices in the job (the fewest that train --tokens in --days)"
    verb.add_argument("--devices", type=int, metavar="N", help=devices)
    gpu = "memory, rates and links of this GPU, from its data sheet; the other flags override them"
    verb.add_argument("--gpu", choices=[*GPUS], help=gpu)
    verb.add_argument("--memory", metavar="80GB", help="memory of a device (that of --gpu)")
    share = "share of the memory for what is not counted (%(default)g)"
    verb.add_argument("--headroom", type=float, default=HEADROOM, metavar="X", help=share)
    samples = "samples per step, over all devices"
    verb.add_argument("--global-batch-size", type=int, required=True, metavar="G", help=samples)
    verb.add_argument("--tflops", type=float, metavar="T", help=RATE)
    costs = (
        "times of backward_input and backward_weight relative to the forward (%(default)s), or a JSON file, also of "
        "`trace costs`"
    )
    verb.add_argument("--costs", default="f=1,b=1,w=1", metavar="f=1,b=1,w=1", help=costs)
    verb.add_argument("--tensor-parallel", type=int, metavar="T", help="only this size (all up to 8)")
    verb.add_argument("--pipeline-parallel", type=int, metavar="P", help="only this size (all)")
    slices = "sequence parallelism (with tensor parallelism, if it divides the tokens)"
    verb.add_argument("--sequence-parallel", action=argparse.BooleanOptionalAction, help=slices)
    numbers = (
        "only these numbers of slices of the sequence in a pipeline (1, 2, 4 and 8, of 2,048 tokens or more)"
    )
    verb.add_argument("--sequence-slices", metavar="K[,K]", help=numbers)
    add_head_flag(verb)
    interval = "only this interval of full recomputation: every n-th layer (1 to 4)"
    verb.add_argument("--recompute-interval", type=int, metavar="K", help=interval)
    extra = 'extra devices for forwards only: report whether "fbd" pays'
    verb.add_argument("--forward-devices", type=int, metavar="F", help=extra)
    slowdown = "relative time of the same work on a forward device (1)"
    verb.add_argument("--forward-slowdown", type=float, metavar="X", help=slowdown)
    verb.add_argument(
        "--forward-memory", metavar="24GB", help="memory of a forward device (default: --memory)"
    )
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.add_argument("-o", "--output", metavar="FILE", help="write the JSON of the job to a file")
    tokens = "tokens to train on, for the days and the GPU-hours that it takes"
    verb.add_argument("--tokens", type=float, metavar="15e12", help=tokens)
    verb.add_argument("--days", type=float, metavar="D", help="deadline for --tokens")
    verb.add_argument("--price", type=float, metavar="P", help="price of a device per hour, for the cost")
    add_import_flag(verb)
    add_model_flags(verb, all_settings=False)
    add_network_flags(verb, for_plan=True)


def run_plan(args: argparse.Namespace) -> int:
    """Print the best sizes, and the reason and JSON for the first of them.

    The exit status is 1 if nothing fits, or if the run misses ``--days``.
    """
    gpu = _take_gpu(args)
    _check_run(args)
    cluster = _cluster(args)
    # Limits on the search, not sizes of the model.
    args.tensor_parallel = args.sequence_parallel = args.micro_batch_size = None
    model = model_of(args)
    if model is None:
        raise ScheduleError("--model: missing. Add --model gpt-10b, or the sizes of the model.")
    if args.zero is None:
        # ZeRO-1 sends as many bytes as averaging gradients, so it takes no more time.
        model = replace(model, zero_stage=1)
    if args.collectives == GLOO and model.attention_dropout:
        model = replace(model, **SCORES_ON_CPU)
    forward_devices = _forward_devices(args, cluster)
    costs = read_costs(args.costs).ratios()
    late: dict[int, float] = {}
    with _progress() as progress, _few_collections():
        if args.devices is None:
            cluster, plan, late = plan_for_deadline(cluster, model, costs, args.tokens, args.days, progress)
        else:
            plan = plan_cluster(cluster, model, costs, progress)
    if args.days is not None and args.tokens is None and plan.best.fits:
        args.tokens = tokens_within(plan, cluster, model, args.days)
    prices = gpu and 1e12 * gpu.peak_tflops, args.tokens, args.price
    run = figures_of_run(plan, cluster, model, *prices) if plan.best.fits else None
    fbd = forward_devices and compare_with_fbd(cluster, forward_devices, model, costs, plan)
    config = None if plan.best.candidate is None else _config(plan.best, cluster, model, args.tokens)
    if args.json:
        print(json.dumps(_as_dict(plan, config, run) | ({"fbd": fbd} if fbd else {})))
    else:
        lines = [*_header(args, cluster, model, costs), "", *_result_lines(plan, cluster, model)]
        if run is not None:
            lines += [*_other_head(plan, cluster, model, costs), *_run_lines(args, plan, run, late)]
        print("\n".join(lines))
        if fbd:
            print(fbd["reason"])
        if config is not None and plan.best.fits:
            weights = f"--vocab-size {model.vocab_size}"
            if model.is_of_folder:
                weights = f"--hf-model {args.model if Path(args.model).is_dir() else 'FOLDER'}"
            words = f"--hosts {cluster.links.hosts} {weights} --dry-run"
            command = f"`python train_gpt.py --deepspeed_config {args.output or 'plan.json'} {words}`"
            if args.output is None:
                print(f"plan.json for {command} (-o plan.json writes it):\n\n{_text(config)}")
            else:
                write_file(args.output, f"{_text(config)}\n")
                print(f"wrote {args.output} for {command}")
    is_late = args.days is not None and run is not None and (1 + STEP_TIME_ERROR) * run["days"] > args.days
    return EXIT_OK if plan.best.fits and not is_late else EXIT_INVALID


def _take_gpu(args: argparse.Namespace) -> Gpu | None:
    """Set the flags that describe a device to those of ``--gpu``, unless they are set."""
    if args.gpu is None:
        return None
    if args.precision == "fp32":
        raise ScheduleError(
            f"--precision: --gpu {args.gpu} has the rate of bf16 (got fp32). Use --tflops instead."
        )
    gpu = GPUS[args.gpu]
    for dest, value in gpu.flags.items():
        if getattr(args, dest) is None:
            setattr(args, dest, value)
    return gpu


def _check_run(args: argparse.Namespace) -> None:
    for dest in ("tokens", "days", "price"):
        value = getattr(args, dest)
        if value is not None and not 0 < value < math.inf:
            raise ScheduleError(f"--{dest}: must be greater than 0 (got {value:g}).")
        if value is not None and args.tokens is None and (args.days is None or args.devices is None):
            raise ScheduleError(
                f"--{dest}: needs --tokens (got {value:g}). Add --tokens 1e12, or --devices and --days for the tokens "
                f"that they train."
            )
    if args.memory is None:
        raise ScheduleError("--memory: missing. Add --gpu h100, or --memory 80GB.")
    if args.devices is None:
        if args.days is None:
            raise ScheduleError("--devices: missing. Add --devices 64, or --tokens and --days to find it.")
        if (value := args.hosts or args.forward_devices) is not None:
            flag = "--hosts" if args.hosts else "--forward-devices"
            raise ScheduleError(f"{flag}: needs --devices (got {value}). Add --devices 64.")


def _cluster(args: argparse.Namespace) -> Cluster:
    if args.hosts is not None and args.forward_devices is not None:
        raise ScheduleError(
            f"--forward-devices: not supported with --hosts (got {args.forward_devices}). Remove one."
        )
    parallel = ("tensor_parallel", "pipeline_parallel")
    for dest in ("devices", "global_batch_size", *parallel, "micro_batch_size", "recompute_interval"):
        value = getattr(args, dest)
        if value is not None and value < 1:
            raise ScheduleError(f"--{dest.replace('_', '-')}: must be at least 1 (got {value}).")
    return Cluster(
        1 if args.devices is None else args.devices,
        usable_bytes(parse_bytes(args.memory, "--memory"), args.headroom, "--headroom"),
        args.global_batch_size,
        flops_of(args),
        args.tensor_parallel,
        network_of(args, args.devices or 1),
        args.micro_batch_size,
        args.recompute_interval,
        args.sequence_parallel,
        None if args.sequence_slices is None else _numbers(args.sequence_slices, "--sequence-slices"),
        args.vocabulary_parallel_head,
        args.pipeline_parallel,
    )


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    """Return the numbers in ``"2,4"``, in ascending order."""
    if not re.fullmatch(r"0*[1-9]\d{0,8}(,0*[1-9]\d{0,8})*", text):
        raise ScheduleError(f"{flag}: must be numbers from 1 up, such as 1,4 (got {text!r}).")
    return tuple(sorted({*map(int, text.split(","))}))


def _forward_devices(args: argparse.Namespace, cluster: Cluster) -> Cluster | None:
    if args.forward_devices is None:
        for flag, value in (("slowdown", args.forward_slowdown), ("memory", args.forward_memory)):
            if value is not None:
                raise ScheduleError(f"--forward-{flag}: needs --forward-devices (got {value}). Add it.")
        return None
    slowdown = 1.0 if args.forward_slowdown is None else args.forward_slowdown
    for flag, value in (("--forward-devices", args.forward_devices), ("--forward-slowdown", slowdown)):
        if not value > 0:
            raise ScheduleError(f"{flag}: must be greater than 0 (got {value:g}).")
    memory = args.memory if args.forward_memory is None else args.forward_memory
    memory_bytes = usable_bytes(parse_bytes(memory, "--forward-memory"), args.headroom, "--headroom")
    return cluster.resized(args.forward_devices, memory_bytes, cluster.flops / slowdown)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, int], None]]:
    """Show the progress of a long planning run: in one line of a terminal, which goes at the end, or now and then."""
    next_s = time.monotonic() + _PATIENCE_S
    is_shown, on_terminal = False, sys.stderr.isatty()

    def show(devices: int, count: int, total: int) -> None:
        nonlocal is_shown, next_s
        if time.monotonic() < next_s:
            return
        text = f"plan: {devices:,} devices, {count} of {total} sizes"
        if on_terminal:
            is_shown = True
            print(f"\r{text}", end="", file=sys.stderr, flush=True)
        else:
            next_s = time.monotonic() + _INTERVAL_S
            print(text, file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Context in which Python seldom looks for garbage: the search keeps most of its many small objects."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


# --- text ------------------------------------------------------------------------------------------------------------


def _header(args: argparse.Namespace, cluster: Cluster, model: TrainingSizes, costs: Costs) -> list[str]:
    parameters = format_count(model.device_parameters(linear(1), 0))
    if model.experts is not None:
        parameters = f"{parameters} ({format_count(model.active_parameters)} per token)"
    zero = "1 with several copies of the weights" if model.bytes.sharded else "0"
    hosts, links = describe_network(cluster.links)
    whole = parse_bytes(args.memory, "--memory")
    name = f" ({args.gpu})" if args.gpu else ""
    rates = f"{cluster.flops / 1e12:g} TFLOP/s each"
    if cluster.links.memory_bandwidth:
        rates += f" in matrices, {format_bytes(cluster.links.memory_bandwidth)}/s of memory"
    rows = [f"devices     {cluster.devices} x {format_bytes(whole)}{name}, {rates}"]
    if args.gpu and not GPUS[args.gpu].is_compared:
        driver = " ds_ext has run on CUDA only." if args.gpu.startswith("mi") else ""
        rows.append(
            f"            assumed: published runs on {args.gpu} were not compared with these rates.{driver}"
        )
    default = "" if args.hosts else " (default: 8 devices per host)"
    batch = "" if cluster.micro_batch is None else f", micro-batches of {cluster.micro_batch}"
    b, w = (time / costs.forward for time in (costs.backward_input, costs.backward_weight))
    more = f"{SLICE_TOKENS:,} tokens in a layer's matrices"
    several = [k for k in cluster.slice_numbers(model.seq_length, cluster.devices) if k > 1]
    return [
        f"model       {model_label(args)}, {parameters} parameters, {model.precision}, ZeRO stage {zero}",
        *rows,
        f"memory      {format_bytes(cluster.memory_bytes)} planned, {format_bytes(whole - cluster.memory_bytes)} free: "
        "CUDA's context about 0.5 GB, NCCL 0.1 to 0.4 GB per group, fragmentation",
        f"hosts       {hosts}{default}",
        f"links       {links}",
        f"costs       1 : {b:.3g} : {w:.3g}, forward : backward_input : backward_weight",
        f"batch       {cluster.batch} samples of {model.seq_length:,} tokens per step{batch}",
        *(["head        in parts on all devices of a pipeline"] if cluster.head_parts else []),
        *(["overlap     weights gathered beside the next step"] if model.overlap_across_steps else []),
        *(
            [f"slices      {join_words(several)} of a sample; each one more takes as long as {more}"]
            if several
            else []
        ),
        "not modeled collectives delayed by messages, optimizer step, loss and norm, savings below 1%",
        *(
            ["            small matrices of experts, which are slower, and uneven loads"]
            if model.experts
            else []
        ),
        *(
            ["            what layers of this model have beside those of a Llama"]
            if model.transformer_impl == "transformers"
            else []
        ),
    ]


def _table(ranked: Sequence[ParallelSizes]) -> Iterator[str]:
    """Yield a table of the sizes that are evaluated, and a line with the bounds of the others."""
    cells = [("TP", "SP", "PP", "DP", "b", "N", "schedule", "recompute", "step", "bubble", "memory")]
    cells += [
        (
            str(row.tensor),
            "yes" if candidate.sizes.sequence_parallel else "no",
            str(row.pipeline),
            str(row.data),
            str(candidate.sizes.micro_batch),
            str(candidate.micro_batches),
            candidate.label,
            candidate.recompute_text,
            f"{row.step_s:.4g} s",
            f"{candidate.bubble or 0:.1%}",
            format_bytes(candidate.memory_bytes or 0),
        )
        for row in ranked
        if (candidate := row.candidate) is not None and candidate.sizes is not None
    ]
    yield from aligned(cells, left=(1, 6, 7)) if len(cells) > 1 else ()
    if bounds := [f"{row} {row.least_s:.4g} s" for row in ranked if row.candidate is None]:
        more = f", and {len(bounds) - _BOUNDS} others" if len(bounds) > _BOUNDS else ""
        yield f"not planned, take at least: {', '.join(bounds[:_BOUNDS])}{more}"


def _result_lines(plan: ClusterPlan, cluster: Cluster, model: TrainingSizes) -> Iterator[str]:
    yield from _table(plan.shown[:_SHOWN])
    large = len(plan.ranked) - len(plan.shown)
    if large:
        yield f"too large: {large} others" if large > 1 else "too large: 1 other"
    if plan.refused:
        yield f"not possible: {'; '.join(join_reasons(reason for _, reason in plan.refused))}"
        if cluster.batch % cluster.devices:
            batch = cluster.devices * max(1, round(cluster.batch / cluster.devices))
            yield f"a batch that every DP divides, for more sizes: --global-batch-size {batch}"
    yield ""
    yield _reason(plan)
    if not plan.best.fits and plan.best.candidate is not None:
        yield f"  Use {_remedies(cluster, model)}."


def _reason(plan: ClusterPlan) -> str:
    """Return the best sizes, how much longer the next ones take, and the reason for the schedule."""
    best = plan.best
    second, row, order = plan.second, best.candidate, ""
    if best.fits and row is not None:
        order = (
            f"\n  rank order {row.rank_order}: reductions {row.reductions_s:.3g} s exposed, all-gather "
            f"{row.gather_s:.3g} s"
        )
        if row.gather_s > _LONG_GATHER * (best.step_s or math.inf):
            order += ", or beside the next step with --overlap-across-steps"
    if not best.fits:
        verdict = f"smallest: {best}"
    elif second is None:
        others = "no others are shorter by over 1%" if len(plan.shown) > 1 else "the only sizes that fit"
        verdict = f"best: {best}, {others}"
    else:
        excess = (second.step_s or 0.0) / (best.step_s or 1.0) - 1
        is_tight = second.candidate is not None and second.candidate.tight and row and not row.tight
        drawback = "tight memory" if is_tight else "not simpler"
        comparison = f"{excess:.1%} longer" if excess > 5e-4 else f"as fast, {drawback}"
        if excess < -5e-4:
            comparison = f"{-excess:.1%} shorter, {drawback}"
        verdict = f"best: {best}; next: {second}, {comparison}"
    return f"{verdict}\n  {best.candidates.reason()}{order}"


def _run_lines(
    args: argparse.Namespace, plan: ClusterPlan, run: Mapping[str, Any], late: Mapping[int, float]
) -> Iterator[str]:
    """Yield the memory that stays free, the rates, and the days, GPU-hours and cost of ``--tokens``.

    ``late`` has the days of fewer devices.
    """
    whole, candidate = parse_bytes(args.memory, "--memory"), plan.best.candidate
    need = 0 if candidate is None else candidate.memory_bytes or 0
    free = f"{format_bytes(whole - need)} of {format_bytes(whole)} stay free"
    if candidate is not None and candidate.tight:
        worst = max(0, whole - int(need * (1 + ESTIMATE_ERROR)))
        free += f", {format_bytes(worst)} if the estimate is {ESTIMATE_ERROR:.0%} too low"
    yield f"  memory {format_bytes(need)}: {free}"
    tflops, days = run["model_flops"] / 1e12, run["days"]
    rate = f"{tflops:.1f} TFLOP/s" if tflops >= 0.1 else f"{1e3 * tflops:.3g} GFLOP/s"
    mfu = " (divided by its peak rate: MFU)" if run["mfu"] is None else f": MFU {run['mfu']:.1%}"
    yield f"  {run['tokens_per_s']:,.0f} tokens/s, {rate} of the model per device{mfu}"
    if days is not None:
        most = 1 + STEP_TIME_ERROR
        excess = most * days - (args.days or math.inf)
        more = f" ({excess:,.2g} more than --days)" if excess > 0 else ""
        reason = (
            f", on {run['devices']} devices, the fewest for --days {args.days:g} with "
            f"--global-batch-size {args.global_batch_size}"
            if not args.devices
            else ""
        )
        yield (
            f"  {args.tokens:g} tokens: {days:,.1f} days, up to {most * days:,.1f} with steps "
            f"{STEP_TIME_ERROR:.0%} longer than planned{more}{reason}"
        )
        if args.days and excess <= 0:
            share = days / args.days
            least = "" if run["mfu"] is None else f", MFU {share * run['mfu']:.1%}"
            yield f"  {args.days:g} days need {share * run['tokens_per_s']:,.0f} tokens/s{least}"
        hours, cost = run["gpu_hours"], run["cost"]
        text = f"  {hours:,.0f} GPU-hours, up to {most * hours:,.0f}"
        if cost is not None:
            text += f", cost {cost:,.0f} at {args.price:g} per GPU-hour, up to {most * cost:,.0f}"
        yield text
        share = 1.0 if args.devices else most * days / args.days
        if (fewer := fewer_devices(run["devices"], args.global_batch_size, share)) is not None:
            yield f"  fewer may do with a batch that they divide: --devices {fewer[0]} --global-batch-size {fewer[1]}"
        if missed := [n for n, least_days in late.items() if least_days < math.inf][-_MISSED:]:
            yield f"  {join_words(missed)} devices take more than {args.days:g} days with such steps"


def _other_head(plan: ClusterPlan, cluster: Cluster, model: TrainingSizes, costs: Costs) -> Iterator[str]:
    """Yield the step with the other kind of head, in parts or on the last stage, for some of the sizes."""
    other, best_s = other_head(cluster, model, costs, plan), plan.best.step_s or 0.0
    if other is None or not best_s:
        return
    change, least = (other.time or 0.0) / best_s - 1, _LEAST_WITHOUT if cluster.head_parts else _LEAST_WITH
    word = "without" if cluster.head_parts else "with"
    compared = f"{abs(change):.1%} {'shorter' if change < 0 else 'longer'} ({other.label})"
    more = "" if change < -least else ", of the first sizes above; a plan with the flag tries all"
    yield f"  {word} --vocabulary-parallel-head: {other.time:.4g} s, {compared}{more if word == 'with' else ''}"


def _remedies(cluster: Cluster, model: TrainingSizes) -> str:
    """Return settings outside the search that reduce the memory of a device."""
    remedies = ["more devices", "devices with more memory"]
    if cluster.micro_batch is not None and cluster.micro_batch > 1:
        remedies.append("a smaller --micro-batch-size")
    if not model.bytes.sharded:
        remedies.append("--zero 1")
    if model.precision == "fp32":
        remedies.append("--precision bf16")
    return join_words(remedies)


def _config(
    sizes: ParallelSizes, cluster: Cluster, model: TrainingSizes, tokens: float | None
) -> dict[str, Any]:
    assert sizes.candidate is not None and sizes.candidate.sizes is not None
    section = sizes.section()
    run: dict[str, Any] = {}
    if tokens is not None:
        steps = math.ceil(tokens / (cluster.batch * model.seq_length))
        section["train"] |= {"train_iters": steps} | _SAVES
        section["train"]["save_interval"] = max(1, round(_SAVE_EVERY_S / (sizes.step_s or math.inf)))
        run = _run_keys(steps)
    return {
        "train_batch_size": cluster.batch,
        "train_micro_batch_size_per_gpu": sizes.candidate.sizes.micro_batch,
        **({} if model.precision == "fp32" else {model.precision: {"enabled": True}}),
        "zero_optimization": {"stage": sizes.candidate.sizes.zero_stage},
        "optimizer": {"type": "AdamW", "params": _ADAM},
        **run,
        "ds_ext": section,
    }


def _run_keys(steps: int) -> dict[str, Any]:
    """Return the keys of a whole run: usual values, as those of the optimizer."""
    params = {"decay_style": "cosine", "total_num_steps": steps, "min_lr": _LEAST_RATE}
    warmup = {"warmup_num_steps": min(math.ceil(_WARMUP * steps), steps - 1)}
    return {"gradient_clipping": 1.0, "scheduler": {"type": "MegatronLR", "params": {**params, **warmup}}}


def _text(config: dict[str, Any]) -> str:
    """Return a JSON with one line per key and per key of "ds_ext", as in configs/."""
    lines = []
    for key, value in config.items():
        text = json.dumps(value)
        if key == "ds_ext":
            inner = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            text = f"{{\n{inner}\n  }}"
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"


# --- JSON ------------------------------------------------------------------------------------------------------------


def _as_dict(plan: ClusterPlan, config: dict[str, Any] | None, run: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "best": [_sizes_as_dict(sizes) for sizes in plan.shown[:_SHOWN]],
        "reason": _reason(plan),
        "fits": plan.best.fits,
        "run": run,
        "refused": [{"sizes": sizes, "reason": reason} for sizes, reason in plan.refused],
        "config": config,
    }


def _sizes_as_dict(sizes: ParallelSizes) -> dict[str, Any]:
    candidate = sizes.candidate
    result: dict[str, Any] = {
        "tensor_parallel_size": sizes.tensor,
        "pipeline_parallel_size": sizes.pipeline,
        "data_parallel_size": sizes.data,
        "planned": candidate is not None,
        "fits": sizes.fits,
        "reason": sizes.candidates.reason(),
    }
    if candidate is None or candidate.sizes is None:
        result["least_step_s"] = sizes.least_s
    else:
        result |= {
            "sequence_parallel": candidate.sizes.sequence_parallel,
            "micro_batch_size": candidate.sizes.micro_batch,
            "micro_batches": candidate.micro_batches,
            "schedule": candidate.schedule,
            "sequence_slices": candidate.slices,
            "slice_lengths": candidate.slice_lengths,
            "schedule_options": candidate.settings,
            "recompute": candidate.recompute,
            "recompute_interval": candidate.sizes.recompute_interval,
            "step_s": sizes.step_s,
            "bubble": candidate.bubble,
            "memory_bytes": candidate.memory_bytes,
            "rank_order": str(candidate.rank_order),
            "exposed_reduction_s": candidate.reductions_s,
            "gather_s": candidate.gather_s,
        }
    return result
