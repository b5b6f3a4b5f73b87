"""Flags and JSON of the training scripts. Without ``--hf-model``, parsing imports neither torch nor DeepSpeed.

Flags override their defaults in ``"ds_ext": {"train": {...}}``. Flags for a key of the JSON itself (sizes, schedule,
batch, learning rate) set this key and must not contradict it.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...config.job import AUTO, JobConfig, import_own_schedules, load_config, named_schedule
from ...errors import ConfigError, Problems, ScheduleError
from ...model.config import SIZES, TransformerConfig
from ...model.field_flags import flag_name, flags_of
from ...pipe_schedules.registry import import_modules
from .hf_model import take_sizes
from .megatron_flags import JSON_KEYS, Harmless, Refused, TrainKeys, row_of
from .script_flags import SCRIPTS, UNSET, Model, Parser, build_parser, choice
from .section_flags import SECTIONS, require_at_most_one, steps_of_samples, value_at

# Flags whose values are in the JSON after parsing.
FLAGS_OF_THE_JSON = frozenset({*JSON_KEYS, "modules"})
# Flags of one run, which no JSON contains.
_FLAGS_OF_A_RUN = (
    *("deepspeed_config", "deepspeed", "local_rank", "dry_run", "write_config", "hosts", "help", "version"),
)
# JSON of a job without --deepspeed_config.
_WITHOUT_JSON: dict[str, Any] = {"steps_per_print": 10**9, "ds_ext": {}}
# Flags for the number of steps, which exclude each other.
_STEPS = frozenset({"train_iters", "train_samples"})


def parse(prog: str, argv: Sequence[str], model: Model = "gpt") -> tuple[argparse.Namespace, JobConfig]:
    """Return the results of :func:`read_job`, and raise all its problems."""
    problems = Problems()
    args, job = read_job(prog, argv, model, problems)
    problems.raise_all()
    assert job is not None
    return args, job


def read_job(
    prog: str, argv: Sequence[str], model: Model, problems: Problems
) -> tuple[argparse.Namespace, JobConfig | None]:
    """Return the flags and the JSON with all keys that flags set; None if a problem leaves a key of it undecided.

    All ConfigErrors become ``problems``. ``notes`` of the flags are lines for the plan.
    """
    parser = build_parser(prog, model)
    parser.problems = problems
    values = {**flag_defaults(build_parser("")), **flag_defaults(parser)}  # a BERT has GPT's defaults
    flags = _flags_in(parser, argv)
    ignored_flags = flags.pop("ignored_flags", [])
    args = argparse.Namespace(**{**values, **flags}, notes=[])
    path, base = args.deepspeed_config, None
    with problems.collect(*values):
        base = load_config(_json_without_file(args, problems) if path is None else path)
    if base is None:
        return args, None
    train, ignored_keys = _train_values(parser, base.ds_ext.train)
    args = argparse.Namespace(**{**values, **train, **flags})
    if args.hf_model:
        # Without "hf_model" in "train", the flag overrides the sizes in "train", as every flag overrides it.
        keys = train if "hf_model" not in flags else train.keys() & {"seq_length"}
        with problems.collect("hf_model"):
            take_sizes(args, {key: f"train.{key}" for key in keys} | {key: flag_name(key) for key in flags})
    with problems.collect():
        _resolve_model(args)
    with problems.collect("schedule"):
        import_own_schedules(base)
    try:
        import_modules(args.modules, "--import")
    except ScheduleError as error:
        with problems.collect("schedule"):
            raise ConfigError(str(error)) from error.__cause__
    steps = flags.keys() & _STEPS or train.keys() & _STEPS
    with problems.collect():
        if len(steps) > 1:
            require_at_most_one(args, *sorted(steps))
    config, set_by = _merge_json_flags(base.deepspeed, args, steps == {"train_samples"}, problems)
    args.notes = _ignored_note([*ignored_keys, *ignored_flags], config, args, problems)
    _set_train_for_auto(config, args)
    if path is None:
        set_by.setdefault("train_batch_size", "--global-batch-size")
    with problems.collect("schedule"):
        settings = load_config(config).ds_ext
    if problems.undecided & FLAGS_OF_THE_JSON:
        return args, None
    return args, JobConfig(config, settings, path, set_by)


def flag_defaults(parser: argparse.ArgumentParser) -> dict[str, Any]:
    actions = (action for action in parser._actions if action.default is not argparse.SUPPRESS)
    return {action.dest: action.default for action in actions}


def _flags_in(parser: Parser, argv: Sequence[str]) -> dict[str, Any]:
    """Return the values of the flags in ``argv``, without defaults; "ignored_flags" are flags without effect."""
    # --import appends to its default.
    blank = {key: UNSET for key in flag_defaults(parser) if key != "modules"}
    parser.add_harmless(argv)
    words = [*parser.without_values(argv)]
    args, unknown_words = parser.parse_known_args(words, argparse.Namespace(**blank))
    _report_unknown_flags(parser, unknown_words, args)
    return {key: value for key, value in vars(args).items() if value is not UNSET and value != []}


def _report_unknown_flags(parser: Parser, words: list[str], args: argparse.Namespace) -> None:
    """Add a problem for each unknown flag, with its replacement or the most similar flag.

    These are then undecided, unless ``args`` has them.
    """
    flags = dict.fromkeys([word.partition("=")[0] for word in words if word.startswith("--")] or words[:1])
    for number, flag in enumerate(flags, start=1):
        line, replacement = _unknown_flag(parser, flag)
        if number == len(flags) and all(row_of(flag)[1] is None for flag in flags):
            line += f" `python {parser.prog} --help` lists the flags."
        actions = map(parser._option_string_actions.get, re.findall(r"--[\w-]+", replacement))
        dests = (action.dest for action in actions if action is not None)
        parser.problems.add(line, *(dest for dest in dests if getattr(args, dest, UNSET) is UNSET))


def _unknown_flag(parser: Parser, flag: str) -> tuple[str, str]:
    """Return the error for a flag, and its replacement."""
    row = row_of(flag)[1]
    if isinstance(row, Refused):
        return row.error(flag), row.use
    for model, script in SCRIPTS.items():
        if flag in build_parser(script, model)._option_string_actions:
            because = "because its model has no such option"
            return f"{flag}: unknown flag of {parser.prog}, {because}. Use {script}.", ""
    similar = difflib.get_close_matches(flag, list(parser._option_string_actions), n=1)
    return f"{flag}: unknown flag." + (f" Did you mean {similar[0]}?" if similar else ""), "".join(similar)


def _ignored_note(
    flags: Sequence[tuple[str, Sequence[str]]],
    config: Mapping[str, Any],
    args: argparse.Namespace,
    problems: Problems,
) -> list[str]:
    """Return the line of the plan with Megatron's flags that have no effect here; empty without such flags.

    A flag that is not harmless for this job becomes a problem. ``flags`` are (flag, values). ``config`` is the JSON
    with all keys of other flags, ``args`` has the values of the keys of "train".
    """
    job = {**config, "ds_ext": {**config.get("ds_ext", {}), "train": vars(args)}}
    for flag, words in flags:
        row = row_of(flag)[1]
        assert isinstance(row, Harmless)
        errors = [row.error(flag, words)]
        for path, values in row.needs.items():
            value = value_at(job, path)
            if value not in values:
                allowed = " or ".join(json.dumps(value) for value in values if value is not None)
                errors.append(f"{flag}: needs {path} {allowed} (got {value!r}).")
        for error in filter(None, errors):
            problems.add(error)
    texts = dict.fromkeys(" ".join([flag, *words]) for flag, words in flags)
    return [f"ignored   {', '.join(texts)} (without effect here)"] if texts else []


def _json_without_file(args: argparse.Namespace, problems: Problems) -> dict[str, Any]:
    """Return the JSON that flags complete. A missing required flag becomes a problem."""
    keys = [
        key for key in ("lr", "micro_batch_size") if not getattr(args, key) and key not in problems.undecided
    ]
    if keys:
        missing = " and ".join(map(flag_name, keys))
        problems.add(
            f"--deepspeed_config: missing, and so {'are' if len(keys) > 1 else 'is'} {missing}. Add "
            f"--deepspeed_config JSON (configs/ has examples), or {missing}.",
            *keys,
        )
    config = copy.deepcopy(_WITHOUT_JSON)
    if args.clip_grad is None:
        config["gradient_clipping"] = 1.0  # as in Megatron
    if args.global_batch_size is None:
        config["gradient_accumulation_steps"] = 1  # as in Megatron
    return config


def finished_json(
    prog: str, argv: Sequence[str], model: Model, args: argparse.Namespace, job: JobConfig
) -> dict[str, Any]:
    """Return the JSON that gives the same job without flags: all keys that flags set, and "train" for the others.

    ``args`` and ``job`` are the result of :func:`parse`.
    """
    parser = build_parser(prog, model)
    keys = {
        *(_train_values(parser, load_config(job.path).ds_ext.train)[0] if job.path else ()),
        *_flags_in(parser, argv),
    }
    if "train_samples" in keys:
        keys = keys - _STEPS | {"train_iters"}
    run_flags = FLAGS_OF_THE_JSON.union(_FLAGS_OF_A_RUN, ("ignored_flags",))
    train = {key: value for key, value in vars(args).items() if key in keys - run_flags}
    section = {key: value for key, value in job.deepspeed.get("ds_ext", {}).items() if key != "train"}
    return copy.deepcopy({**job.deepspeed, "ds_ext": {**section, **({"train": train} if train else {})}})


def _train_values(
    parser: Parser, train: Mapping[str, Any]
) -> tuple[dict[str, Any], list[tuple[str, list[str]]]]:
    """Return the "train" object of the JSON, and its keys without effect, as (flag, values).

    Its keys are flag names with underscores. Wrong keys become problems of the parser.
    """
    problems = parser.problems
    actions = {action.dest: action for action in parser._actions}
    for dest in (*_FLAGS_OF_A_RUN, *FLAGS_OF_THE_JSON):
        del actions[dest]
    values: dict[str, Any] = {}
    ignored_keys: list[tuple[str, list[str]]] = []
    for key, value in train.items():
        action, row = actions.get(key), row_of(key)[1]
        if action is not None and isinstance(row, TrainKeys):
            with problems.collect(*row.keys):
                values |= row.values(_typed(action, key, value)) if value is not False else {}
        elif action is not None:
            with problems.collect(key):
                values[key] = _typed(action, key, value)
        elif isinstance(row, Harmless):
            if value is not False:
                words = [] if value is True else value if isinstance(value, list) else [value]
                ignored_keys.append((flag_name(key), [str(word) for word in words]))
        elif isinstance(row, Refused):
            problems.add(f"train.{key}: {row.error(flag_name(key))}")
        else:
            similar = difflib.get_close_matches(key, actions, n=1)
            fix = f"Did you mean {similar[0]!r}?" if similar else f"Known: {', '.join(sorted(actions))}."
            problems.add(f"train.{key}: unknown key (got {value!r}). {fix}", *similar)
    return values, ignored_keys


def _typed(action: argparse.Action, key: str, value: Any) -> Any:
    if action.nargs == "*" and isinstance(value, str | list):
        return value.split() if isinstance(value, str) else [str(word) for word in value]
    choices = tuple(action.choices or ())
    if choices:
        value = choice(value, choices)
        expected = f"one of {', '.join(map(str, choices))}"
        is_valid = value in choices
    else:
        expected, is_valid = _check_type(action, value)
    if not is_valid:
        raise ConfigError(f"train.{key}: must be {expected} (got {value!r}).")
    return value


def _check_type(action: argparse.Action, value: Any) -> tuple[str, bool]:
    """Return the name of a flag's type, for errors, and whether the value has it."""
    if action.nargs == "*":
        return "a string or a list", False  # _typed() has converted both
    if action.nargs == 0:
        return "true or false", isinstance(value, bool)
    if value is None or action.type is None:
        return "text", value is None or isinstance(value, str)
    if action.type is int:
        return "an integer", isinstance(value, int) and not isinstance(value, bool)
    return "a number", isinstance(value, int | float) and not isinstance(value, bool)


def _merge_json_flags(
    config: Mapping[str, Any], args: argparse.Namespace, counts_samples: bool, problems: Problems
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the JSON with the keys that flags set, and the flag of each key. Contradictions become problems.

    ``counts_samples``: the number of steps is that of ``--train-samples``. This sets ``args.train_iters``.
    """
    merged = copy.deepcopy(dict(config))
    set_by: dict[str, str] = {}
    for dest, row in JSON_KEYS.items():
        value, flag = getattr(args, dest), flag_name(dest)
        if row.computed or value is None or value is False:
            continue
        if row.kind is None:
            value = row.value
        else:
            flag = f"{flag} {value}"
        with problems.collect():
            _set_key(merged, row.path.split("."), value, flag, set_by, args.deepspeed_config)
    if "global_batch_size" in problems.undecided:
        merged.setdefault("train_batch_size", 1)  # the job is refused; other flags need a number
    with problems.collect():
        if counts_samples:
            args.train_iters = int(steps_of_samples("--train-samples", args.train_samples, merged))
    args.train_samples = None
    for section in SECTIONS:
        with problems.collect():
            for path, value, flag in section(args, merged, config):
                _set_key(merged, path, value, flag, set_by, args.deepspeed_config)
    if args.lr is not None and "optimizer" not in config:
        merged.setdefault("ds_ext", {})  # a JSON of Megatron-DeepSpeed
    if args.modules:
        section = _section(merged, ("ds_ext", "import"), args.deepspeed_config)
        section["import"] = [*dict.fromkeys((*section.get("import", ()), *args.modules))]
    return merged, set_by


def _resolve_model(args: argparse.Namespace) -> None:
    """Set the defaults that depend on other flags, as in Megatron."""
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
    values = {key: value for key in ("data_path", "stage_layers") if (value := getattr(args, key))}
    for name, flag in flags_of(TransformerConfig).items():
        value = getattr(args, flag.key)
        if value is not None and (name in SIZES or value != flag.default):
            values[flag.key] = value
    recompute = {
        "recompute_granularity": args.recompute_granularity or AUTO,
        "recompute_interval": args.recompute_interval,
    }
    section["train"] = {**section.get("train", {}), **values, **recompute}


def _section(config: dict[str, Any], path: Sequence[str], json_path: str) -> dict[str, Any]:
    """Return the object that contains the last key of ``path``, created if missing."""
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
        source = set_by.get(name, json_path)
        raise ConfigError(
            f"{flag}: contradicts {name} from {source} (got {section[path[-1]]!r}). Change or remove one of them."
        )
    section[path[-1]] = value
    set_by[name] = flag
