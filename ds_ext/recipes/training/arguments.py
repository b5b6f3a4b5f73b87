"""Flags and JSON of the training scripts. Without ``--hf-model``, parsing imports neither torch nor DeepSpeed.

Flags override their defaults in ``"ds_ext": {"train": {...}}``. Flags for a key of the JSON itself (sizes, schedule,
batch, learning rate) set this key and must not contradict it.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...config.job import AUTO, JobConfig, import_own_schedules, load_config, named_schedule
from ...errors import ConfigError, Problems
from ...model.field_flags import Flag, flag_name
from .hf_model import take_sizes
from .megatron_flags import JSON_KEYS, TRAIN_KEYS, Harmless, Refused, row_of
from .script_flags import RUN_FLAGS, SCRIPTS, Model, build_parser, by_spelling, script_flags
from .section_flags import SECTIONS, require_at_most_one, steps_of_samples

# Flags whose values are in the JSON after parsing.
FLAGS_OF_THE_JSON = frozenset({*JSON_KEYS, "modules"})
# JSON of a job without --deepspeed_config.
_WITHOUT_JSON: dict[str, Any] = {"steps_per_print": 10**9, "ds_ext": {}}
# Flags for the number of steps, which exclude each other.
_STEPS = frozenset({"train_iters", "train_samples"})
_TYPES: Mapping[type, tuple[str, Any]] = {
    **{int: ("an integer", int), float: ("a number", int | float), str: ("text", str)},
    bool: ("true or false", bool),
}
Ignored = tuple[str, Harmless, list[str]]  # flag without effect, its row and its values


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
    all_flags = {**script_flags("gpt"), **script_flags(model)}  # a BERT has GPT's defaults
    values = {key: flag.unset for key, flag in all_flags.items() if key not in TRAIN_KEYS}
    flags, ignored_flags = _read_words(prog, argv, model, problems)
    args = argparse.Namespace(**{**values, **flags}, notes=[])
    path, base = args.deepspeed_config, None
    with problems.collect(*values):
        base = load_config(_json_without_file(args, problems) if path is None else path)
    if base is None:
        return args, None
    train, ignored_keys = _read_train(base.ds_ext.train, model, problems)
    args = argparse.Namespace(**{**values, **train, **flags})
    if args.hf_model:
        # Without "hf_model" in "train", the flag overrides the sizes in "train", as every flag overrides it.
        keys = train if "hf_model" not in flags else train.keys() & {"seq_length"}
        with problems.collect("hf_model"):
            take_sizes(args, {key: f"train.{key}" for key in keys} | {key: flag_name(key) for key in flags})
    with problems.collect():
        _resolve_model(args)
    with problems.collect("schedule"):
        import_own_schedules(base, args.modules)
    steps = flags.keys() & _STEPS or train.keys() & _STEPS
    with problems.collect():
        if len(steps) > 1:
            require_at_most_one(args, *sorted(steps))
    merged = _merge_json_flags(base.deepspeed, args, steps == {"train_samples"}, problems)
    args.notes = _ignored_note([*ignored_keys, *ignored_flags], merged.config, args, problems)
    _set_train_for_auto(merged.config, args)
    if path is None:
        merged.set_by.setdefault("train_batch_size", "--global-batch-size")
    whole = None
    with problems.collect("schedule"):
        whole = load_config(merged.config)
    if whole is None or problems.undecided & FLAGS_OF_THE_JSON:
        return args, None
    return args, JobConfig(whole.deepspeed, whole.ds_ext, path, merged.set_by)


def finished_json(
    prog: str, argv: Sequence[str], model: Model, args: argparse.Namespace, job: JobConfig
) -> dict[str, Any]:
    """Return the JSON that gives the same job without flags: all keys that flags set, and "train" for the others.

    ``args`` and ``job`` are the result of :func:`parse`.
    """
    keys = {*_read_words(prog, argv, model, Problems())[0]}
    if job.path:
        keys |= {*_read_train(load_config(job.path).ds_ext.train, model, Problems())[0]}
    if "train_samples" in keys:
        keys = keys - _STEPS | {"train_iters"}
    train = {key: value for key, value in vars(args).items() if key in keys - FLAGS_OF_THE_JSON - RUN_FLAGS}
    section = {**job.section, **({"train": train} if train else {})}
    return copy.deepcopy({**job.deepspeed, "ds_ext": section})


# --- flags of the command line and keys of "train" -------------------------------------------------------------------


def _read_words(
    prog: str, argv: Sequence[str], model: Model, problems: Problems
) -> tuple[dict[str, Any], list[Ignored]]:
    """Return the values of the flags in ``argv``, without defaults, and the flags without effect."""
    flags = by_spelling(model)
    values: dict[str, Any] = {}
    ignored: list[Ignored] = []
    unknown: list[str] = []
    for word, *texts in _grouped(argv):
        name, equals, text = word.partition("=")
        if name in ("-h", "--help", "--version"):
            build_parser(prog, model).parse_args([name])  # exits
        row = row_of(name)[1] if name.startswith("--") else None
        flag = row.flag(name) if isinstance(row, Harmless) else flags.get(name)
        if flag is None:
            unknown.append(name)
            continue
        nargs = flag.nargs or (0 if flag.kind is bool else 1)
        if equals and nargs == 0:
            problems.add(f"{name}: takes no value (got {text}). Write {name}.")
        elif equals:
            texts = [text, *texts]
        most = nargs if isinstance(nargs, int) else 1 if nargs == "?" else len(texts)
        texts, others = texts[:most], texts[most:]
        unknown += others
        if not texts and nargs in (1, "+"):
            problems.add(f"{name}: needs a value (got none).", flag.key)
        elif isinstance(row, Harmless):
            ignored.append((name, row, texts))
        else:
            value = True if flag.kind is bool else texts if flag.nargs else _number(flag, texts[0])
            _set_value(values, flag, name, value, problems)
    _report_unknown(prog, model, unknown, values, problems)
    return {key: value for key, value in values.items() if value != []}, ignored


def _grouped(words: Sequence[str]) -> list[list[str]]:
    """Return each flag with the words up to the next one. Negative numbers are no flags."""
    groups: list[list[str]] = []
    for word in words:
        if not groups or re.match("--?[A-Za-z]", word):
            groups.append([])
        groups[-1].append(word)
    return groups


def _number(flag: Flag, text: str) -> Any:
    """Return the number in a word; other words as they are."""
    try:
        return flag.kind(text)
    except ValueError:
        return text


def _set_value(values: dict[str, Any], flag: Flag, name: str, value: Any, problems: Problems) -> None:
    """Set the keys of a flag, or of a key of "train" with its ``name`` in errors. A wrong value becomes a problem."""
    row = TRAIN_KEYS.get(flag.key)
    with problems.collect(*(row.keys if row else [flag.key])):
        value = _typed(flag, name, value)
        if row is None:
            values[flag.key] = [*values.get(flag.key, []), value] if flag.repeated else value
        elif value is not False:
            values |= row.values(value)


def _typed(flag: Flag, name: str, value: Any) -> Any:
    if flag.nargs and isinstance(value, str | list):
        return value.split() if isinstance(value, str) else [str(word) for word in value]
    if flag.nargs:
        expected, is_valid = "a string or a list", False
    elif flag.choices:
        value = next((c for c in flag.choices if str(c).lower() == str(value).lower()), value)
        expected, is_valid = f"one of {', '.join(map(str, flag.choices))}", value in flag.choices
    else:
        expected, kind = _TYPES[flag.kind]
        is_valid = isinstance(value, kind) and isinstance(value, bool) == (flag.kind is bool)
        is_valid |= value is None and flag.kind is not bool
    if not is_valid:
        raise ConfigError(f"{name}: must be {expected} (got {value!r}).")
    return value


def _report_unknown(
    prog: str, model: Model, words: list[str], values: Mapping[str, Any], problems: Problems
) -> None:
    """Add a problem for each unknown flag, with its replacement or the most similar flag.

    These are then undecided, unless ``values`` has them. Words that are no flags are reported if there are no others.
    """
    for name in dict.fromkeys([word for word in words if word.startswith("--")] or words[:1]):
        error, replacement = _unknown_flag(prog, model, name)
        flags = (by_spelling(model).get(word) for word in re.findall(r"--[\w-]+", replacement))
        problems.add(error, *(flag.key for flag in flags if flag is not None and flag.key not in values))


def _unknown_flag(prog: str, model: Model, name: str) -> tuple[str, str]:
    """Return the error for a flag, and its replacement."""
    row = row_of(name)[1]
    if isinstance(row, Refused):
        return row.error(name), row.use
    for other, script in SCRIPTS.items():
        if name in by_spelling(other):
            because = "because its model has no such option"
            return f"{name}: unknown flag of {prog}, {because}. Use {script}.", ""
    if similar := difflib.get_close_matches(name, by_spelling(model), n=1):
        return f"{name}: unknown flag. Did you mean {similar[0]}?", similar[0]
    return f"{name}: unknown flag. `python {prog} --help` lists the flags.", ""


def _read_train(
    train: Mapping[str, Any], model: Model, problems: Problems
) -> tuple[dict[str, Any], list[Ignored]]:
    """Return the "train" object of the JSON, and its keys without effect.

    Its keys are flag names with underscores. Wrong keys become problems.
    """
    hidden = RUN_FLAGS | FLAGS_OF_THE_JSON
    flags = {key: flag for key, flag in script_flags(model).items() if key not in hidden}
    values: dict[str, Any] = {}
    ignored: list[Ignored] = []
    for key, value in train.items():
        flag, row = flags.get(key), row_of(key)[1]
        if flag is not None:
            _set_value(values, flag, f"train.{key}", value, problems)
        elif isinstance(row, Harmless):
            if value is not False:
                words = [] if value is True else value if isinstance(value, list) else [value]
                ignored.append((flag_name(key), row, [str(word) for word in words]))
        elif isinstance(row, Refused):
            problems.add(f"train.{key}: {row.error(flag_name(key))}")
        else:
            similar = difflib.get_close_matches(key, flags, n=1)
            fix = f"Did you mean {similar[0]!r}?" if similar else f"Known: {', '.join(sorted(flags))}."
            problems.add(f"train.{key}: unknown key (got {value!r}). {fix}", *similar)
    return values, ignored


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
    """Pass flags to "schedule": "auto", which also chooses the recomputation unless it is set."""
    section = config.get("ds_ext", {})
    if section.get("schedule") != AUTO:
        return
    values = {
        key: value for key in ("data_path", "stage_layers", "vocab_size") if (value := getattr(args, key))
    }
    recompute = {
        "recompute_granularity": args.recompute_granularity or AUTO,
        "recompute_interval": args.recompute_interval,
    }
    section["train"] = {**section.get("train", {}), **values, **recompute}


def _ignored_note(
    flags: Sequence[Ignored], config: Mapping[str, Any], args: argparse.Namespace, problems: Problems
) -> list[str]:
    """Return the line of the plan with Megatron's flags that have no effect here; empty without such flags.

    A flag that is not harmless for this job becomes a problem. ``flags`` are (flag, values). ``config`` is the JSON
    with all keys of other flags, ``args`` has the values of the keys of "train".
    """
    job = {**config, "ds_ext": {**config.get("ds_ext", {}), "train": vars(args)}}
    for flag, row, words in flags:
        for error in row.errors(flag, words, job):
            problems.add(error)
    texts = dict.fromkeys(" ".join([flag, *words]) for flag, _, words in flags)
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


# --- keys of the JSON ------------------------------------------------------------------------------------------------


@dataclass
class _Merged:
    """JSON while flags set its keys; ``path`` is its file, and ``set_by`` has the flag of each key."""

    config: dict[str, Any]
    path: str
    set_by: dict[str, str] = field(default_factory=dict)

    def section(self, *keys: str) -> dict[str, Any]:
        """Return an object of the JSON, created if missing."""
        section: Any = self.config
        for depth, key in enumerate(keys, start=1):
            section = section.setdefault(key, {})
            if not isinstance(section, dict):
                raise ConfigError(
                    f"{'.'.join(keys[:depth])}: not an object in {self.path} (got {section!r}). Write {{...}} or "
                    "remove it."
                )
        return section

    def set(self, path: str, value: Any, flag: str) -> None:
        """Set a key. Raises ConfigError on a contradiction."""
        *outer, key = path.split(".")
        section = self.section(*outer)
        if section.get(key, value) != value:
            if path == "ds_ext.schedule" and value != AUTO:
                named_schedule(value)  # an unknown name is reported first
            source = self.set_by.get(path, self.path)
            raise ConfigError(
                f"{flag}: contradicts {path} from {source} (got {section[key]!r}). Change or remove one of them."
            )
        section[key] = value
        self.set_by[path] = flag


def _merge_json_flags(
    base: Mapping[str, Any], args: argparse.Namespace, counts_samples: bool, problems: Problems
) -> _Merged:
    """Return the JSON ``base`` with the keys that flags set. Contradictions become problems.

    ``counts_samples``: the number of steps is that of ``--train-samples``. This sets ``args.train_iters``.
    """
    merged = _Merged(copy.deepcopy(dict(base)), args.deepspeed_config)
    for key, row in JSON_KEYS.items():
        value, flag = getattr(args, key), flag_name(key)
        with problems.collect():
            for path, key_value in row.keys(value).items() if not row.computed else ():
                merged.set(path, key_value, flag if value is True else f"{flag} {value}")
    if "global_batch_size" in problems.undecided:
        merged.config.setdefault("train_batch_size", 1)  # the job is refused; other flags need a number
    with problems.collect():
        if counts_samples:
            args.train_iters = int(steps_of_samples("--train-samples", args.train_samples, merged.config))
    args.train_samples = None
    for section in SECTIONS:
        with problems.collect():
            for path, value, flag in section(args, merged.config, base):
                merged.set(path, value, flag)
    if args.lr is not None and "optimizer" not in base:
        merged.config.setdefault("ds_ext", {})  # a JSON of Megatron-DeepSpeed
    if args.modules:
        ours = merged.section("ds_ext")
        ours["import"] = [*dict.fromkeys((*ours.get("import", ()), *args.modules))]
    return merged
