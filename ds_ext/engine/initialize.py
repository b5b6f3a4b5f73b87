"""``ds_ext.initialize``, with the arguments and the result of ``deepspeed.initialize``."""

from __future__ import annotations

import copy
import functools
import logging
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.config import DeepSpeedConfig

from ..comm.groups import limit_waits
from ..config.deepspeed_check import check_deepspeed, unknown_keys
from ..config.deepspeed_json import (
    fp32_sums_of_bf16,
    half_through_zero,
    precision,
    require_monitors,
    zero_stage,
)
from ..config.job import DsExtConfig, JobConfig, load_config
from ..config.merge import merge
from ..config.schedulers import MegatronLR
from ..environment import rank, restart_count
from ..errors import ANSWERS, ConfigError
from ..launch.job_facts import code_facts, setting_facts
from ..launch.launcher import require_restarts
from ..launch.roll_call import compare, one_refusal
from ..parallel.fbd import FORWARD_ROLE, DisaggregatedLayout
from ..parallel.slices import BALANCED, EQUAL
from ..planner.job_plan import JobPlan
from .all_ranks import from_rank_0, on_all_ranks
from .batches import MapDataset, MicroBatches
from .deepspeed_api.muon import fill_halves, import_muon, tag_for_muon
from .deepspeed_api.names import untested_versions
from .engine import PipelineEngine
from .facts import data_facts, optimizer_facts, plan_text, run_facts, stage_facts
from .fbd.backward import BackwardRole
from .fbd.forward import ForwardRole
from .modes import set_first_modes
from .module import PipelineModule
from .placeholders import fill_groups, has_trained
from .start import check_precision, init_distributed
from .types import Function, Groups, Json, Optimizer, ParameterGroup, Parameters, Scheduler, Source
from .weights.gathers import repeat_lists, scheduler_of_parts, split_by_stage

logger = logging.getLogger(__name__)

_NOT_ON_FORWARD_RANKS = ("optimizer", "scheduler", "zero_optimization", "fp16", "bf16", "bfloat16")
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def initialize(
    args: Namespace | None = None,
    model: PipelineModule | None = None,
    optimizer: Optimizer = None,
    model_parameters: Iterable[Parameters] | None = None,
    training_data: MapDataset | None = None,
    lr_scheduler: Scheduler = None,
    distributed_port: int = 29500,
    mpu: object = None,
    dist_init_required: bool | None = None,
    collate_fn: Function | None = None,
    config: str | Json | None = None,
    mesh_param: object = None,
    config_params: str | Json | None = None,
    *,
    shuffle: bool = False,
    repeat: bool = True,
) -> tuple[PipelineEngine, Optimizer, object, Scheduler]:
    """Build the engine for a :class:`ds_ext.PipelineModule`.

    Returns ``(engine, optimizer, training_dataloader, lr_scheduler)`` as ``deepspeed.initialize`` does, but
    ``training_dataloader`` is None, because the engine fetches the micro-batches of ``training_data`` by id. Rank 0
    prints the plan unless ``print_plan`` in the JSON is false.

    Args:
        config: DeepSpeed JSON (path or dict). A key that the PipelineModule's JSON or arguments also set must have the
            same value; None: use the module's JSON.
        shuffle: read ``training_data`` in a random order, a new one in every pass, which depends on ``random_seed`` of
            the engine only. False: in the order of the dataset, as in DeepSpeed.
        repeat: start ``training_data`` again at its end, as in DeepSpeed. False: a step for which too few samples are
            left raises ConfigError before it begins.

    Raises:
        ConfigError: the model is not a ds_ext.PipelineModule, ``config`` contradicts it, no batch size is set,
            DeepSpeed rejects the JSON, the device does not support the precision, ``training_data`` cannot be indexed,
            or the ranks' jobs differ.
    """
    if not isinstance(model, PipelineModule):
        raise ConfigError(
            f"model: must be a ds_ext.PipelineModule (got {type(model).__name__}). Build it from the same list of "
            f"layers: ds_ext.PipelineModule(layers, config, loss_fn=...). For Hugging Face's models: "
            f"layers, loss_fn = ds_ext.from_transformers(model). For trainers: {ANSWERS}."
        )
    init_distributed()
    with one_refusal():
        if mpu is not None or mesh_param is not None:
            raise ConfigError("mpu, mesh_param: must be None. The PipelineModule has its own grid.")
        sources = (config, config_params, getattr(args, "deepspeed_config", None))
        source = next((source for source in sources if source is not None), None)
        model.complete_plan(model.job if source is None else merge(model.job, load_config(source)))
        job = model.plan.job
        _require_samples_by_index(training_data)
        check_precision(job)
        _check_json(job, has_optimizer=optimizer is not None, has_scheduler=lr_scheduler is not None)
    config_dict, lr_scheduler = _engine_config(model.plan, lr_scheduler)
    # The constructors below communicate.
    limit_waits(job.ds_ext.transport_options.timeout_s)
    parameters = model.parameters() if model_parameters is None else model_parameters  # as DeepSpeed
    groups = [_list_parameters(group) for group in parameters]
    if job.ds_ext.overlap_across_steps and not hasattr(optimizer, "param_groups"):
        groups, model.group_sources = split_by_stage(groups, model)
        config_dict, lr_scheduler = _expand_lists(config_dict, lr_scheduler, model.group_sources)
    data = data_facts(model, training_data)
    compare(
        {
            **code_facts(),
            **setting_facts({k: v for k, v in job.deepspeed.items() if k != "ds_ext"}),
            **setting_facts(job.ds_ext.model_dump(exclude={"train"}), "ds_ext."),
            **optimizer_facts(optimizer),
            **setting_facts({"shuffle": shuffle, "repeat": repeat}, "initialize."),
        },
        replica_facts={
            **stage_facts(model, getattr(optimizer, "param_groups", groups)),
            **data,
        },
    )
    _prepare_parameters(model, optimizer, groups, config_dict)
    model.random_seed = from_rank_0(torch.initial_seed)
    set_first_modes(model)
    facts = run_facts(model, data)
    _print_plan(model, facts)
    engine = _make_engine(
        model,
        config_dict,
        args=_remove_config(args),
        optimizer=optimizer,
        model_parameters=groups,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=model.mpu(),
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
    )
    engine.config = job.deepspeed  # as the user wrote it
    if isinstance(engine.batches, MicroBatches):
        engine.batches.repeat = repeat
        engine.batches.shuffle_seed = (lambda: model.random_seed) if shuffle else None
    engine.run_facts = {**facts, "run": engine.run.id}
    engine._configure_python_gc()
    limit_waits(job.ds_ext.transport_options.timeout_s)
    return engine, engine.optimizer, None, engine.lr_scheduler


def _check_json(job: JobConfig, has_optimizer: bool, has_scheduler: bool) -> None:
    """Raise ConfigError for a JSON that cannot train here. Rank 0 logs unknown keys.

    The JSON needs no optimizer or scheduler if the script passes its own.
    """
    settings = job.ds_ext
    if settings.recovery is not None:
        require_restarts()
    _require_resolved(settings)
    if not has_optimizer:
        _require_optimizer_for_zero(job.deepspeed)
    check_deepspeed(job.deepspeed, optimizer=not has_optimizer, scheduler=not has_scheduler)
    if rank() == 0:
        require_monitors(job.deepspeed)
        for line in untested_versions():
            logger.warning("%s", line)
        if unknown := unknown_keys(job.deepspeed):
            logger.warning("unknown keys without effect: %s", ", ".join(unknown))


def _require_resolved(settings: DsExtConfig) -> None:
    """Raise ConfigError for settings that need the sizes of the model, which only ds_ext's scripts resolve."""
    reason = "needs the sizes of the model, which only ds_ext's scripts know"
    if settings.slice_lengths == BALANCED and settings.sequence_slices > 1:
        raise ConfigError(
            f"slice_lengths: {BALANCED!r} {reason}. List the tokens of the {settings.sequence_slices} slices, or use "
            f"{EQUAL!r}."
        )
    if settings.max_activation_memory is not None:
        raise ConfigError(
            f"max_activation_memory: {reason} (got {settings.max_activation_memory}). Use max_activations in "
            f"schedule_options."
        )


def _engine_config(plan: JobPlan, lr_scheduler: Scheduler) -> tuple[dict[str, Any], Scheduler]:
    """Return DeepSpeed's JSON with all batch sizes, and the scheduler. MegatronLR moves from the JSON to the latter."""
    sizes = plan.sizes
    config = dict(
        fp32_sums_of_bf16(half_through_zero(plan.job.deepspeed)),
        train_micro_batch_size_per_gpu=sizes.micro_batch_size,
        gradient_accumulation_steps=sizes.gradient_accumulation_steps,
        train_batch_size=sizes.train_batch_size,
        wall_clock_breakdown=False,  # its timers synchronize the device around calls that this engine does not make
    )
    scheduler = config.get("scheduler") or {}
    if lr_scheduler is None and scheduler.get("type") == "MegatronLR":
        # DeepSpeed makes only its own schedulers and torch's from the JSON.
        lr_scheduler = functools.partial(MegatronLR, **scheduler["params"])
        del config["scheduler"]
    return config, lr_scheduler


def _list_parameters(group: Parameters) -> Parameters:
    """Return a parameter, or a parameter group whose iterator of parameters is replaced by a list."""
    if not isinstance(group, Mapping):
        return group
    parameters = group["params"]
    return {**group, "params": [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)}


def _expand_lists(
    config: dict[str, Any], lr_scheduler: Scheduler, sources: Sequence[int]
) -> tuple[dict[str, Any], Scheduler]:
    """Return the JSON and the scheduler, with lists of a value per parameter group expanded to the split groups."""
    scheduler = config.get("scheduler", {})
    if "params" in scheduler:
        params = repeat_lists(scheduler["params"], sources)
        config = {**config, "scheduler": {**scheduler, "params": params}}
    if callable(lr_scheduler):
        lr_scheduler = functools.partial(scheduler_of_parts, lr_scheduler, sources)
    return config, lr_scheduler


def _prepare_parameters(model: PipelineModule, optimizer: Optimizer, groups: Groups, config: Json) -> None:
    """Check the parameters, and add placeholders to groups that are empty on this rank.

    All ranks must call this together. An optimizer with groups replaces ``groups``.
    """
    deepspeed_json, has_groups = model.job.deepspeed, hasattr(optimizer, "param_groups")
    all_groups = optimizer.param_groups if has_groups else groups
    on_all_ranks(lambda: _require_whole_experts(model))
    if optimizer is not None or "optimizer" in config:
        _require_parameters(model, None if has_groups else groups)
    if zero_stage(half_through_zero(deepspeed_json)):
        _require_weights_of_zero(model, all_groups, is_half=precision(deepspeed_json) != "fp32")
    if str(config.get("optimizer", {}).get("type")).lower() == "muon" and optimizer is None:
        tag_for_muon(model)
        fill_halves(model, groups)
    fill_groups(model, all_groups)


def _print_plan(model: PipelineModule, facts: Json) -> None:
    """Print the plan, or log its notes without ``print_plan``, on rank 0 at the first start."""
    print_plan = model.job.ds_ext.print_plan
    if rank() != 0 or restart_count():
        return
    if not print_plan:
        for note in model.job.notes:  # otherwise part of the plan
            logger.warning("%s", note)
    elif not model.plan_is_given:
        print(f"{plan_text(model, facts, verbose=print_plan == 'all')}\n", end="", flush=True)


def _make_engine(model: PipelineModule, config: Json, **kwargs: Any) -> PipelineEngine:
    """Return the engine for this rank's role. ``config`` is DeepSpeed's JSON with all batch sizes."""

    def make_config(role_config: Json) -> DeepSpeedConfig:
        return DeepSpeedConfig(dict(role_config), model.mpu())

    import_muon()  # before DeepSpeed does
    layout, timeout_s = model.layout, model.plan.settings.transport_options.timeout_s
    if not isinstance(layout, DisaggregatedLayout):
        return PipelineEngine(model=model, config=config, config_class=make_config(config), **kwargs)
    if layout.role(dist.get_rank()) != FORWARD_ROLE:
        role = BackwardRole(layout, timeout_s)
        return PipelineEngine(
            role=role, model=model, config=config, config_class=make_config(config), **kwargs
        )
    forward_config = {key: value for key, value in config.items() if key not in _NOT_ON_FORWARD_RANKS}
    forward_config["gradient_accumulation_steps"] *= layout.placement.replicas
    half = _HALF.get(precision(config))
    for parameter in model.parameters():  # not buffers, as in DeepSpeed on backward ranks
        if half is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(half)
    return PipelineEngine(
        role=ForwardRole(layout, timeout_s),
        model=model,
        config=forward_config,
        config_class=make_config(forward_config),
        **{**kwargs, "optimizer": None, "model_parameters": None, "lr_scheduler": None},
    )


def _require_samples_by_index(training_data: Source) -> None:
    if training_data is None:
        return
    has_both = all(hasattr(type(training_data), name) for name in ("__len__", "__getitem__"))
    if not has_both or isinstance(training_data, torch.utils.data.IterableDataset):
        raise ConfigError(
            f"training_data: needs __len__ and __getitem__, because each rank fetches samples by index (got "
            f"{type(training_data).__name__}). For a stream, create one iterator and pass it to every step: "
            f"iterator = iter(loader); engine.train_batch(data_iter=iterator)."
        )
    if len(training_data) == 0:
        raise ConfigError("training_data: must have at least one sample (got a length of 0).")


def _require_optimizer_for_zero(config: Json) -> None:
    if config.get("optimizer") is None and zero_stage(half_through_zero(config)):
        raise ConfigError(
            "optimizer: ZeRO and half precision need it when the engine is built (got none in the JSON and in "
            "initialize()). Pass it to initialize(). Only fp32 without ZeRO takes an optimizer later."
        )


def _require_parameters(model: PipelineModule, groups: Groups | None) -> None:
    """Raise ConfigError on all ranks if the model trains nothing, or the groups nothing of a rank that trains some."""
    has_parameters = any(p.numel() for stage in model.stages for p in model.stage_parameters(stage))
    entries = [
        p for group in groups or () for p in (group["params"] if isinstance(group, Mapping) else [group])
    ]
    omitted = has_parameters and groups is not None and not has_trained(entries)
    trains_by_rank, omitted_by_rank = zip(*on_all_ranks(lambda: (has_parameters, omitted)), strict=True)
    if not any(trains_by_rank):
        raise ConfigError(
            "layers: the model has no trainable parameter (got 0). Set requires_grad on some of them."
        )
    ranks = [str(rank) for rank, omitted in enumerate(omitted_by_rank) if omitted]
    if ranks:
        raise ConfigError(
            f"model_parameters: contains no parameter of rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}, which "
            f"trains some. Pass model.parameters()."
        )


def _require_weights_of_zero(model: PipelineModule, groups: Groups, is_half: bool) -> None:
    """Raise ConfigError on all ranks if one of them has weights that ZeRO does not support.

    They are complex or, without half precision, fp64 weights and groups of several dtypes. ZeRO would convert complex
    weights, train fp64 weights without gradients, and convert the weights of a group to one dtype, on the ranks where
    they differ.
    """

    def check() -> None:
        names = {id(p): name for name, p in model.named_parameters()}
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        for name, parameter in trained:
            if parameter.dtype == torch.float64 and not is_half:  # half precision casts these
                raise ConfigError(
                    f"zero_optimization.stage: ZeRO does not support fp64 weights (got {name} of {parameter.dtype}). "
                    "Use stage 0, or cast the layer with .float()."
                )
            if parameter.is_complex():
                raise ConfigError(
                    f"zero_optimization.stage: ZeRO and half precision do not support complex weights (got {name} of "
                    f"{parameter.dtype}). Use fp32 and stage 0."
                )
        all_groups = groups if groups and isinstance(groups[0], Mapping) else [{"params": groups}]
        for group in all_groups:
            parameters = [entry[1] if isinstance(entry, tuple) else entry for entry in group["params"]]
            by_dtype = {p.dtype: names.get(id(p), "a parameter") for p in parameters if p.requires_grad}
            if len(by_dtype) > 1 and not is_half:
                found = ", ".join(f"{name} of {dtype}" for dtype, name in by_dtype.items())
                raise ConfigError(
                    f"zero_optimization.stage: ZeRO joins the weights of a parameter group, which must have one dtype "
                    f"(got {found}). Pass one group per dtype to initialize(model_parameters=...), those in half "
                    f'precision first, cast the layers, use stage 0, or set "bf16": {{"enabled": true}}.'
                )

    on_all_ranks(check)


def _require_whole_experts(model: PipelineModule) -> None:
    """Mark experts to train as other layers do. Raise ConfigError unless this rank has all of them.

    DeepSpeed would reduce them apart, over neighboring ranks and in groups that only ranks with experts create.
    """
    for stage in model.stages:
        for index, layer in model.stage_modules(stage).items():
            modules = [(name, module) for name, module in layer.named_modules() if isinstance(module, MoE)]
            groups = {name: f"ep_size_{module.ep_size}" for name, module in modules}
            marked = {name: p for name, p in layer.named_parameters() if is_moe_param(p)}
            groups |= {name: getattr(p, "group_name", "no group") for name, p in marked.items()}
            divided = [f"{name or 'MoE'}: {group}" for name, group in groups.items() if group != "ep_size_1"]
            if divided or (groups and model.layout.tensor_parallel_size > 1):
                tensor = f"tensor_parallel_size {model.layout.tensor_parallel_size}"
                raise ConfigError(
                    f"layer {index} ({type(layer).__name__}): every rank must have all experts, without tensor "
                    f"parallelism (got {divided[0] if divided else tensor}). Use MoE(..., ep_size=1), and "
                    f"tensor_parallel_size 1."
                )
            for parameter in marked.values():
                parameter.allreduce = True  # pyright: ignore[reportAttributeAccessIssue]
            for _, module in modules:
                vars(module)["set_deepspeed_parallelism"] = _create_no_groups


def _create_no_groups(use_data_before_expert_parallel_: bool = False) -> None:
    """Replace :meth:`MoE.set_deepspeed_parallelism`: experts on one rank need no groups."""


def _remove_config(args: Namespace | None) -> Namespace | None:
    """Return the caller's arguments without the path to the JSON, because the engine gets its content."""
    if args is None or getattr(args, "deepspeed_config", None) is None:
        return args
    args = copy.copy(args)
    args.deepspeed_config = None
    return args


def weight_decay_groups(model: torch.nn.Module) -> list[ParameterGroup]:
    """Return parameter groups for an optimizer: matrices with weight decay, vectors (biases, norms) without it.

    This is the convention of GPT-2, BERT and Megatron. All ranks get both groups, in this order.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.dim() > 1]},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
