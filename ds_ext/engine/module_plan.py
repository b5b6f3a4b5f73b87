"""Plan, head and layer names of a PipelineModule, from its arguments, before it builds a layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec

from ..config.job import DsExtConfig, load_config, require_section
from ..config.merge import command_line_json, has_batch_size, with_arguments
from ..errors import ConfigError
from ..launch.job_facts import as_text
from ..planner.job_plan import JobPlan, StagePlan, make_stage_plan
from .contracts import AdaptedLayer, AdaptedLoss
from .types import Function, Json, Layer


def plan_of_module(
    config: str | Json | JobPlan | None, arguments: list[tuple[str, str, object]], layers: int
) -> StagePlan:
    """Return the plan of a module with ``layers`` layers, its JSON and arguments: a JobPlan if it has a batch size."""
    if isinstance(config, JobPlan):
        if with_arguments(config.job, arguments).ds_ext != config.settings:
            names = ", ".join(dict.fromkeys(name for name, _, value in arguments if value is not None))
            values = [value for _, _, value in arguments if value is not None]
            raise ConfigError(f"{names}: the job plan has other values (got {values}). Omit {names}.")
        return config
    if isinstance(config, int):
        raise ConfigError(
            f"config: must be a DeepSpeed JSON or a job plan (got {config}). Pass num_stages={config}."
        )
    config = command_line_json() if config is None else config
    job = load_config({} if config is None else config)
    if all(value is None for _, key, value in arguments if key == "pipeline_parallel_size"):
        if config is None:
            raise ConfigError(
                "config: PipelineModule needs the number of stages (got neither num_stages nor a JSON). Pass "
                'num_stages=4, schedule="bitpipe", or a DeepSpeed JSON with a "ds_ext" section as config.'
            )
        require_section(job)
    job = with_arguments(job, arguments)
    if not dist.is_initialized():
        raise ConfigError(
            "PipelineModule: needs a process group (got none). Call ds_ext.init_distributed() first."
        )
    plan = make_stage_plan(job, dist.get_world_size(), layers)
    return plan.complete(job) if has_batch_size(job) else plan


def require_auxiliary_loss(settings: DsExtConfig, loss_fn: Function | None) -> None:
    """Raise ConfigError if the routers of the layers have another loss than that of the JSON."""
    wanted, kind = settings.auxiliary_loss, AdaptedLoss(loss_fn).auxiliary_loss
    if wanted is not None and wanted != kind:
        raise ConfigError(
            f"auxiliary_loss: the routers of the layers have {kind or 'no loss'} (got {wanted} in the JSON). Pass "
            f"auxiliary_loss={wanted!r} to from_transformers(), with output_router_logits in the config, or remove it."
        )


def require_shards(layers: Sequence[Layer], plan: StagePlan, loss_fn: Function | None) -> None:
    """Raise ConfigError if layers of a model that can be divided have no shards of the tensor-parallel size."""
    checks = [check for check in (AdaptedLayer(layer).check_shards for layer in layers) if check is not None]
    size = plan.layout.tensor_parallel_size
    if not checks or size == 1:
        return
    if plan.settings.sequence_parallel and plan.settings.sequence_slices > 1:
        raise ConfigError(
            f"sequence_parallel: shards of from_transformers() divide no slices of sequences (got true and "
            f"{plan.settings.sequence_slices} sequence_slices). Remove one of them."
        )
    if not plan.settings.keyed_random:
        raise ConfigError(
            "keyed_random: shards of from_transformers() need it, so that ranks drop the same places (got false). "
            "Remove it."
        )
    if plan.layout.placement.forward_devices:
        raise ConfigError(
            f"tensor_parallel_size: shards of from_transformers() have no forward ranks (got {size} with "
            f"{plan.schedule.name}). Use another schedule."
        )
    for check in dict.fromkeys(checks):
        check(size, loss_fn, plan.settings.sequence_parallel)


def head_parts(layers: Sequence[Layer], loss_fn: Function | None, parts: int) -> list[LayerSpec]:
    """Return the specs of the parts of the head, which is the last layer; empty for 0 parts.

    Its spec has an attribute ``in_parts``: function of the number of parts; returns a LayerSpec of a
    :class:`ds_ext.tensor_parallel.HeadPart` for each. A tied head also needs a divided embedding, see
    :func:`.ties.separated.divide_tied_embedding`. The loss function then gets the losses of all tokens instead
    of logits, which its attribute ``takes_token_losses`` declares.
    """
    if not parts:
        return []
    divide = AdaptedLayer(layers[-1]).in_parts if layers else None
    if divide is None:
        name = layer_name(layers[-1], len(layers) - 1) if layers else "no layers"
        raise ConfigError(
            f"vocabulary_parallel_head: the last layer must be a head that can be divided: that of from_transformers() "
            f"or of gpt_layer_specs() (got {name}). Remove vocabulary_parallel_head."
        )
    if not AdaptedLoss(loss_fn).takes_token_losses:
        raise ConfigError(
            f"vocabulary_parallel_head: loss_fn must take losses of tokens, (B, S) like the labels, instead of logits "
            f"(got {getattr(loss_fn, '__name__', type(loss_fn).__name__)}). Use gpt_loss() or the loss_fn of "
            f"from_transformers(), or let yours take them and set its attribute takes_token_losses = True."
        )
    return divide(parts)


def layer_name(layer: Layer, index: int) -> str:
    if isinstance(layer, TiedLayerSpec):
        return f"{layer.key} (tied)"
    kind = getattr(layer, "typename", layer if hasattr(layer, "__name__") else type(layer))
    return f"{getattr(kind, '__name__', type(kind).__name__)} {index}"


def layer_description(layer: Layer) -> str:
    """Return the class of a layer and the sizes that are available before it is built."""
    layer_class = getattr(layer, "typename", type(layer))
    name = f"{getattr(layer_class, '__module__', '')}.{getattr(layer_class, '__qualname__', layer_class)}"
    if isinstance(layer, LayerSpec):
        return f"{name} {as_text([layer.module_args, layer.module_kwargs])};"
    if isinstance(layer, torch.nn.Module):
        return f"{name} {[tuple(parameter.shape) for parameter in layer.parameters()]};"
    return f"{name};"
