"""Checks of flags, files and hosts before a process group is created. Imports torch only to check ``--load``."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...config.deepspeed_json import require_monitors, value_at
from ...environment import rank
from ...errors import CheckpointError, ConfigError, Problems
from ...model.field_flags import flag_name
from ..data.blend import parse_data_path, parse_split, split_documents
from ..data.indexed import IndexedTokens, require_files, require_windows
from ..data.meta import read_meta
from .megatron_flags import GPT2_FILES, JSON_FILE, MODEL_FILE, TOKENIZER_TYPES
from .script_flags import script_flags


def check_job(args: argparse.Namespace, config: Mapping[str, Any] | None, problems: Problems) -> None:
    """Add a problem for a wrong optimizer, tokenizer, interval, checkpoint, file or output path.

    A dry run needs no packages, files or output folders. Flags of missing files become empty, and so does ``load`` of
    a missing or empty folder. Without ``config``, a key of the JSON is undecided.
    """
    missing = Problems()
    if config is not None:
        with problems.collect():
            require_optimizer(config)
        if rank() == 0:
            with missing.collect():
                require_monitors(config)
    with problems.collect("tokenizer", "vocab_file", "merge_file"):
        _check_tokenizer(args)
    _check_files(args, problems, missing)
    for flag in script_flags("gpt").values():
        if flag.least is not None and (value := getattr(args, flag.key)) < flag.least:
            problems.add(f"{flag_name(flag.key)}: must be at least {flag.least} (got {value}).")
    with problems.collect():
        _check_split(args, parse_split(args.split))
    if args.peak_tflops is not None and not 0 < args.peak_tflops < math.inf:
        problems.add(f"--peak-tflops: must be greater than 0 and finite (got {args.peak_tflops:g}).")
    if args.save_interval and not args.save:
        problems.add(
            f"--save-interval: needs --save (got {args.save_interval}). Add --save DIR, or remove --save-interval."
        )
    if args.load:
        with problems.collect("load"):
            _check_load(args)
    if args.metrics_file and rank() == 0 and os.path.isdir(args.metrics_file):
        file = Path(args.metrics_file, "metrics.jsonl")
        problems.add(f"--metrics-file: is a folder (got {args.metrics_file}). Name a file, such as {file}.")
    for flag, folder in () if args.dry_run else _output_folders(args, config or {}):
        with problems.collect():
            _require_writable(flag, folder)


def _check_files(args: argparse.Namespace, problems: Problems, missing: Problems) -> None:
    """Unset flags of missing data and tokenizers, which join ``missing``: problems, or a note of a dry run."""
    tokenizers = ("tokenizer", "vocab_file", "merge_file")
    if not args.data_path and "data_path" not in problems.undecided:
        missing.add(
            '--data-path: missing. Add it or "train": {"data_path": ...}; `python -m ds_ext prepare` creates data.'
        )
    with problems.collect("data_path"):
        for prefix in parse_data_path(args.data_path)[1]:
            with missing.collect("data_path"):
                require_files(prefix)
    for dest in tokenizers:
        path = getattr(args, dest)
        if path and dest not in problems.undecided and not os.path.exists(path):
            text = f"{flag_name(dest)}: no such file or folder (got {path}). Use a path on this host."
            missing.add(text, *(tokenizers[1:] if dest in tokenizers[1:] else (dest,)))
    for dest in (missing.undecided | problems.undecided) & {"data_path", *tokenizers}:
        setattr(args, dest, [] if dest == "data_path" else None)
    if not args.dry_run:
        problems.errors += missing.errors
    elif missing.errors:
        lines = (line for error in missing.errors for line in str(error).splitlines())
        args.notes.append(
            f"missing   {'; '.join(line.partition('. ')[0].removesuffix(': missing') for line in lines)}"
        )


def _check_split(args: argparse.Namespace, shares: tuple[float, float, float]) -> None:
    """Raise ConfigError for prepared text with a split without a sample. Other data is checked when it is loaded."""
    meta = read_meta(args.data_path) if args.data_path else None
    if meta is not None and not {"sentences", "loss_mask"} & meta.keys():
        (prefix, *others) = parse_data_path(args.data_path)[1]
        if others:
            return
        indexed = IndexedTokens(prefix)
        ranges = split_documents(indexed.num_documents, shares)
        used = zip(("train", "valid", "test"), ranges, (1, args.eval_iters, 0), strict=True)
        for name, documents, samples in used:
            if samples:
                require_windows(name, indexed, documents, args.seq_length)


def set_up_outputs(args: argparse.Namespace, config: Mapping[str, Any]) -> None:
    if args.wandb_exp_name:
        os.environ["WANDB_NAME"] = args.wandb_exp_name  # DeepSpeed's section has no name
    for flag, folder in _output_folders(args, config):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{flag}: cannot create {folder} ({error.strerror}). Use another folder."
            ) from None


def _output_folders(args: argparse.Namespace, config: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    if args.save:
        yield "--save", Path(args.save)
    if args.metrics_file and rank() == 0:
        yield "--metrics-file", Path(args.metrics_file).parent
    if traces := value_at(config, "ds_ext.trace.dir"):
        yield "trace.dir", Path(traces)


def _check_tokenizer(args: argparse.Namespace) -> None:
    if bool(args.vocab_file) != bool(args.merge_file):
        flag = f"--vocab-file {args.vocab_file}" if args.vocab_file else f"--merge-file {args.merge_file}"
        raise ConfigError(f"--vocab-file, --merge-file: one is missing (got {flag}). Give both.")
    if args.tokenizer and args.vocab_file:
        raise ConfigError(
            f"--tokenizer, --vocab-file: cannot be combined (got {args.tokenizer} and {args.vocab_file}). Remove one."
        )
    if args.tokenizer_type is None:
        return
    files = ""
    if args.vocab_file:
        files = GPT2_FILES
    elif args.tokenizer:
        files = MODEL_FILE if args.tokenizer.endswith(".model") else JSON_FILE
    if files != (needed := TOKENIZER_TYPES[args.tokenizer_type]):
        file = args.vocab_file or args.tokenizer or "none"
        raise ConfigError(
            f"--tokenizer-type: {args.tokenizer_type} needs {needed} (got {file}). Add the file, or remove "
            f"--tokenizer-type."
        )


def require_optimizer(config: Mapping[str, Any]) -> None:
    optimizer = config.get("optimizer")
    if not isinstance(optimizer, Mapping) or not optimizer.get("type"):
        raise ConfigError(
            f"optimizer: missing from the JSON, or without a type (got {optimizer!r}). Add for example "
            '{"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": true}}; "torch_adam" needs no compilation.'
        )
    if str(optimizer["type"]).lower() in ("muadam", "muadamw", "musgd"):
        raise ConfigError(
            f"optimizer.type: this model has no base shapes of mup (got {optimizer['type']!r}). Use "
            f"AdamW, or set the shapes in your own script."
        )


def _check_load(args: argparse.Namespace) -> None:
    """Raise ConfigError for a folder without a complete checkpoint; a missing or empty one starts a new run.

    Folders in it are ignored: another rank may have created them for this run. So is the lock of a run that ended
    before its first checkpoint.
    """
    from ...engine.checkpoint.lock import LOCK
    from ...hf.folder import CONFIG

    folder = args.load
    is_empty = os.access(folder, os.R_OK | os.X_OK) and not any(
        {*files} - {LOCK, CONFIG} for *_, files in os.walk(folder)
    )
    is_new = not os.path.lexists(folder) or (os.path.isdir(folder) and is_empty)
    if is_new and (args.dry_run or not args.exit_on_missing_checkpoint):
        args.notes.append(f"load      {folder}: no checkpoint yet, the run starts at step 0")
        args.load = None
        return
    checkpoint = require_checkpoint(folder)
    if args.dry_run:
        args.notes.append(f"load      {checkpoint}")


def require_checkpoint(folder: str) -> Path:
    """Return the folder of the checkpoint from which a run with ``--load folder`` would go on."""
    from ...engine.checkpoint.folder import open_checkpoint

    try:
        return open_checkpoint(Path(folder))[0]
    except (ConfigError, CheckpointError) as error:
        if name := _megatron_file(Path(folder)):
            raise ConfigError(
                f"--load: {folder} is a checkpoint of Megatron, in another format (got {name}). Export it to a Hugging "
                "Face folder with Megatron's tools (AutoBridge.export_ckpt of Megatron-Bridge), and start with "
                "--hf-model FOLDER, or with --load NEW after `python -m ds_ext convert FOLDER --from hf NEW`."
            ) from None
        raise ConfigError(f"--load {folder}: {str(error).removeprefix(f'{folder}: ')}") from None


def _megatron_file(folder: Path) -> str:
    """Return the name of a file or folder that Megatron-LM or Megatron-DeepSpeed wrote."""
    from ...engine.checkpoint.folder import MANIFEST

    patterns = ("latest_checkpointed_iteration.txt", "iter_*", "common.pt", "mp_rank_*/*_rng.pt")
    if not any(folder.glob(f"*/{MANIFEST}")):  # a folder of ds_ext may have the same names
        patterns += ("global_step*/mp_rank_*",)
    return next((path.name for pattern in patterns for path in folder.glob(pattern)), "")


def _require_writable(flag: str, folder: Path) -> None:
    existing = folder.absolute()
    while not os.path.exists(existing):  # also False under a folder without search permission
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "read-only" if existing.is_dir() else "a file"
        raise ConfigError(f"{flag}: cannot write to {folder}: {existing} is {reason}. Use another folder.")
