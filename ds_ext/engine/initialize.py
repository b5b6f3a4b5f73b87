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
from deepspeed.runtime.config import DeepSpeedConfig

from ..comm.groups import limit_waits
from ..config.deepspeed_json import (
    fp32_sums_of_bf16,
    half_through_zero,
    precision,
    zero_stage,
)
from ..config.job import load_config
from ..config.merge import merge
from ..config.schedulers import MegatronLR
from ..environment import rank, restart_count
from ..errors import ANSWERS, ConfigError
from ..launch.job_facts import code_facts, setting_facts
from ..launch.roll_call import Facts, compare, one_refusal
from ..parallel.fbd import FORWARD_ROLE, DisaggregatedLayout
from ..planner.job_plan import JobPlan
from .all_ranks import from_rank_0, on_all_ranks
from .batches import MapDataset, MicroBatches
from .deepspeed_api.muon import fill_halves, import_muon, tag_for_muon
from .engine import PipelineEngine
from .facts import data_facts, optimizer_facts, plan_text, run_facts, stage_facts
from .fbd.backward import BackwardRole
from .fbd.forward import ForwardRole
from .initialize_checks import (
    check_json,
    require_parameters,
    require_samples_by_index,
    require_weights_of_zero,
    require_whole_experts,
)
from .modes import set_first_modes
from .module import PipelineModule
from .placeholders import fill_groups
from .start import check_precision, init_distributed
from .types import Function, Groups, Json, Optimizer, ParameterGroup, Parameters, Scheduler
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
        require_samples_by_index(training_data)
        check_precision(job)
        check_json(job, has_optimizer=optimizer is not None, has_scheduler=lr_scheduler is not None)
    config_dict, lr_scheduler = _engine_config(model.plan, lr_scheduler)
    # The constructors below communicate.
    limit_waits(job.ds_ext.transport_options.timeout_s)
    parameters = model.parameters() if model_parameters is None else model_parameters  # as DeepSpeed
    groups = [_list_parameters(group) for group in parameters]
    if job.ds_ext.overlap_across_steps and not hasattr(optimizer, "param_groups"):
        groups, model.group_sources = split_by_stage(groups, model)
        config_dict, lr_scheduler = _expand_lists(config_dict, lr_scheduler, model.group_sources)
    data = data_facts(model, training_data)
    _compare_ranks(model, optimizer, groups, data, {"shuffle": shuffle, "repeat": repeat})
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


def _compare_ranks(
    model: PipelineModule, optimizer: Optimizer, groups: Groups, data: Facts, arguments: Json
) -> None:
    """Compare code, settings, model and data of all ranks. Raises ConfigError if they differ."""
    job = model.job
    compare(
        {
            **code_facts(),
            **setting_facts({k: v for k, v in job.deepspeed.items() if k != "ds_ext"}),
            **setting_facts(job.ds_ext.model_dump(exclude={"train"}), "ds_ext."),
            **optimizer_facts(optimizer),
            **setting_facts(arguments, "initialize."),
        },
        replica_facts={
            **stage_facts(model, getattr(optimizer, "param_groups", groups)),
            **data,
        },
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
    on_all_ranks(lambda: require_whole_experts(model))
    if optimizer is not None or "optimizer" in config:
        require_parameters(model, None if has_groups else groups)
    if zero_stage(half_through_zero(deepspeed_json)):
        require_weights_of_zero(model, all_groups, is_half=precision(deepspeed_json) != "fp32")
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
