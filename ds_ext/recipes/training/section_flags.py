"""Megatron's flags whose keys are computed: betas, learning-rate schedule, loss scale, tensorboard, optimizer."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import ConfigError

# (path in the JSON, value, flag)
Key = tuple[tuple[str, ...], Any, str]

_BETAS = ("adam_beta1", "adam_beta2")  # elements of one key
_DEFAULT_BETAS = (0.9, 0.999)  # of torch and DeepSpeed
_SCHEDULE = {"lr_decay_style": "decay_style", "min_lr": "min_lr", "lr_warmup_init": "warmup_init_lr"}
_STEPS = ("lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_samples", "lr_decay_iters", "lr_decay_samples")


def keys_of_flags(args: argparse.Namespace, config: Mapping[str, Any]) -> Iterator[Key]:
    """Yield the keys that the flags set.

    Args:
        args: parsed flags.
        config: the JSON with the keys of all other flags.

    Raises:
        ConfigError: flags contradict each other, a flag needs another one, or a value is out of range.
    """
    yield from _betas(args, config)
    if any(getattr(args, dest) is not None for dest in (*_SCHEDULE, *_STEPS)):
        yield from _scheduler(args, config)
    if args.initial_loss_scale is not None:
        power = math.log2(args.initial_loss_scale) if args.initial_loss_scale > 0 else math.nan
        if not power.is_integer():
            raise ConfigError(
                f"--initial-loss-scale: must be a power of 2 (got {args.initial_loss_scale:g}). Use for example 65536."
            )
        yield ("fp16", "initial_scale_power"), int(power), f"--initial-loss-scale {args.initial_loss_scale:g}"
    if args.tensorboard_dir is not None:
        flag = f"--tensorboard-dir {args.tensorboard_dir}"
        yield ("tensorboard", "enabled"), True, flag
        yield ("tensorboard", "output_path"), args.tensorboard_dir, flag
        yield ("tensorboard", "job_name"), "", flag
    if args.optimizer is not None:
        name = {"adam": "AdamW", "sgd": "SGD"}[args.optimizer]  # Megatron's adam decouples the weight decay
        yield ("optimizer", "type"), name, f"--optimizer {args.optimizer}"


def _betas(args: argparse.Namespace, config: Mapping[str, Any]) -> Iterator[Key]:
    """Yield "betas"; a single flag keeps the other element."""
    by_flag = {dest: getattr(args, dest) for dest in _BETAS if getattr(args, dest) is not None}
    if not by_flag:
        return
    section: Any = config
    for key in ("optimizer", "params"):
        section = section.get(key) if isinstance(section, Mapping) else None
    betas = section.get("betas") if isinstance(section, Mapping) else None
    if not isinstance(betas, list) or len(betas) != len(_BETAS):
        betas = _DEFAULT_BETAS
    new = [by_flag.get(dest, beta) for dest, beta in zip(_BETAS, betas, strict=True)]
    flags = " ".join(f"--{dest.replace('_', '-')} {beta}" for dest, beta in by_flag.items())
    yield ("optimizer", "params", "betas"), new, flags


def _scheduler(args: argparse.Namespace, config: Mapping[str, Any]) -> Iterator[Key]:
    """Yield the keys of the scheduler MegatronLR, with Megatron's defaults."""
    require_at_most_one(args, "lr_decay_iters", "lr_decay_samples")
    require_at_most_one(args, "lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_samples")
    total = args.train_iters if args.lr_decay_iters is None else args.lr_decay_iters
    if args.lr_decay_samples is not None:
        total = _steps("--lr-decay-samples", args.lr_decay_samples, config)
    warmup = args.lr_warmup_iters or 0
    if args.lr_warmup_fraction is not None:
        if not 0 <= args.lr_warmup_fraction < 1:
            raise ConfigError(f"--lr-warmup-fraction: must be from 0 to 1 (got {args.lr_warmup_fraction:g}).")
        warmup = args.lr_warmup_fraction * total
    if args.lr_warmup_samples is not None:
        warmup = _steps("--lr-warmup-samples", args.lr_warmup_samples, config)
    params = {key: getattr(args, dest) for dest, key in _SCHEDULE.items() if getattr(args, dest) is not None}
    params |= {"total_num_steps": total, "warmup_num_steps": warmup}
    flags = " ".join(
        f"--{dest.replace('_', '-')} {getattr(args, dest)}"
        for dest in (*_SCHEDULE, *_STEPS)
        if getattr(args, dest) is not None
    )
    yield ("scheduler", "type"), "MegatronLR", flags
    yield ("scheduler", "params"), params, flags


def require_at_most_one(args: argparse.Namespace, *dests: str) -> None:
    """Raise ConfigError if more than one of the flags is set."""
    values = {dest: getattr(args, dest) for dest in dests if getattr(args, dest) is not None}
    if len(values) > 1:
        names = ", ".join(f"--{dest.replace('_', '-')}" for dest in values)
        raise ConfigError(f"{names}: exclude each other (got {[*values.values()]}). Use one of them.")


def _steps(flag: str, samples: int, config: Mapping[str, Any]) -> float:
    batch = config.get("train_batch_size")
    if not isinstance(batch, int) or batch < 1:
        raise ConfigError(
            f"{flag}: needs the samples of a step (got {samples} samples). Add --global-batch-size."
        )
    return samples / batch
