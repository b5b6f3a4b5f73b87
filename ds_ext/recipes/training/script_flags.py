"""Flags of the training scripts, with Megatron's names. Imports neither torch nor DeepSpeed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Literal

from ... import __version__
from ...environment import package_version
from ...model.config import GPT_FIELDS, TransformerConfig
from ...model.field_flags import Flag, add_flags, flags_of
from ..data.blend import DEFAULT_SPLIT
from .experts import EXPERT_FLAGS
from .megatron_flags import JSON_KEYS, TOKENIZER_TYPES, TRAIN_KEYS

Model = Literal["gpt", "bert"]
SCRIPTS: Mapping[Model, str] = MappingProxyType({"gpt": "train_gpt.py", "bert": "train_bert.py"})
# Fields whose flags only train_gpt.py has.
_OF_GPT = ("vocab_size", "layernorm_epsilon", *GPT_FIELDS)
# Flags of one run, which no JSON contains.
RUN_FLAGS = frozenset({"deepspeed_config", "deepspeed", "local_rank", "dry_run", "write_config", "hosts"})
_TITLE_OF_JSON = "keys of the JSON (an error if the JSON has a different value)"
_OPTIONS = (
    Flag(
        *("deepspeed_config", str, "JSON"),
        'DeepSpeed JSON with a "ds_ext" section (none: the flags need --lr and --micro-batch-size)',
        names=("--deepspeed_config",),
    ),
    Flag("write_config", str, "FILE", "write the JSON of the job, with all flags, and exit"),
    Flag("deepspeed", bool, "", "accepted for launch scripts, without effect: DeepSpeed is always used"),
    Flag("local_rank", int, "", "set by DeepSpeed's launcher", names=("--local_rank", "--local-rank")),
    Flag("dry_run", bool, "", "print the job plan and exit, without other ranks"),
    Flag("verbose", bool, "", 'print the whole plan, as "print_plan": "all" does'),
    Flag(
        *("hosts", str, "HOSTS"),
        "with --dry-run: hosts as 4x8 (4 hosts, 8 ranks each), 8,8,4 (ranks of each host) or a hostfile",
    ),
    Flag("metrics_file", str, "PATH", "file for one JSON object per step, written by rank 0"),
    Flag(
        *("peak_tflops", float, "T"),
        "peak TFLOP/s of a device, for the MFU (default: from the GPU's name, if known)",
    ),
)
_STAGE_LAYERS = Flag(
    *("stage_layers", str, "A,B,.."),
    "transformer layers of every stage; balanced: take the work of the head into account (evenly)",
)
_HF_MODEL = Flag(
    *("hf_model", str, "FOLDER"),
    "Hugging Face model: sizes, tokenizer and, without --load, initial weights",
)
_FROM_SCRATCH = Flag(
    *("train_from_scratch", bool, ""),
    "with --hf-model: train new weights; only config.json and the tokenizer of the folder are read",
)
_LLAMA = (
    Flag("rope_scaling_factor", float, "", "factor of --use-rope-scaling", 8.0),
    Flag("group_query_attention", bool, "", "share keys and values between heads"),
)
_DATA = (
    Flag(
        *("data_path", str, "PATH"),
        "prepared folder, .bin/.idx prefix, or a blend: 0.3 a 0.7 b",
        nargs="*",
    ),
    Flag("split", str, "", "shares of train, valid and test", DEFAULT_SPLIT),
)
_GPT_DATA = (
    Flag(
        *("tokenizer", str, "FILE", "tokenizer.json or sentencepiece model; checked against the data"),
        names=("--tokenizer", "--tokenizer-model"),
    ),
    Flag(
        *("tokenizer_type", str, "", "for launch scripts; must match the files"),
        choices=tuple(kind for kind in TOKENIZER_TYPES if not kind.startswith("Bert")),
    ),
    Flag("vocab_file", str, "FILE", "GPT-2 vocab.json, with --merge-file"),
    Flag("merge_file", str, "FILE", "GPT-2 merges.txt, with --vocab-file"),
    Flag("eod_mask_loss", bool, "", "ignore the labels of end-of-document tokens in the loss"),
)
_BERT_DATA = (
    Flag(
        *("tokenizer", str, "FILE", "tokenizer.json or vocab.txt (WordPiece); checked against the data"),
        names=("--tokenizer", "--tokenizer-model", "--vocab-file"),
    ),
    Flag(
        *("tokenizer_type", str, "", "for launch scripts; must match the file"),
        choices=tuple(kind for kind in TOKENIZER_TYPES if kind.startswith(("Bert", "HuggingFace"))),
    ),
    Flag("mask_prob", float, "", "share of predicted tokens", 0.15),
    Flag("short_seq_prob", float, "", "share of shortened samples", 0.1),
    Flag("bert_no_binary_head", bool, "", "predict masked words only, not the order of sentences"),
)
_TRAINING = (
    Flag("train_iters", int, "", "optimizer steps, including those before a resume", 100, least=1),
    Flag("train_samples", int, "N", "samples of all steps, instead of --train-iters"),
    Flag("eval_interval", int, "STEPS", "0: at the end only", 0, least=0),
    Flag("eval_iters", int, "", "steps per evaluation; 0: no evaluation", 2, least=0),
    Flag("save", str, "DIR", "folder for checkpoints"),
    Flag("save_interval", int, "STEPS", "0: at the end only", 0, least=0),
    Flag("async_save", bool, "", "copy the state to memory, and write checkpoints beside the next steps"),
    Flag(
        *("keep_checkpoints", int, "N"),
        *("after a save, remove the older complete checkpoints of --save except N in all; 0: keep all", 0),
        least=0,
    ),
    Flag("stop_if_not_saved", bool, "", "end the job if a checkpoint cannot be written; else go on"),
    Flag(
        *("exit_signal_handler", bool, ""),
        "after SIGTERM or SIGUSR1 to the launcher or a rank, end the step, save, and exit with 0; a launcher "
        "that gets the signal may end with its own status (torchrun: 1, deepspeed: 143)",
    ),
    Flag(
        *("exit_signal", str, ""),
        "the only signal of --exit-signal-handler, which this flag includes",
        choices=("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"),
    ),
    Flag(
        *("exit_duration_in_mins", float, "M"),
        "save and exit with 0 after the step in which the ranks have run for M minutes",
    ),
    Flag(
        *("exit_interval", int, "STEPS"),
        *("save and exit with 0 after a step that is divisible by it; 0: never", 0),
        least=0,
    ),
    Flag("wandb_exp_name", str, "NAME", "name of the run in wandb"),
    Flag("load", str, "DIR", "folder of the checkpoint to resume from"),
    Flag("exit_on_missing_checkpoint", bool, "", "refuse a --load folder without checkpoints"),
    Flag("log_interval", int, "STEPS", "print every STEPS steps, and the first and last step", 1, least=1),
)
_IMPORT = Flag(
    *("modules", str, "MODULE", "ds_ext.import: Python module with a custom schedule; repeatable"),
    repeated=True,
    names=("--import",),
)


@cache
def _groups(model: Model) -> Mapping[str, Sequence[Flag]]:
    """Return title -> flags for the groups of the help. Flags of Megatron are those whose keys the script has."""
    fields = flags_of(TransformerConfig)
    common = [flag for name, flag in fields.items() if name not in _OF_GPT]
    groups: dict[str, Sequence[Flag]] = {"options": _OPTIONS, "model": [_STAGE_LAYERS, *common]}
    if model == "gpt":
        own = [fields[name] for name in _OF_GPT if name in fields]
        groups["model, Llama family and packed samples"] = [_HF_MODEL, _FROM_SCRATCH, *own, *_LLAMA]
        groups["experts"] = EXPERT_FLAGS
    groups |= {"data": [*_DATA, *(_GPT_DATA if model == "gpt" else _BERT_DATA)], "training": _TRAINING}
    keys = {flag.key for group in groups.values() for flag in group}
    return groups | {
        _TITLE_OF_JSON: [_IMPORT, *(row.flag(key) for key, row in JSON_KEYS.items())],
        "other names": [row.flag(key) for key, row in TRAIN_KEYS.items() if row.keys.keys() <= keys],
    }


@cache
def script_flags(model: Model) -> Mapping[str, Flag]:
    """Return key -> flag for all flags of a script."""
    return {flag.key: flag for group in _groups(model).values() for flag in group}


@cache
def by_spelling(model: Model) -> Mapping[str, Flag]:
    """Return ``--flag`` -> flag for all flags of a script."""
    return {name: flag for flag in script_flags(model).values() for name in flag.spellings}


def build_parser(prog: str, model: Model = "gpt") -> argparse.ArgumentParser:
    """Return the parser for the help; :mod:`.arguments` reads the flags, and collects their errors."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=f"Pretrain a {model.upper()} with a pipeline schedule of ds_ext.",
        allow_abbrev=False,
    )
    versions = [f"{name} {package_version(name) or 'is not installed'}" for name in ("deepspeed", "torch")]
    parser.add_argument(
        "--version", action="version", version=", ".join([f"ds_ext {__version__}", *versions])
    )
    for title, flags in _groups(model).items():
        group = parser if title == "options" else parser.add_argument_group(title)
        for flag in flags:
            default = "" if flag.unset in (None, False, []) else f" ({flag.unset})"
            add_flags(group, [flag], help=flag.help + default)
    return parser
