"""Set-up that the training scripts share: checked job plan, model sizes, data, plan text.

Checks that do not need torch run before torch is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ...config.deepspeed_json import precision
from ...config.job import JobConfig, require_section
from ...environment import has_bf16_instructions, is_on_cpu, rank, world_size
from ...errors import ConfigError, Problems, ScheduleError
from ...launch.job_facts import checksum, setting_facts
from ...launch.launcher import require_restarts
from ...launch.roll_call import Facts
from ...model.config import TransformerConfig
from ...model.field_flags import fields_of, flags_of
from ...parallel.crossing import require_slots
from ...parallel.hosts import Hosts
from ...parallel.partition import BALANCED, StageWork, layer_boundaries, stage_weights
from ...parallel.slices import BALANCED as BALANCED_SLICES
from ...pipe_schedules.costs import Costs
from ...planner.activation_memory import within_activation_memory
from ...planner.auto import training_sizes
from ...planner.job_plan import JobPlan, StagePlan, make_stage_plan
from ...planner.job_text import describe
from ...planner.memory import memory, model_parameters, rank_parameters
from ...planner.stage_costs import slice_costs, slice_tokens
from ...planner.text import HEADROOM, format_bytes, usable_bytes
from ...planner.traffic import traffic
from ...planner.training_sizes import TrainingSizes
from .arguments import FLAGS_OF_THE_JSON, finished_json, read_job
from .hosts import describe_hosts, hosts_of_flags, is_placed, layout_on
from .preflight import check_forward_hosts, check_job, set_up_outputs
from .script_flags import Model
from .section_flags import value_at

if TYPE_CHECKING:
    from ...engine.batches import MapDataset, MicroBatches

Config = TypeVar("Config", bound=TransformerConfig)
logger = logging.getLogger(__name__)
# Flags that may differ between hosts: only rank 0 reads them, or the content of their files is compared.
_PER_HOST = frozenset(
    {
        *(
            "local_rank",
            "deepspeed",
            "deepspeed_config",
            "metrics_file",
            "dry_run",
            "verbose",
            "write_config",
        ),
        *(
            "hosts",
            "notes",
            "data_path",
            "hf_model",
            "tokenizer",
            "tokenizer_type",
            "vocab_file",
            "merge_file",
        ),
    }
)
# Sizes of the model, whose checks need all of them.
_SIZES = frozenset(
    flag.key for name, flag in flags_of(TransformerConfig).items() if flag.kind is int and name != "seed"
)
# A JSON with one of these keys from flags is printed.
_SHOWN_KEYS = frozenset(
    {"scheduler.params", "tensorboard.output_path", "fp16.loss_scale", "zero_optimization.stage"}
)


def plan_job(
    prog: str,
    argv: Sequence[str],
    model: Model,
    make_config: Callable[[argparse.Namespace, StagePlan | None], Config],
    before: list[str],
    after: list[str],
) -> tuple[argparse.Namespace, JobPlan, Config, list[int]]:
    """Return the flags, the job plan, the model's config and the boundaries of the stages.

    All checks run before a process group is created. ``--write-config`` ends the process. A JSON that flags have
    completed is printed.

    Args:
        make_config: returns the model's config, for the flags and the plan; None: the plan has problems.
        before, after: names of the layers before and after the transformer layers.
    """
    problems = Problems()
    args, job = read_job(prog, argv, model, problems)
    if args.write_config:
        problems.raise_all()
        assert job is not None
        _write_json(args, finished_json(prog, argv, model, args, job))
    if job is not None:
        with problems.collect():
            require_section(job)
    load = args.load
    check_job(args, job and job.deepspeed, problems)
    # These import torch.
    from ..data.datasets import parse_split
    from .checkpoint_fit import check_load

    plan = None if job is None else _make_plan(args, job, problems)
    config = boundaries = None
    if not problems.undecided & {"hf_model", *_SIZES}:
        with problems.collect():
            config = make_config(args, plan)
    with problems.collect():
        parse_split(args.split)
    if plan is not None and config is not None:
        with problems.collect():
            _check_splits(args, plan, model)
        with problems.collect():
            config.check_tensor_parallel(plan.layout.tensor_parallel_size)
        with problems.collect():
            if "load" not in problems.undecided:
                check_load(args, config)
        with problems.collect():
            boundaries = stage_boundaries(args, plan, before, layers_after(plan, after), config)
    problems.raise_all()
    assert job is not None and isinstance(plan, JobPlan) and config is not None and boundaries is not None
    if rank() == 0 and (job.flags.keys() & _SHOWN_KEYS or job.path is None):
        # With the folder of a restart, which does not exist at the first start.
        flags = argparse.Namespace(**{**vars(args), "load": load})
        text = json.dumps(finished_json(prog, argv, model, flags, job), indent=2)
        print(f"JSON of this job (--write-config FILE saves it):\n{text}\n", flush=True)
    if not args.dry_run:
        set_up_outputs(args, job.deepspeed)
    return args, plan, config, boundaries


def _make_plan(args: argparse.Namespace, job: JobConfig, problems: Problems) -> StagePlan | None:
    """Return the plan of the job, and set the flags that it decides; with a problem, the part without it."""
    from ...engine import check_deepspeed

    with problems.collect():
        check_deepspeed(job.deepspeed, job.flags)
    launched, plan = world_size() > 1 or not args.dry_run, None
    with problems.collect():
        if launched and job.ds_ext.recovery is not None:
            require_restarts()
    with problems.collect():
        hosts = hosts_of_flags(args)
        plan = make_stage_plan(job, world_size() if launched else hosts and hosts.world_size)
        check_forward_hosts(plan.layout, job.ds_ext.fbd.forward_hosts)
        if args.hosts is not None and hosts is not None:
            require_slots(plan.layout, hosts)
            plan = replace(plan, layout=layout_on(plan.layout, hosts, job.ds_ext.fbd.forward_hosts))
        _take_candidate(args, plan)
        plan = plan.complete(job)
    return plan


def _check_splits(args: argparse.Namespace, plan: StagePlan, model: Model) -> None:
    settings = plan.settings
    if settings.vocabulary_parallel_head and model == "bert":
        raise ConfigError(
            "ds_ext.vocabulary_parallel_head: BERT's head has a bias and cannot be divided (got true). Remove it."
        )
    if settings.sequence_slices == 1:
        return
    if model == "bert":
        raise ConfigError(
            f"ds_ext.sequence_slices: BERT's tokens attend to later ones (got {settings.sequence_slices}). Use 1."
        )
    if args.transformer_impl == "transformer_engine":
        raise ConfigError(
            f"ds_ext.sequence_slices: needs --transformer-impl local (got {args.transformer_impl} with "
            f"{settings.sequence_slices})."
        )


def _take_candidate(args: argparse.Namespace, plan: StagePlan) -> None:
    """Set the recomputation and the layers of the stages to the planner's choice, unless flags set them."""
    best = plan.candidates and plan.candidates.best
    if args.recompute_granularity is None:
        args.recompute_granularity = best.recompute if best else "none"
    if args.stage_layers in (None, BALANCED) and best and best.layers:
        args.stage_layers = ",".join(map(str, best.layers))


def _write_json(args: argparse.Namespace, config: dict[str, Any]) -> NoReturn:
    if rank() == 0:
        try:
            Path(args.write_config).write_text(f"{json.dumps(config, indent=2)}\n")
        except OSError as error:
            raise ConfigError(
                f"--write-config: cannot be written (got {args.write_config}: {error.strerror}). Use another path."
            ) from None
        print(f"wrote {args.write_config}", flush=True)
    raise SystemExit(0)


def model_fields(args: argparse.Namespace, plan: StagePlan | None) -> dict[str, Any]:
    fields = fields_of(TransformerConfig, vars(args))
    return fields | ({"sequence_parallel": plan.job.ds_ext.sequence_parallel} if plan else {})


def layers_after(plan: StagePlan, after: list[str]) -> list[str]:
    """Return the names of the layers that follow the transformer layers. No stage contains a head in parts."""
    return after[:-1] if plan.settings.vocabulary_parallel_head else after


def stage_boundaries(
    args: argparse.Namespace, plan: StagePlan, before: list[str], after: list[str], model: TransformerConfig
) -> list[int]:
    """Return stages + 1 indices of pipeline layers: stage s has the layers from element s up to element s + 1.

    Only the number of the layers ``before`` and ``after`` the transformer layers matters. See
    :func:`ds_ext.parallel.partition.layer_boundaries`.
    """
    return layer_boundaries(
        args.num_layers,
        len(before),
        len(after),
        plan.layout.placement,
        plan.schedule.name,
        args.stage_layers,
        _end_work(plan, model) if args.stage_layers == BALANCED else None,
    )


def _end_work(plan: StagePlan, model: TransformerConfig) -> tuple[float, float]:
    """Return the work of the layers before and after the transformer layers. A lookup in the embedding counts as 0."""
    in_parts = plan.settings.vocabulary_parallel_head
    return 0.0, 0.0 if in_parts else model.head_work(model.repeated_share)


def with_stage_work(
    plan: JobPlan,
    boundaries: list[int],
    before: list[str],
    after: list[str],
    model: TransformerConfig,
) -> JobPlan:
    """Return the plan with the work of the stages, balanced slices, and the order that fits "max_activation_memory".

    Arguments as for :func:`describe_plan`.
    """
    ends, work = (len(before), len(after)), _end_work(plan, model)
    placement, schedule = plan.layout.placement, plan.timetable.schedule
    balanced, layers = boundaries, boundaries[-1] - sum(ends)
    if layers >= placement.stages:
        balanced = layer_boundaries(layers, *ends, placement, schedule, BALANCED, work)
    stages, even = (stage_weights(bounds, *ends, work) for bounds in (boundaries, balanced))
    settings = plan.settings
    slices = None
    if settings.sequence_slices > 1:
        shards = plan.layout.tensor_parallel_size if settings.sequence_parallel else 1
        tokens = slice_tokens(model, settings.sequence_slices, settings.slice_lengths, shards)
        slices = slice_costs(Costs(), model, tokens).slices
        if settings.slice_lengths == BALANCED_SLICES:
            plan = _with_settings(plan, slice_lengths=[*tokens])
    in_parts, head, parts = settings.vocabulary_parallel_head, _head_work(plan, model), None
    if after[-1:] == ["head"] and layers >= placement.stages:
        body = len(before), len(after) - 1
        weights = stage_weights(layer_boundaries(layers, *body, placement, schedule), *body)
        parts = StageWork(weights, None, head=head)
    plan = plan.with_work(StageWork(stages, even, slices, head if in_parts else 0.0, parts))
    if settings.max_activation_memory is not None:
        plan = within_activation_memory(plan, _model_sizes(plan, boundaries, *ends, model))
        plan = _with_settings(plan, max_activation_memory=None)
    return plan


def _head_work(plan: JobPlan, model: TransformerConfig) -> float:
    """Return the work of a head in parts, relative to 1/D of the layers."""
    work = replace(model, chunked_loss=False).head_work(model.repeated_share)
    return work * plan.layout.placement.devices_per_pipe / model.num_layers


def _with_settings(plan: JobPlan, **change: Any) -> JobPlan:
    deepspeed = {**plan.job.deepspeed, "ds_ext": {**plan.job.deepspeed["ds_ext"], **change}}
    return replace(
        plan, job=replace(plan.job, deepspeed=deepspeed, ds_ext=plan.settings.model_copy(update=change))
    )


def job_facts(args: argparse.Namespace, plan: JobPlan, vocab_size: int) -> Facts:
    """Return facts that must be identical on all ranks."""
    from ..data.meta import fingerprint

    flags = {
        f"--{name.replace('_', '-')}": value
        for name, value in vars(args).items()
        if name not in _PER_HOST | FLAGS_OF_THE_JSON
    }
    section = {key: value for key, value in plan.job.deepspeed.get("ds_ext", {}).items() if key != "train"}
    facts: Facts = {}
    if args.hf_model:
        from ...hf.folder import ModelFolder

        facts["contents of --hf-model"] = ModelFolder(Path(args.hf_model)).fingerprint()
    return {
        **facts,
        **setting_facts({**plan.job.deepspeed, "ds_ext": section}),
        **setting_facts(flags),
        "contents of --data-path": fingerprint(args.data_path),
        "vocabulary": str(vocab_size),
        "layout": checksum([repr(plan.layout.groups()).encode()]),
        "timetable": checksum(" ".join(map(str, order)).encode() for order in plan.timetable.orders),
    }


def micro_batches(
    args: argparse.Namespace,
    plan: JobPlan,
    build: Callable[[tuple[int, int, int]], Sequence[MapDataset]],
    collate: Callable[[Sequence[Any]], Any] | None = None,
) -> tuple[MicroBatches, MicroBatches | None]:
    """Return the micro-batches for training and validation of the whole run.

    The samples for training begin with those that the checkpoint of ``--load`` has consumed, in any batch size.

    Args:
        build: returns the train, valid and test datasets for given numbers of samples; not called in a dry run
            without data.
        collate: makes a micro-batch of samples; None: they have the same shape.
    """
    from ...engine.batches import MicroBatches
    from .checkpoint_fit import position

    batch, size = plan.sizes.train_batch_size, plan.sizes.micro_batch_size
    step, consumed = position(args.load)
    samples = consumed + max(0, args.train_iters - step) * batch
    train, valid, _ = build((samples, args.eval_iters * batch, 0)) if args.data_path else ([], [], [])
    evaluated = MicroBatches(valid, size, collate=collate) if args.eval_iters else None
    return MicroBatches(train, size, collate=collate), evaluated


def describe_plan(
    args: argparse.Namespace,
    plan: JobPlan,
    boundaries: list[int],
    before: list[str],
    after: list[str],
    model: TransformerConfig,
    token_bytes: int = 0,
    hosts: Hosts | None = None,
    weights: str = "",
    has_experts: bool = False,
) -> str:
    """Return the text of the plan.

    Args:
        boundaries: from :func:`stage_boundaries`.
        before, after: names of the layers before and after the transformer layers.
        token_bytes: bytes per token that a message carries in addition to its activation.
        hosts: hosts of the job; None: unknown.
        weights: text on the folder with the initial weights, and on their number; empty: the number is estimated.
        has_experts: ``model`` lacks the experts, so that parameters and memory of the ranks are unknown.
    """
    layer_names = [*before, *(f"layer {i}" for i in range(args.num_layers)), *after]
    message_bytes = _message_bytes(args, plan, token_bytes)
    sizes = _model_sizes(plan, boundaries, len(before), len(after), model, args.hosts)
    verbose = args.verbose or plan.job.ds_ext.print_plan == "all"
    host_lines = _host_lines(args, plan, hosts, sizes, message_bytes, verbose)
    settings = [f"rate      {_rate(plan.job.deepspeed)}", *args.notes, *_machine_notes(args, plan, sizes)]
    if has_experts:
        settings.append("note: memory is not estimated for models with experts; times are without them")
    text = describe(
        plan,
        boundaries=boundaries,
        layer_names=layer_names,
        message_bytes=_longest_slice(args, plan, message_bytes),
        model=weights or f"{round(model_parameters(sizes)):,} parameters (estimated)",
        parameters=()
        if has_experts
        else [round(count) for count in rank_parameters(sizes, plan.layout.placement)],
        memory=() if has_experts else memory(plan.timetable, sizes, plan.settings.slice_lengths),
        defers=args.transformer_impl != "transformer_engine",
        hosts=None if hosts is None else list(map(hosts.host, range(hosts.world_size))),
        settings=settings,
        verbose=verbose,
        gpus=args.dry_run or _has_gpus(),
    )
    return "\n".join([text, *host_lines])


def check_memory(
    args: argparse.Namespace,
    plan: JobPlan,
    boundaries: list[int],
    before: list[str],
    after: list[str],
    model: TransformerConfig,
) -> None:
    """Raise ConfigError if this rank's tensors need more memory than is free. Arguments as for :func:`describe_plan`.

    A rank whose tensors take more than the share that plans use logs a warning.
    """
    from ...engine.deepspeed_api.device import free_bytes

    free = free_bytes()
    if free is None:
        return
    sizes = _model_sizes(plan, boundaries, len(before), len(after), model, args.hosts)
    device, _, _ = plan.layout.coordinates(rank())
    needed = memory(plan.timetable, sizes, plan.settings.slice_lengths)[device].total
    text = f"memory: rank {rank()} needs an estimated {format_bytes(needed)} for tensors (free: {format_bytes(free)})."
    if needed > free:
        slices = _fitting_slices(plan, sizes, device, usable_bytes(free, HEADROOM, "headroom"))
        fix = f"--sequence-slices {slices}, " if slices and args.transformer_impl == "local" else ""
        raise ConfigError(
            f"{text} Use {fix}smaller micro-batches, --recompute-granularity full or more devices; "
            f"`python -m ds_ext plan --memory {format_bytes(free).replace(' ', '')}` lists what fits."
        )
    if needed > usable_bytes(free, HEADROOM, "headroom"):
        logger.warning("%s Allocators and communicators may need more than the rest.", text)


def _fitting_slices(plan: JobPlan, sizes: TrainingSizes, device: int, free: int) -> int | None:
    for slices in (2, 4, 8, 16, 32, 64):
        shards = plan.layout.tensor_parallel_size if sizes.sequence_parallel else 1
        if (
            slices <= plan.timetable.slices
            or sizes.seq_length % (slices * shards)
            or not plan.schedule.has_slices
        ):
            continue
        with contextlib.suppress(ScheduleError):
            timetable = plan.schedule.timetable(
                plan.settings.pipeline_parallel_size,
                plan.sizes.micro_batches,
                plan.options,
                slices=slices,
            )
            if memory(timetable, sizes)[device].total <= free:
                return slices
    return None


def _machine_notes(args: argparse.Namespace, plan: JobPlan, sizes: TrainingSizes) -> list[str]:
    """Return notes on what differs with the machine: ranks, and on CPUs memory of attention and the speed of bf16."""
    notes = []
    if args.dry_run and args.hosts is None and world_size() == 1:
        notes.append("note: without --hosts a dry run plans the fewest ranks: one pipeline group")
    if sizes.attention_scores:
        notes.append(
            "note: attention with dropout stores its scores on CPUs, not on GPUs (--dry-run --hosts)"
        )
    if args.dry_run or _has_gpus() or precision(plan.job.deepspeed) != "bf16":
        return notes
    if not has_bf16_instructions():
        notes.append('note: this CPU has no bf16 instructions: steps are faster without the section "bf16"')
    return notes


def _has_gpus() -> bool:
    import torch

    return torch.cuda.is_available()


def _rate(config: Mapping[str, Any]) -> str:
    params = value_at(config, "scheduler.params") or {}
    text = f"{value_at(config, 'optimizer.params.lr') or 'the default of the optimizer'}, "
    if value_at(config, "scheduler.type") != "MegatronLR":
        return text + (value_at(config, "scheduler.type") or "constant")
    style = params.get("decay_style", "linear")
    text += style if style == "constant" else f"{style} to {params.get('min_lr', 0)}"
    steps, warmup = params.get("total_num_steps", 0), params.get("warmup_num_steps", 0)
    return f"{text} in {steps:,.10g} steps, warm-up {warmup:,.10g}"


def _host_lines(
    args: argparse.Namespace,
    plan: JobPlan,
    hosts: Hosts | None,
    sizes: TrainingSizes,
    message_bytes: int,
    verbose: bool,
) -> list[str]:
    forward_hosts = plan.job.ds_ext.fbd.forward_hosts
    if hosts is None or len(hosts.slots) == 1 or not is_placed(plan.layout, forward_hosts):
        return []
    volumes = traffic(sizes, plan.layout.placement, plan.sizes.micro_batches)
    volumes = replace(volumes, message=message_bytes)
    lines = describe_hosts(plan.layout, hosts, volumes, plan.sizes.micro_batches, verbose)
    if args.dry_run and args.hosts is None:
        lines.append("note: --hosts: every host is assumed to have as many ranks as the first")
    return lines


def _message_bytes(args: argparse.Namespace, plan: JobPlan, token_bytes: int) -> int:
    """Return the bytes of a micro-batch between two stages: activations, and ``token_bytes`` per token."""
    number_bytes = 4 if precision(plan.job.deepspeed) == "fp32" else 2
    tokens = plan.sizes.micro_batch_size * args.seq_length
    # With sequence parallelism only the activations are sliced.
    slices = plan.layout.tensor_parallel_size if plan.job.ds_ext.sequence_parallel else 1
    return tokens // slices * args.hidden_size * number_bytes + tokens * token_bytes


def _longest_slice(args: argparse.Namespace, plan: JobPlan, message_bytes: int) -> int:
    lengths, count = plan.settings.slice_lengths, plan.settings.sequence_slices
    return (
        message_bytes // count
        if isinstance(lengths, str)
        else message_bytes * max(lengths) // args.seq_length
    )


def _model_sizes(
    plan: JobPlan,
    boundaries: list[int],
    num_before: int,
    num_after: int,
    model: TransformerConfig,
    hosts: str | None = None,
) -> TrainingSizes:
    """Return the sizes of the job. A dry run with ``hosts`` is that of a cluster with GPUs."""
    layers = [stop - start for start, stop in pairwise(boundaries)]
    layers[0] -= num_before
    layers[-1] -= num_after
    sizes = training_sizes(
        plan.job.deepspeed,
        model,
        plan.sizes.micro_batch_size,
        plan.layout.tensor_parallel_size,
        plan.layout.data_parallel_size,
        is_on_cpu() and hosts is None,
    )
    return replace(sizes, stage_layers=tuple(layers))
