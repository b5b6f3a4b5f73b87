"""Checks of :func:`.initialize.initialize`: of the JSON, the data and the parameters."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param

from ..config.deepspeed_check import check_deepspeed, unknown_keys
from ..config.deepspeed_json import (
    half_through_zero,
    require_monitors,
    zero_stage,
)
from ..config.job import DsExtConfig, JobConfig
from ..environment import rank
from ..errors import ConfigError
from ..launch.launcher import require_restarts
from ..parallel.slices import BALANCED, EQUAL
from .all_ranks import on_all_ranks
from .deepspeed_api.names import untested_versions
from .module import PipelineModule
from .placeholders import as_groups, has_trained
from .types import Groups, Json, Source

logger = logging.getLogger(__name__)


def check_json(job: JobConfig, has_optimizer: bool, has_scheduler: bool) -> None:
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


def require_samples_by_index(training_data: Source) -> None:
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


def require_parameters(model: PipelineModule, groups: Groups | None) -> None:
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


def require_weights_of_zero(model: PipelineModule, groups: Groups, is_half: bool) -> None:
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
        for group in as_groups(groups):
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


def require_whole_experts(model: PipelineModule) -> None:
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
