"""What can be wrong with a job besides its sizes, found before any process group is made.

Pure: neither torch nor the data are read.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from .config import counted
from .deepspeed_json import refuse_fp16_without_zero, zero_stage
from .deepspeed_sections import check_optimizer, check_scheduler, precision
from .errors import CheckpointError, ConfigError
from .megatron_flags import TOKENIZER_FILES, TOKENIZER_TYPES
from .plan import Plan

# In every checkpoint that the scripts write: the sizes that decide which of its files a rank reads.
JOB_FILE = "ds_ext.json"
_SIZES = {"PP": "pipeline", "TP": "tensor", "DP": "data"}


def check_job(
    args: argparse.Namespace, config: Mapping[str, Any], flags: Mapping[str, str] | None = None
) -> None:
    """Raise ConfigError unless the optimizer, the checkpoint to load and the places to write to are in order.

    ``flags`` says which keys of the JSON a flag filled in, as ``JobConfig.flags``.
    """
    require_optimizer(config)
    refuse_fp16_without_zero(config)
    check_optimizer(config, flags)
    check_scheduler(config)
    _check_tokenizer(args)
    for flag, lowest in (
        ("train_iters", 1),
        ("eval_iters", 0),
        ("log_interval", 1),
        ("eval_interval", 0),
        ("save_interval", 0),
    ):
        value = getattr(args, flag)
        if value < lowest:
            raise ConfigError(f"--{flag.replace('_', '-')} must be at least {lowest}; got {value}.")
    if args.load:
        find_checkpoint(args.load)
    if args.save:
        _require_writable("--save", Path(args.save), make=not args.dry_run)
    if args.metrics_file:
        path = Path(args.metrics_file)
        if path.is_dir():
            raise ConfigError(f"--metrics-file {path} is a folder. Give the name of a file in it.")
        if not path.parent.exists():
            raise ConfigError(
                f"--metrics-file {path}: the folder {path.parent} does not exist. Make it with "
                f"`mkdir -p {shlex.quote(str(path.parent))}`, or give another path."
            )
        _require_writable("--metrics-file", path.parent)


def _check_tokenizer(args: argparse.Namespace) -> None:
    """The flags that name a tokenizer fit each other."""
    if bool(args.vocab_file) != bool(args.merge_file):
        raise ConfigError("--vocab-file and --merge-file belong together: give both.")
    if args.tokenizer and args.vocab_file:
        raise ConfigError("--tokenizer and --vocab-file exclude each other: give one of them.")
    if args.tokenizer_type is None:
        return
    kind = "none"
    if args.vocab_file:
        kind = "gpt2"
    elif args.tokenizer:
        kind = "model" if args.tokenizer.endswith(".model") else "json"
    needed = TOKENIZER_TYPES[args.tokenizer_type]
    if kind != needed:
        given = args.vocab_file or args.tokenizer or "none"
        raise ConfigError(
            f"--tokenizer-type {args.tokenizer_type} needs {TOKENIZER_FILES[needed]}; got {given}. Without "
            f"--tokenizer-type the files say what they are, and without files the data do."
        )


def require_optimizer(config: Mapping[str, Any]) -> None:
    """Training needs an optimizer in the JSON. Raises ConfigError."""
    optimizer = config.get("optimizer")
    if not isinstance(optimizer, Mapping) or not optimizer.get("type"):
        raise ConfigError(
            'training needs "optimizer" in the JSON, for example {"type": "AdamW", "params": {"lr": 1e-3, '
            '"torch_adam": true}} ("torch_adam" spares the compilation of a fused one).'
        )


def find_checkpoint(folder: str) -> Path:
    """The latest checkpoint in ``folder``. Raises ConfigError when there is none."""
    latest = Path(folder) / "latest"
    if not latest.is_file():
        raise ConfigError(
            f"--load {folder}: there is no checkpoint (no file 'latest' in it). Leave --load out to start from the "
            f"beginning."
        )
    name = latest.read_text(errors="replace").strip()
    checkpoint = Path(folder) / name
    if not name or checkpoint.parent != Path(folder) or not checkpoint.is_dir():
        tags = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
        raise ConfigError(
            f"--load {folder}: its file 'latest' names {name!r}, which is not there. Write one of the names "
            f"that are into it: {', '.join(tags) or 'none'}."
        )
    return checkpoint


def describe_job(plan: Plan) -> dict[str, Any]:
    """What a checkpoint's files depend on, as :func:`check_resume` compares it."""
    layout = plan.layout
    return {
        "schedule": plan.timetable.schedule,
        "pipeline_parallel_size": layout.placement.ranks,
        "tensor_parallel_size": layout.tensor_parallel_size,
        "data_parallel_size": layout.data_parallel_size,
        "zero_stage": zero_stage(plan.job.deepspeed),
        "precision": precision(plan.job.deepspeed),
        # Device by pipe and stage: schedules that agree in it (1f1b and gpipe) read each other's checkpoints.
        "devices": [list(pipe) for pipe in layout.placement.pipes],
    }


def check_resume(load: str, plan: Plan, world_is_known: bool = True) -> None:
    """Raise CheckpointError when the checkpoint in ``load`` was written under a schedule or sizes that do not fit.

    Args:
        world_is_known: False for a plan that no launcher started: its data-parallel size is not compared.
    """
    checkpoint, ours = find_checkpoint(load), describe_job(plan)
    theirs = _read_job_file(checkpoint / JOB_FILE, ours)
    if theirs is None:
        return
    keys = ["devices", "tensor_parallel_size", "zero_stage", "precision"]
    if ours["zero_stage"] > 0 and world_is_known:
        # Without ZeRO every data-parallel rank holds, and the first saves, the whole optimizer state.
        keys.append("data_parallel_size")
    if all(theirs[key] == ours[key] for key in keys):
        if ours["precision"] == "bf16" and ours["zero_stage"] == 0:
            raise CheckpointError(
                f"{checkpoint} was written with bf16 and without ZeRO; DeepSpeed cannot load that optimizer's states "
                f'again. A run in bf16 that is to be resumed needs "zero_optimization": {{"stage": 1}} from its start. '
                f"Leave --load out."
            )
        return
    ranks = theirs["pipeline_parallel_size"] * theirs["tensor_parallel_size"] * theirs["data_parallel_size"]
    raise CheckpointError(
        f"{checkpoint} was written with {_in_short(theirs)}; this job has {_in_short(ours)}, and checkpoints are not "
        f"converted. Resume with what the checkpoint was written with, on {counted(ranks, 'process')}, or leave "
        f"--load out."
    )


def _read_job_file(path: Path, needed: Collection[str]) -> dict[str, Any] | None:
    """What a checkpoint was written with; None when it does not say. Raises CheckpointError for a damaged file."""
    try:
        job = json.loads(path.read_text())
        if not (isinstance(job, dict) and job.keys() >= set(needed)):
            raise ValueError(f"it needs the keys {', '.join(needed)}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}, which says how the checkpoint was written, cannot be read ({error}). Without this file the "
            f"checkpoint is loaded unchecked."
        ) from None
    return job


def _in_short(job: Mapping[str, Any]) -> str:
    sizes = " x ".join(f"{word} {job[f'{key}_parallel_size']}" for word, key in _SIZES.items())
    return f"schedule {job['schedule']}, {sizes}, ZeRO stage {job['zero_stage']} and {job['precision']}"


def _require_writable(flag: str, folder: Path, make: bool = False) -> None:
    """A run of hours must not fail at its end for a folder that cannot be made."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(
            f"{flag}: cannot write to {folder}: {place} is {'read-only' if place.is_dir() else 'a file'}."
        )
    if make:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{flag}: cannot make the folder {folder}: {error.strerror}.") from None
