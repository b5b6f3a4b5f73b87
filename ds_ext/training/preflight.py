"""What can be wrong with a job besides its sizes, found before any process group is made.

Pure: neither torch nor the data are read.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.deepspeed_json import require_monitors
from ..engine.checkpoint.folder import open_checkpoint
from ..errors import CheckpointError, ConfigError
from ..launch.failure import rank
from ..parallel.fbd import DisaggregatedLayout, place_by_hosts
from ..parallel.layout import ParallelLayout
from .megatron_flags import TOKENIZER_FILES, TOKENIZER_TYPES


def check_job(args: argparse.Namespace, config: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the optimizer, the checkpoint to load and the places to write to are in order."""
    require_optimizer(config)
    if rank() == 0:
        require_monitors(config)
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
    if args.save_interval and not args.save:
        raise ConfigError(
            f"--save-interval {args.save_interval}: --save is missing, so no checkpoint would be written. Give "
            f"--save DIR, or leave --save-interval out."
        )
    if args.load:
        require_checkpoint(args.load)
    if args.save:
        _require_writable("--save", Path(args.save), make=not args.dry_run)
    if args.metrics_file:
        _require_place("--metrics-file", Path(args.metrics_file))
    traces = config.get("ds_ext", {}).get("trace", {}).get("dir")
    if traces:
        _require_writable('"ds_ext": trace.dir', Path(traces), make=not args.dry_run)


def check_forward_hosts(layout: ParallelLayout, forward_hosts: Sequence[str] | None) -> None:
    """Raise ConfigError for ``fbd.forward_hosts`` when a launcher has started all ranks on this host.

    Ranks on several hosts check them in ``PipelineModule``, where they know each other's names and addresses.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    if (
        forward_hosts is not None
        and isinstance(layout, DisaggregatedLayout)
        and local == str(layout.world_size)
    ):
        place_by_hosts(layout, [socket.gethostname()] * layout.world_size, forward_hosts)


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
    """Raise ConfigError unless the JSON has an optimizer that can train the models of the scripts."""
    optimizer = config.get("optimizer")
    if not isinstance(optimizer, Mapping) or not optimizer.get("type"):
        raise ConfigError(
            'training needs "optimizer" in the JSON, for example {"type": "AdamW", "params": {"lr": 1e-3, '
            '"torch_adam": true}} ("torch_adam" spares the compilation of a fused one).'
        )
    if str(optimizer["type"]).lower() in ("muon", "muadam", "muadamw", "musgd"):
        raise ConfigError(
            f"optimizer.type: needs tagged parameters, which this model does not have (got {optimizer['type']!r}). Use "
            f"AdamW, or tag the parameters in a script of your own."
        )


def require_checkpoint(folder: str) -> None:
    """Raise ConfigError unless the current checkpoint in ``folder`` is there, with all its files in full size."""
    try:
        open_checkpoint(Path(folder))
    except (ConfigError, CheckpointError) as error:
        raise ConfigError(f"--load {folder}: {str(error).removeprefix(f'{folder}: ')}") from None


def _require_place(flag: str, path: Path) -> None:
    """A file can be written at ``path``: its folder is there."""
    if os.path.isdir(path):
        raise ConfigError(f"{flag} {path} is a folder. Give the name of a file in it.")
    if not os.path.exists(path.parent):
        raise ConfigError(
            f"{flag} {path}: the folder {path.parent} does not exist. Make it with "
            f"`mkdir -p {shlex.quote(str(path.parent))}`, or give another path."
        )
    _require_writable(flag, path.parent)


def _require_writable(flag: str, folder: Path, make: bool = False) -> None:
    """A run of hours must not fail at its end for a folder that cannot be made."""
    place = folder.absolute()
    while not os.path.exists(place):  # also for a folder above that may not be searched
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{flag}: cannot write to {folder}: {place} is {'read-only' if place.is_dir() else 'a file'}."
        )
    if make:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{flag}: cannot make the folder {folder}: {error.strerror}.") from None
