"""Flags and JSON of the training scripts together. Pure: parsing imports neither torch nor deepspeed.

Two sources meet here. Flags win over the defaults in the JSON's ``"ds_ext": {"train": {...}}``. Flags that mean a
key of the JSON itself (sizes, schedule, batch, learning rate) fill it in, and may not contradict it.
"""

from __future__ import annotations

import argparse
import copy
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from ..config.job import AUTO, JobConfig, import_own_schedules, load_config, named_schedule
from ..errors import ConfigError, ScheduleError
from ..pipe_schedules.registry import import_modules
from ..planner.auto import MODEL_SIZES
from .flags import Model, build_parser
from .megatron_flags import refusal

__all__ = ["build_parser", "parse"]

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
# Flags whose values are found in the JSON after parsing.
FLAGS_OF_THE_JSON = frozenset({*_JSON_FLAGS, *_BETA_FLAGS, "modules"})


def parse(prog: str, argv: Sequence[str], model: Model = "gpt") -> tuple[argparse.Namespace, JobConfig]:
    """Flags and JSON together, validated, for the script that trains ``model``. Raises ConfigError."""
    parser = build_parser(prog, model)
    path = _parse_known(parser, argv).deepspeed_config
    job = load_config(path)
    parser.set_defaults(**_train_defaults(parser, job.ds_ext.train))
    args = parser.parse_args(argv)
    _import_own_schedules(job, args.modules)
    merged, flags = _merge_json_flags(job.deepspeed, args)
    _tell_auto(merged, args)
    return args, JobConfig(merged, load_config(merged).ds_ext, path, flags)


def _import_own_schedules(job: JobConfig, modules: Sequence[str]) -> None:
    """Import the modules of "import" and ``--import``, which may register the schedule. Raises ConfigError."""
    import_own_schedules(job)
    try:
        import_modules(modules, "--import")
    except ScheduleError as error:
        raise ConfigError(str(error)) from error.__cause__


def _parse_known(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags; refuse the first unknown one, with its replacement or the nearest known flag."""
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
        *FLAGS_OF_THE_JSON,
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
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f'"ds_ext": "train": {key} must be true or false; got {value!r}.')
        return value
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
    if args.modules:
        section = _section(merged, ("ds_ext", "import"), args.deepspeed_config)
        section["import"] = [*dict.fromkeys((*section.get("import", ()), *args.modules))]
    return merged, said_by


def _tell_auto(config: dict[str, Any], args: argparse.Namespace) -> None:
    """Have "schedule": "auto" choose for the model that the flags make, and for recomputation if they leave it open."""
    section = config.get("ds_ext", {})
    if section.get("schedule") != AUTO:
        return
    keys = (*MODEL_SIZES, "data_path", "stage_layers")
    known = {key: getattr(args, key) for key in keys if getattr(args, key)}
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
        if name == "ds_ext.schedule" and value != AUTO:
            named_schedule(value)  # a typo contradicts every JSON
        other, way = said_by.get(name), "Leave one of the two out"
        if other is None:
            other, way = json_path, f'Change one of the two, or leave the key "{path[-1]}" out of the JSON'
        raise ConfigError(f'{flag} contradicts "{name}": {section[path[-1]]!r} of {other}. {way}.')
    section[path[-1]] = value
    said_by[name] = flag
