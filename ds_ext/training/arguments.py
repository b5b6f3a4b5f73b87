"""Flags and JSON of the training scripts. Without ``--hf-model``, parsing imports neither torch nor DeepSpeed.

Flags override their defaults in ``"ds_ext": {"train": {...}}``. Flags for a key of the JSON itself (sizes, schedule,
batch, learning rate) set this key and must not contradict it.
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
from ..planner.auto import MODEL_OPTIONS, MODEL_SIZES
from .flags import Model, build_parser
from .hf_model import take_sizes
from .megatron_flags import refusal
from .section_flags import SECTION_FLAGS, keys_of_flags

# Flag -> path in the DeepSpeed JSON, and the value that a switch sets.
_JSON_FLAGS: dict[str, tuple[tuple[str, ...], Any]] = {
    "schedule": (("ds_ext", "schedule"), None),
    "tensor_model_parallel_size": (("ds_ext", "tensor_parallel_size"), None),
    "sequence_parallel": (("ds_ext", "sequence_parallel"), True),
    "use_tp_pp_dp_mapping": (("ds_ext", "rank_order"), "tp-pp-dp"),
    "calculate_per_token_loss": (("ds_ext", "loss_weighting"), "tokens"),
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
    "loss_scale": (("fp16", "loss_scale"), None),
    "min_loss_scale": (("fp16", "min_loss_scale"), None),
    "loss_scale_window": (("fp16", "loss_scale_window"), None),
    "hysteresis": (("fp16", "hysteresis"), None),
    "use_distributed_optimizer": (("zero_optimization", "stage"), 1),
}
_BETA_FLAGS = ("adam_beta1", "adam_beta2")  # elements of one key
_DEFAULT_BETAS = (0.9, 0.999)  # of torch and DeepSpeed
# Flags whose values are in the JSON after parsing.
FLAGS_OF_THE_JSON = frozenset({*_JSON_FLAGS, *_BETA_FLAGS, *SECTION_FLAGS, "modules"})
# Flags of one run, which no JSON contains.
_FLAGS_OF_A_RUN = (
    *("deepspeed_config", "deepspeed", "local_rank", "dry_run", "write_config", "hosts", "help", "version"),
)
# JSON of a job without --deepspeed_config. The rest of Megatron's defaults are those of torch's AdamW.
_WITHOUT_JSON: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    "steps_per_print": 10**9,
    "ds_ext": {},
}


def parse(prog: str, argv: Sequence[str], model: Model = "gpt") -> tuple[argparse.Namespace, JobConfig]:
    """Return the flags and the JSON with all keys that flags set. Raises ConfigError.

    Args:
        prog: name of the script.
        model: model that the script trains.
    """
    parser = build_parser(prog, model)
    first = _parse_known(parser, argv)
    path = first.deepspeed_config
    job = load_config(_json_without_file(first) if path is None else path)
    parser.set_defaults(**_train_defaults(parser, job.ds_ext.train))
    args = parser.parse_args(argv)
    if args.hf_model:
        take_sizes(args, _given(prog, argv, model, job.ds_ext.train))
    _resolve_model(args)
    import_own_schedules(job)
    try:
        import_modules(args.modules, "--import")
    except ScheduleError as error:
        raise ConfigError(str(error)) from error.__cause__
    merged, flags = _merge_json_flags(job.deepspeed, args)
    _set_train_for_auto(merged, args)
    return args, JobConfig(merged, load_config(merged).ds_ext, path, flags)


def _given(prog: str, argv: Sequence[str], model: Model, train: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of every flag that the user set, by its ``dest``.

    The "train" object counts if it contains ``hf_model``. Otherwise ``--hf-model`` overrides its sizes, as every flag
    overrides it.
    """
    parser = build_parser(prog, model)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    flags = {dest: "--" + dest.replace("_", "-") for dest in vars(parser.parse_args(argv))}
    keys = train if "hf_model" in train and "hf_model" not in flags else train.keys() & {"seq_length"}
    return {**{key: f"train.{key}" for key in keys}, **flags}


def _parse_known(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags. The error lists all unknown flags, each with its replacement or the most similar flag."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        words = [word.partition("=")[0] for word in unknown if word.startswith("--")] or unknown[:1]
        lines = []
        for word in dict.fromkeys(words):
            near = difflib.get_close_matches(word, list(parser._option_string_actions), n=1)
            lines.append(
                refusal(word) or f"{word}: unknown flag.{f' Did you mean {near[0]}?' if near else ''}"
            )
        if all(refusal(word) is None for word in words):
            lines[-1] += f" `python {parser.prog} --help` lists the flags."
        raise ConfigError("\n".join(lines))
    return args


def _json_without_file(args: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON that flags complete. Raises ConfigError if a flag is missing that they need."""
    missing = [
        flag
        for flag, value in (("--lr", args.lr), ("--micro-batch-size", args.micro_batch_size))
        if not value
    ]
    if missing:
        raise ConfigError(
            f"--deepspeed_config: missing, and so {'are' if len(missing) > 1 else 'is'} {' and '.join(missing)}. Add "
            f"--deepspeed_config JSON (configs/ has examples), or {' and '.join(missing)}."
        )
    config = copy.deepcopy(_WITHOUT_JSON)
    if args.global_batch_size is None:
        config["gradient_accumulation_steps"] = 1  # as in Megatron
    return config


def finished_json(
    prog: str, argv: Sequence[str], model: Model, args: argparse.Namespace, job: JobConfig
) -> dict[str, Any]:
    """Return the JSON that gives the same job without flags: all keys that flags set, and "train" for the others.

    Args:
        prog, argv, model: arguments of :func:`parse`.
        args, job: its result.
    """
    config = copy.deepcopy(job.deepspeed)
    given = {key: name for key, name in _given(prog, argv, model, {}).items() if hasattr(args, key)}
    flags = {
        key: getattr(args, key)
        for key in given
        if key not in FLAGS_OF_THE_JSON and key not in _FLAGS_OF_A_RUN
    }
    section = config.setdefault("ds_ext", {})
    train = {**job.deepspeed.get("ds_ext", {}).get("train", {}), **flags}
    return {**config, "ds_ext": {**section, **({"train": train} if train else {})}}


def _train_defaults(parser: argparse.ArgumentParser, train: Mapping[str, Any]) -> dict[str, Any]:
    """Return the "train" object of the JSON as parser defaults; its keys are flag names with underscores."""
    actions = {action.dest: action for action in parser._actions}
    for dest in (*_FLAGS_OF_A_RUN, *FLAGS_OF_THE_JSON):
        del actions[dest]
    values: dict[str, Any] = {}
    for key, value in train.items():
        if key not in actions:
            sentence = refusal("--" + key.replace("_", "-"))
            if sentence is not None:
                raise ConfigError(f"train.{key}: {sentence}")
            near = difflib.get_close_matches(key, actions, n=1)
            fix = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(sorted(actions))}."
            raise ConfigError(f"train.{key}: unknown key (got {value!r}). {fix}")
        values[key] = _typed(actions[key], key, value)
    return values


def _typed(action: argparse.Action, key: str, value: Any) -> Any:
    """Return the value for a flag. Raises ConfigError for a wrong type."""
    if action.nargs == "*" and isinstance(value, str | list):
        return value.split() if isinstance(value, str) else [str(word) for word in value]
    if action.nargs == "*":
        expected, valid = "a string or a list", False
    elif action.nargs == 0:
        expected, valid = "true or false", isinstance(value, bool)
    elif value is None or action.type is None:
        expected, valid = "text", value is None or isinstance(value, str)
    elif action.type is int:
        expected, valid = "an integer", isinstance(value, int) and not isinstance(value, bool)
    else:
        expected, valid = "a number", isinstance(value, (int, float)) and not isinstance(value, bool)
    choices = tuple(action.choices or ())
    if choices:
        expected, valid = f"one of {', '.join(map(str, choices))}", value in choices
    if not valid:
        raise ConfigError(f"train.{key}: must be {expected} (got {value!r}).")
    return value


def _merge_json_flags(
    config: Mapping[str, Any], args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the JSON with the keys that flags set, and the flag of each key. Raises ConfigError."""
    merged = copy.deepcopy(dict(config))
    set_by: dict[str, str] = {}
    for dest, (path, constant) in _JSON_FLAGS.items():
        given = getattr(args, dest)
        if given is None or given is False:
            continue
        value = given if constant is None else constant
        flag = "--" + dest.replace("_", "-") + (f" {given}" if constant is None else "")
        _set_key(merged, path, value, flag, set_by, args.deepspeed_config)
    _merge_betas(merged, args, set_by)
    for path, value, flag in keys_of_flags(args, merged):
        _set_key(merged, path, value, flag, set_by, args.deepspeed_config)
    if args.modules:
        section = _section(merged, ("ds_ext", "import"), args.deepspeed_config)
        section["import"] = [*dict.fromkeys((*section.get("import", ()), *args.modules))]
    return merged, set_by


def _merge_betas(config: dict[str, Any], args: argparse.Namespace, set_by: dict[str, str]) -> None:
    """Set "betas"; a single flag keeps the other element. Raises ConfigError on a contradiction."""
    given = {dest: getattr(args, dest) for dest in _BETA_FLAGS if getattr(args, dest) is not None}
    if not given:
        return
    path = ("optimizer", "params", "betas")
    old = _section(config, path, args.deepspeed_config).get("betas")
    old = old if isinstance(old, list) and len(old) == len(_BETA_FLAGS) else _DEFAULT_BETAS
    betas = [given.get(dest, beta) for dest, beta in zip(_BETA_FLAGS, old, strict=True)]
    flag = " ".join(f"--{dest.replace('_', '-')} {beta}" for dest, beta in given.items())
    _set_key(config, path, betas, flag, set_by, args.deepspeed_config)


def _resolve_model(args: argparse.Namespace) -> None:
    """Set the defaults that depend on other flags, as in Megatron. Raises ConfigError on a contradiction."""
    if args.swiglu and args.ffn_hidden_size is None:
        # Three matrices then have about as many weights as the two of an MLP with 4 x hidden-size.
        args.ffn_hidden_size = max(64, 8 * args.hidden_size // 3 // 64 * 64)
    if args.group_query_attention:
        args.num_query_groups = 1 if args.num_query_groups is None else args.num_query_groups
    elif args.num_query_groups is not None:
        raise ConfigError(
            f"--num-query-groups: needs --group-query-attention (got {args.num_query_groups}). Add it, or remove "
            f"--num-query-groups."
        )


def _set_train_for_auto(config: dict[str, Any], args: argparse.Namespace) -> None:
    """Pass the model's flags to "schedule": "auto", which also chooses the recomputation unless it is set."""
    section = config.get("ds_ext", {})
    if section.get("schedule") != AUTO:
        return
    keys = (
        *MODEL_SIZES,
        *MODEL_OPTIONS,
        "position_embedding_type",
        "vocab_size",
        "data_path",
        "stage_layers",
    )
    known = {key: getattr(args, key) for key in keys if getattr(args, key)}
    recompute = {
        "recompute_granularity": args.recompute_granularity or AUTO,
        "recompute_interval": args.recompute_interval,
    }
    section["train"] = {**section.get("train", {}), **known, **recompute}


def _section(config: dict[str, Any], path: Sequence[str], json_path: str) -> dict[str, Any]:
    """Return the object with the last key of ``path``, created if missing. Raises ConfigError."""
    section: Any = config
    for depth, key in enumerate(path[:-1], start=1):
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            name = ".".join(path[:depth])
            raise ConfigError(
                f"{name}: not an object in {json_path} (got {section!r}). Write {{...}} or remove it."
            )
    return section


def _set_key(
    config: dict[str, Any],
    path: Sequence[str],
    value: Any,
    flag: str,
    set_by: dict[str, str],
    json_path: str,
) -> None:
    """Set the key at ``path`` and record its flag in ``set_by``. Raises ConfigError on a contradiction."""
    name, section = ".".join(path), _section(config, path, json_path)
    if section.get(path[-1], value) != value:
        if name == "ds_ext.schedule" and value != AUTO:
            named_schedule(value)  # an unknown name is reported first
        other = set_by.get(name, json_path)
        raise ConfigError(
            f"{flag}: contradicts {name} from {other} (got {section[path[-1]]!r}). Change or remove one of them."
        )
    section[path[-1]] = value
    set_by[name] = flag
