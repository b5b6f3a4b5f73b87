"""Megatron's flags whose keys are computed from several flags: betas, learning-rate schedule, stages, optimizer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from ...config.deepspeed_json import precision, value_at
from ...config.job import AUTO, named_schedule
from ...errors import ConfigError
from ...model.field_flags import flag_name

# (path in the JSON, value, flag)
Key = tuple[str, Any, str]

_BETAS = ("adam_beta1", "adam_beta2")  # elements of one key
_DEFAULT_BETAS = (0.9, 0.999)  # of torch and DeepSpeed
_SCHEDULE = {"lr_decay_style": "decay_style", "min_lr": "min_lr", "lr_warmup_init": "warmup_init_lr"}
_STEPS = ("lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_samples", "lr_decay_iters", "lr_decay_samples")


def _betas(args: argparse.Namespace, config: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[Key]:
    """Yield "betas"; a single flag keeps the other element."""
    by_flag = _set_flags(args, *_BETAS)
    if not by_flag:
        return
    betas = value_at(config, "optimizer.params.betas")
    if not isinstance(betas, list) or len(betas) != len(_BETAS):
        betas = _DEFAULT_BETAS
    new = [by_flag.get(dest, beta) for dest, beta in zip(_BETAS, betas, strict=True)]
    yield "optimizer.params.betas", new, _words(by_flag)


def _scheduler(args: argparse.Namespace, config: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[Key]:
    """Yield the keys of the scheduler MegatronLR, with Megatron's defaults.

    As in Megatron, ``--lr`` alone selects it, unless the JSON has a scheduler or its own learning rate.
    """
    by_flag = _set_flags(args, *_SCHEDULE, *_STEPS)
    if not by_flag:
        if args.lr is None or "scheduler" in base or value_at(base, "optimizer.params.lr") is not None:
            return
        by_flag = {"lr": args.lr}
    require_at_most_one(args, "lr_decay_iters", "lr_decay_samples")
    require_at_most_one(args, "lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_samples")
    total = args.train_iters if args.lr_decay_iters is None else args.lr_decay_iters
    if args.lr_decay_samples is not None:
        total = steps_of_samples("--lr-decay-samples", args.lr_decay_samples, config)
    warmup = args.lr_warmup_iters or 0
    if args.lr_warmup_fraction is not None:
        if not 0 <= args.lr_warmup_fraction < 1:
            raise ConfigError(f"--lr-warmup-fraction: must be from 0 to 1 (got {args.lr_warmup_fraction:g}).")
        warmup = args.lr_warmup_fraction * total
    if args.lr_warmup_samples is not None:
        warmup = steps_of_samples("--lr-warmup-samples", args.lr_warmup_samples, config)
    params = {_SCHEDULE[dest]: value for dest, value in by_flag.items() if dest in _SCHEDULE}
    params |= {"total_num_steps": total, "warmup_num_steps": warmup}
    yield "scheduler.type", "MegatronLR", _words(by_flag)
    yield "scheduler.params", params, _words(by_flag)


def _chunks(args: argparse.Namespace, config: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[Key]:
    """Yield the stages per device, and interleaved for a job without a schedule. One stage, as in Megatron, is 1f1b."""
    require_at_most_one(args, "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    chunks, flag = args.num_virtual_stages_per_pipeline_rank, "--num-virtual-stages-per-pipeline-rank"
    got, devices = chunks, value_at(config, "ds_ext.pipeline_parallel_size") or 1
    if (layers := args.num_layers_per_virtual_pipeline_stage) is not None:
        got, flag = layers, "--num-layers-per-virtual-pipeline-stage"
        per_device = args.num_layers / devices
        if layers < 1 or per_device % layers:
            fits = [k for k in range(1, int(per_device) + 1) if per_device % k == 0]
            fix = f"Use {' or '.join(map(str, fits))}" if fits else f"Use a multiple of {devices} layers"
            raise ConfigError(
                f"{flag}: must divide {args.num_layers} layers / {devices} devices (got {layers}). {fix}."
            )
        chunks = int(per_device) // layers
    if chunks is None or chunks == 1:
        return
    if devices == 1:
        raise ConfigError(f"{flag}: needs --pipeline-model-parallel-size of 2 or more (got {got}).")
    schedule = value_at(config, "ds_ext.schedule")
    options = value_at(config, "ds_ext.schedule_options") or {}
    if schedule not in (None, AUTO) and "chunks" not in named_schedule(schedule).options:
        placement = named_schedule(schedule).placement(devices, options)
        if placement.stages == chunks * devices:
            return  # the schedule has these stages by itself
    if schedule == AUTO or schedule is None or "chunks" not in named_schedule(schedule).options:
        yield "ds_ext.schedule", "interleaved", f"{flag} {got}"
    yield "ds_ext.schedule_options.chunks", chunks, f"{flag} {got}"


def _reduction(args: argparse.Namespace, config: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[Key]:
    if args.grad_reduce_in_bf16:
        if precision(config) != "bf16":
            raise ConfigError(
                f"--grad-reduce-in-bf16: needs --bf16 (got {precision(config)}). Remove it, or add --bf16."
            )
        yield "communication_data_type", "bf16", "--grad-reduce-in-bf16"


def _optimizer(args: argparse.Namespace, config: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[Key]:
    """Yield the type and Megatron's defaults; ``--lr`` selects adam for a JSON without an optimizer."""
    name = args.optimizer or ("adam" if args.lr is not None and "optimizer" not in base else None)
    flag = f"--optimizer {args.optimizer}" if args.optimizer else f"--lr {args.lr}"
    if name is not None:
        # Megatron's adam decouples the weight decay.
        yield "optimizer.type", {"adam": "AdamW", "sgd": "SGD"}[name], flag
    is_sgd = value_at(config, "optimizer.type") == "SGD"
    if is_sgd and args.sgd_momentum is not None:
        yield "optimizer.params.momentum", args.sgd_momentum, f"--sgd-momentum {args.sgd_momentum}"
    if name is not None and "optimizer" not in base:
        # The other defaults of Megatron are those of torch.
        defaults = {"momentum": 0.9, "weight_decay": 0.01} if is_sgd else {"torch_adam": True}
        for key, value in defaults.items():
            if value_at(config, f"optimizer.params.{key}") is None:
                yield f"optimizer.params.{key}", value, flag


def _router_bias(
    args: argparse.Namespace, config: Mapping[str, Any], base: Mapping[str, Any]
) -> Iterator[Key]:
    """Yield the rate of the routers' biases, with Megatron's default; the rate alone has no effect, as in Megatron."""
    if args.moe_router_enable_expert_bias:
        rate = args.moe_router_bias_update_rate
        flag = "--moe-router-enable-expert-bias"
        yield "ds_ext.router_bias_update_rate", 1e-3 if rate is None else rate, flag


# Functions that yield keys for the flags, the JSON with the keys of all other flags, and the JSON without flags.
SECTIONS = (_betas, _scheduler, _chunks, _reduction, _router_bias, _optimizer)


def _set_flags(args: argparse.Namespace, *dests: str) -> dict[str, Any]:
    return {dest: getattr(args, dest) for dest in dests if getattr(args, dest) is not None}


def _words(values: Mapping[str, Any]) -> str:
    return " ".join(f"{flag_name(dest)} {value}" for dest, value in values.items())


def require_at_most_one(args: argparse.Namespace, *dests: str) -> None:
    values = _set_flags(args, *dests)
    if len(values) > 1:
        names = ", ".join(map(flag_name, values))
        raise ConfigError(f"{names}: exclude each other (got {[*values.values()]}). Use one of them.")


def steps_of_samples(flag: str, samples: int, config: Mapping[str, Any]) -> float:
    batch = config.get("train_batch_size")
    if not isinstance(batch, int) or batch < 1:
        raise ConfigError(
            f"{flag}: needs the samples of a step (got {samples} samples). Add --global-batch-size."
        )
    return samples / batch
