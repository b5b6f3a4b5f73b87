"""Flags of the training scripts, under Megatron's names. Pure: parsing imports neither torch nor deepspeed.

Two sources meet here. Flags win over the defaults in the JSON's ``"ds_ext": {"train": {...}}``. Flags that mean a
key of the JSON itself (sizes, schedule, batch, learning rate) fill it in, and may not contradict it.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from . import __version__
from .auto import AUTO, MODEL_SIZES
from .config import JobConfig, load_config
from .errors import ConfigError
from .megatron_flags import TOKENIZER_TYPES, refusal

# Flag -> path in the DeepSpeed JSON, and the value it sets when it is a switch.
_JSON_FLAGS: dict[str, tuple[tuple[str, ...], Any]] = {
    "schedule": (("ds_ext", "schedule"), None),
    "tensor_model_parallel_size": (("ds_ext", "tensor_parallel_size"), None),
    "sequence_parallel": (("ds_ext", "sequence_parallel"), True),
    "pipeline_model_parallel_size": (("ds_ext", "pipeline_parallel_size"), None),
    "enable_bitpipe_schedule": (("ds_ext", "schedule"), "bitpipe"),
    "use_dpp": (("ds_ext", "schedule"), "dpp"),
    "forward_backward_disaggregating": (("ds_ext", "schedule"), "fbd"),
    "ignore_forward_tensor_parallel": (("ds_ext", "fbd", "merge_forward_tensor_parallel"), True),
    "node_ips": (("ds_ext", "transport_options", "node_ips"), None),
    "micro_batch_size": (("train_micro_batch_size_per_gpu",), None),
    "global_batch_size": (("train_batch_size",), None),
    "clip_grad": (("gradient_clipping",), None),
    "lr": (("optimizer", "params", "lr"), None),
    "weight_decay": (("optimizer", "params", "weight_decay"), None),
    "adam_eps": (("optimizer", "params", "eps"), None),
    "bf16": (("bf16", "enabled"), True),
    "fp16": (("fp16", "enabled"), True),
}
# These two are one key, whose default is torch's and DeepSpeed's.
_BETA_FLAGS = ("adam_beta1", "adam_beta2")
_DEFAULT_BETAS = (0.9, 0.999)


class _Parser(argparse.ArgumentParser):
    """Raises what argparse would print in every rank."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. `python {self.prog} --help` lists the flags.")


def build_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of ``train_gpt.py``."""
    parser = _Parser(
        prog=prog, description="Pretrain a GPT with a pipeline schedule of ds_ext.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=_versions())
    parser.add_argument(
        "--deepspeed_config", required=True, metavar="JSON", help='DeepSpeed JSON with a "ds_ext" section'
    )
    parser.add_argument(
        "--deepspeed", action="store_true", help="accepted for launch scripts; DeepSpeed is always used"
    )
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, default=None, help="set by the deepspeed launcher"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="validate, print the plan and exit; launches nothing"
    )
    parser.add_argument(
        "--metrics-file", metavar="PATH", help="one JSON object a line and step, written by rank 0"
    )
    _add_model(parser.add_argument_group("model"))
    _add_data(parser.add_argument_group("data"))
    _add_training(parser.add_argument_group("training"))
    _add_json_flags(parser.add_argument_group("keys of the JSON (a contradiction is an error)"))
    return parser


def _versions() -> str:
    """Ours and those of what we run on, read without importing them."""
    words = [f"ds_ext {__version__}"]
    for package in ("deepspeed", "torch"):
        try:
            words.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            words.append(f"{package} is not installed")
    return ", ".join(words)


def _add_model(group: Any) -> None:
    group.add_argument("--num-layers", type=int, default=8, help="transformer layers (%(default)s)")
    group.add_argument("--hidden-size", type=int, default=128)
    group.add_argument("--num-attention-heads", type=int, default=4)
    group.add_argument("--ffn-hidden-size", type=int, default=None, help="4 x hidden-size by default")
    group.add_argument("--seq-length", type=int, default=128)
    group.add_argument("--max-position-embeddings", type=int, default=None, help="seq-length by default")
    group.add_argument("--hidden-dropout", type=float, default=0.1)
    group.add_argument("--attention-dropout", type=float, default=0.1)
    group.add_argument("--init-method-std", type=float, default=0.02)
    group.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    group.add_argument(
        "--recompute-granularity",
        choices=["none", "full"],
        default=None,
        help="full: keep only each layer's input, compute the rest again in the backward (none, or what the schedule "
        "auto chooses)",
    )
    group.add_argument(
        "--recompute-interval",
        type=int,
        default=1,
        metavar="K",
        help="recompute every K-th layer (%(default)s)",
    )
    group.add_argument("--seed", type=int, default=1234)


def _add_data(group: Any) -> None:
    group.add_argument(
        "--data-path",
        nargs="*",
        default=[],
        metavar="PATH",
        help="a prepared folder or .bin/.idx prefix, or a blend: 0.3 a 0.7 b",
    )
    group.add_argument("--split", default="969,30,1", help="train, valid, test shares (%(default)s)")
    group.add_argument(
        "--tokenizer",
        "--tokenizer-model",
        metavar="FILE",
        help="tokenizer.json or sentencepiece model; checked against the data",
    )
    group.add_argument(
        "--tokenizer-type",
        choices=[*TOKENIZER_TYPES],
        help="accepted for launch scripts; must agree with the files, which say what they are",
    )
    group.add_argument("--vocab-file", metavar="FILE", help="GPT-2 vocab.json, with --merge-file")
    group.add_argument("--merge-file", metavar="FILE")


def _add_training(group: Any) -> None:
    group.add_argument(
        "--train-iters", type=int, default=100, help="optimizer steps in all, those before a resume included"
    )
    group.add_argument("--eval-interval", type=int, default=0, metavar="STEPS", help="0: only at the end")
    group.add_argument("--eval-iters", type=int, default=2, help="steps an evaluation averages over; 0: none")
    group.add_argument("--save", metavar="DIR", help="write checkpoints here")
    group.add_argument("--save-interval", type=int, default=0, metavar="STEPS", help="0: only at the end")
    group.add_argument("--load", metavar="DIR", help="resume from the latest checkpoint in DIR")
    group.add_argument(
        "--log-interval",
        type=int,
        default=1,
        metavar="STEPS",
        help="print every so many steps, and the first and the last (%(default)s)",
    )


def _add_json_flags(group: Any) -> None:
    group.add_argument("--schedule", help="ds_ext.schedule")
    group.add_argument(
        "--pipeline-model-parallel-size", type=int, metavar="D", help="ds_ext.pipeline_parallel_size"
    )
    group.add_argument(
        "--tensor-model-parallel-size", type=int, metavar="T", help="ds_ext.tensor_parallel_size"
    )
    group.add_argument("--micro-batch-size", type=int, help="train_micro_batch_size_per_gpu")
    group.add_argument("--global-batch-size", type=int, help="train_batch_size")
    group.add_argument("--lr", type=float, help="optimizer.params.lr")
    group.add_argument("--weight-decay", type=float, help="optimizer.params.weight_decay")
    group.add_argument("--adam-beta1", type=float, help="optimizer.params.betas, the first")
    group.add_argument("--adam-beta2", type=float, help="optimizer.params.betas, the second")
    group.add_argument("--adam-eps", type=float, help="optimizer.params.eps")
    group.add_argument("--bf16", action="store_true", help="bf16.enabled")
    group.add_argument("--fp16", action="store_true", help="fp16.enabled")
    group.add_argument("--sequence-parallel", action="store_true", help="ds_ext.sequence_parallel")
    group.add_argument("--clip-grad", type=float, help="gradient_clipping")
    group.add_argument("--enable-bitpipe-schedule", action="store_true", help='"schedule": "bitpipe"')
    group.add_argument("--use-dpp", action="store_true", help='"schedule": "dpp"')
    group.add_argument("--forward-backward-disaggregating", action="store_true", help='"schedule": "fbd"')
    group.add_argument(
        "--ignore-forward-tensor-parallel",
        action="store_true",
        help="ds_ext.fbd.merge_forward_tensor_parallel",
    )
    group.add_argument("--node-ips", metavar="IP,IP", help="ds_ext.transport_options.node_ips")


def parse(prog: str, argv: Sequence[str]) -> tuple[argparse.Namespace, JobConfig]:
    """Flags and JSON together, validated. Raises ConfigError."""
    parser = build_parser(prog)
    path = _parse_known(parser, argv).deepspeed_config
    job = load_config(path)
    parser.set_defaults(**_train_defaults(parser, job.ds_ext.train))
    args = parser.parse_args(argv)
    merged, flags = _merge_json_flags(job.deepspeed, args)
    _tell_auto(merged, args)
    return args, JobConfig(merged, load_config(merged).ds_ext, path, flags)


def _parse_known(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Refuse the first flag that the parser does not have: Megatron's with the way out, others with the nearest."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        word = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
        sentence = refusal(word)
        if sentence is not None:
            raise ConfigError(sentence)
        near = difflib.get_close_matches(word, list(parser._option_string_actions), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        parser.error(f"unrecognized argument {word}{hint}")
    return args


def _train_defaults(parser: argparse.ArgumentParser, train: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON's "train" object as parser defaults: keys are flags with underscores."""
    actions = {action.dest: action for action in parser._actions}
    hidden = {
        "deepspeed_config",
        "deepspeed",
        "local_rank",
        "dry_run",
        "help",
        "version",
        *_JSON_FLAGS,
        *_BETA_FLAGS,
    }
    values: dict[str, Any] = {}
    for key, value in train.items():
        if key not in actions or key in hidden:
            sentence = refusal("--" + key.replace("_", "-"))
            if sentence is not None:
                raise ConfigError(f'"ds_ext": "train" has no key {key!r}: {sentence}')
            known = sorted(set(actions) - hidden)
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(f'"ds_ext": "train" has no key {key!r}{hint}; its keys: {", ".join(known)}.')
        values[key] = _typed(actions[key], key, value)
    return values


def _typed(action: argparse.Action, key: str, value: Any) -> Any:
    if action.nargs == "*":
        if not isinstance(value, str | list):
            raise ConfigError(f'"ds_ext": "train": {key} must be a text or a list; got {value!r}.')
        return value.split() if isinstance(value, str) else [str(v) for v in value]
    if value is None or action.type is None:
        ok = value is None or isinstance(value, str)
    elif action.type is int:
        ok = isinstance(value, int) and not isinstance(value, bool)
    else:
        ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not ok or (action.choices is not None and value not in action.choices):
        wanted = (
            f"one of {', '.join(map(str, action.choices))}"
            if action.choices
            else getattr(action.type, "__name__", "str")
        )
        raise ConfigError(f'"ds_ext": "train": {key} must be {wanted}; got {value!r}.')
    return value


def _merge_json_flags(
    config: Mapping[str, Any], args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, str]]:
    """The JSON with the flags that mean keys of it, and which flag said which; a contradiction is a ConfigError."""
    merged = copy.deepcopy(dict(config))
    said_by: dict[str, str] = {}
    for dest, (path, constant) in _JSON_FLAGS.items():
        given = getattr(args, dest)
        if given is None or given is False:
            continue
        value = given if constant is None else constant
        flag = "--" + dest.replace("_", "-") + (f" {given}" if constant is None else "")
        _set_key(merged, path, value, flag, said_by, args.deepspeed_config)
    _merge_betas(merged, args, said_by)
    return merged, said_by


def _tell_auto(config: dict[str, Any], args: argparse.Namespace) -> None:
    """Have "schedule": "auto" choose for the model that the flags make, and for recomputation if they leave it open."""
    section = config.get("ds_ext", {})
    if section.get("schedule") != AUTO:
        return
    known = {key: getattr(args, key) for key in MODEL_SIZES if getattr(args, key) is not None}
    recompute = {
        "recompute_granularity": args.recompute_granularity or AUTO,
        "recompute_interval": args.recompute_interval,
    }
    section["train"] = {**section.get("train", {}), **known, **recompute}


def _merge_betas(config: dict[str, Any], args: argparse.Namespace, said_by: dict[str, str]) -> None:
    """One flag alone leaves the other beta as the JSON has it."""
    given = {dest: getattr(args, dest) for dest in _BETA_FLAGS if getattr(args, dest) is not None}
    if not given:
        return
    path = ("optimizer", "params", "betas")
    old = _section(config, path, args.deepspeed_config).get("betas")
    old = old if isinstance(old, list) and len(old) == len(_BETA_FLAGS) else _DEFAULT_BETAS
    wanted = [given.get(dest, beta) for dest, beta in zip(_BETA_FLAGS, old, strict=True)]
    flag = " ".join(f"--{dest.replace('_', '-')} {beta}" for dest, beta in given.items())
    _set_key(config, path, wanted, flag, said_by, args.deepspeed_config)


def _section(config: dict[str, Any], path: Sequence[str], json_path: str) -> dict[str, Any]:
    """The object that holds the last key of ``path``, made if it is not there."""
    section: Any = config
    for depth, key in enumerate(path[:-1], start=1):
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            raise ConfigError(f'"{".".join(path[:depth])}" must be an object in {json_path}.')
    return section


def _set_key(
    config: dict[str, Any],
    path: Sequence[str],
    value: Any,
    flag: str,
    said_by: dict[str, str],
    json_path: str,
) -> None:
    """Set the key at ``path`` and note in ``said_by`` that ``flag`` did. Raises ConfigError on a contradiction."""
    name, section = ".".join(path), _section(config, path, json_path)
    if section.get(path[-1], value) != value:
        other = said_by.get(name, json_path)
        raise ConfigError(
            f'{flag} contradicts "{name}": {section[path[-1]]!r} of {other}. Change one of the two.'
        )
    section[path[-1]] = value
    said_by[name] = flag
