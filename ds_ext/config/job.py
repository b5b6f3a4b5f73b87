"""Keys, types and checks of the ``"ds_ext"`` section of a DeepSpeed JSON. Needs no torch."""

from __future__ import annotations

import base64
import binascii
import difflib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError

from ..errors import ConfigError, Problems, ScheduleError
from ..parallel.rank_order import DEEPSPEED_ORDER, parse_rank_order
from ..pipe_schedules import Schedule, get_schedule
from ..pipe_schedules.files import is_timetable_file, schedule_of_file
from ..pipe_schedules.registry import import_modules
from .deepspeed_json import check_deepspeed_keys, notes_on_keys, parse_json
from .sections import FbdOptions, RecoveryOptions, Section, TraceOptions, TransportOptions

AUTO = "auto"  # the schedule that the planner chooses

UNPOLLED = frozenset({"torch"})  # transports without wait_any(), which an order decided at run time needs


class DsExtConfig(Section):
    """The ``"ds_ext"`` section of a DeepSpeed JSON."""

    schedule: str = "1f1b"
    pipeline_parallel_size: int = Field(default=1, ge=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
    sequence_parallel: bool = False
    sequence_slices: int = Field(default=1, ge=1)
    slice_lengths: Literal["equal", "balanced"] | list[int] = "equal"
    vocabulary_parallel_head: bool = False
    max_activation_memory: str | None = None
    rank_order: str = str(DEEPSPEED_ORDER)
    schedule_options: dict[str, Any] = Field(default_factory=dict)
    modules: list[str] = Field(default_factory=list, alias="import")
    loss_weighting: Literal["tokens", "micro_batches"] = "tokens"
    eager_gradient_sync: bool = True
    overlap_across_steps: bool = False
    keyed_random: bool = True
    print_plan: Literal[True, False, "all"] = True
    max_nonfinite_losses: int = Field(default=10, ge=0)
    allow_zero_norm: bool = False
    auxiliary_loss: Literal["pooled", "per_layer"] | None = None
    router_bias_update_rate: float = Field(default=0.0, ge=0)
    audit_interval: int = Field(default=0, ge=0)
    transport: Literal["auto", "shm", "rdma", "tcp", "torch"] = "auto"
    transport_options: TransportOptions = TransportOptions()
    fbd: FbdOptions = FbdOptions()
    trace: TraceOptions = TraceOptions()
    recovery: RecoveryOptions | None = None
    train: dict[str, Any] = Field(default_factory=dict)


def _keys(section: type[Section]) -> list[str]:
    return [field.alias or name for name, field in section.model_fields.items()]


def _section(outer: type[Section], key: str) -> type[Section]:
    annotation = outer.model_fields[key].annotation
    return next(
        t for t in (annotation, *get_args(annotation)) if isinstance(t, type) and issubclass(t, Section)
    )


def import_own_schedules(job: JobConfig, modules: Sequence[str] = ()) -> None:
    """Import the modules under the key "import", also from the JSON's folder, and those of ``--import``."""
    try:
        import_modules(job.ds_ext.modules, '"ds_ext": import', Path(job.path or ".").parent)
        import_modules(modules, "--import")
    except ScheduleError as error:
        raise ConfigError(str(error)) from error.__cause__


def named_schedule(name: str) -> Schedule:
    try:
        return schedule_of_file(name) if is_timetable_file(name) else get_schedule(name)
    except ScheduleError as error:
        is_file = is_timetable_file(name)
        hint = "" if is_file else ' A job also accepts "auto" or the path to a timetable file.'
        raise ConfigError(f"{error}{hint}") from None


@dataclass(frozen=True)
class JobConfig:
    """DeepSpeed JSON with its validated ``"ds_ext"`` section.

    Attributes:
        deepspeed: the whole JSON.
        path: path to the JSON file; None: the JSON was passed as a dict.
        flags: key -> the flag that set it, for errors, such as "train_batch_size" -> "--global-batch-size 48".
    """

    deepspeed: dict[str, Any]
    ds_ext: DsExtConfig
    path: str | None = None
    flags: Mapping[str, str] = field(default_factory=dict)

    @property
    def section(self) -> dict[str, Any]:
        """The "ds_ext" section as it is written, without "train"."""
        return {key: value for key, value in self.deepspeed.get("ds_ext", {}).items() if key != "train"}

    @property
    def notes(self) -> list[str]:
        """Notes on settings that are valid but have no effect, or a smaller one than they seem to have."""
        notes = notes_on_keys(self.deepspeed)
        if self.ds_ext.sequence_parallel and self.ds_ext.tensor_parallel_size == 1:
            notes.append(
                "ds_ext.sequence_parallel: no effect with tensor_parallel_size 1, because each rank has all tokens"
            )
        return notes


def require_section(job: JobConfig) -> None:
    """Raise ConfigError for a JSON without a "ds_ext" section, which would train without a pipeline."""
    if "ds_ext" not in job.deepspeed:
        raise ConfigError(
            f'"ds_ext": missing in {f"the JSON {job.path}" if job.path else "the configuration"}. Add '
            '"ds_ext": {"schedule": "bitpipe", "pipeline_parallel_size": 4}, or "ds_ext": {} for no pipeline.'
        )


def load_config(source: str | Path | Mapping[str, Any]) -> JobConfig:
    """Read and validate a DeepSpeed JSON (path, dict, or the JSON in base64, as in DeepSpeed)."""
    path = None
    config = dict(source) if isinstance(source, Mapping) else _decode(str(source))
    if config is None:
        path = str(source)
        config = _read(Path(path))
    section = config.get("ds_ext", {})
    if not isinstance(section, Mapping):
        raise ConfigError(f'ds_ext: must be an object such as {{"schedule": "bitpipe"}} (got {section!r}).')
    config, section = _with_autotp_size(config, section)
    config = _without_expert_parallel(config, section.get("tensor_parallel_size", 1))
    problems, settings = Problems(), DsExtConfig()
    with problems.collect():
        check_deepspeed_keys(config, set(_keys(DsExtConfig)) - {"train"})
    with problems.collect():
        settings = parse_section(section)
    problems.raise_all()
    return JobConfig(config, settings, path)


def _with_autotp_size(
    config: dict[str, Any], section: Mapping[str, Any]
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return the JSON and its section with DeepSpeed's tensor-parallel size as ours, because we divide the layers."""
    tensor_parallel: Any = config.get("tensor_parallel")
    size = tensor_parallel.get("autotp_size", 0) if isinstance(tensor_parallel, Mapping) else 0
    key, ours = "tensor_parallel.autotp_size", section.get("tensor_parallel_size", size)
    if type(size) is not int or size < 0:
        raise ConfigError(
            f"{key}: must be a number of ranks (got {size!r}). Use 0, or the size of the groups."
        )
    if size == 0:
        return config, section
    if ours != size:
        raise ConfigError(
            f"{key}: must equal ds_ext.tensor_parallel_size (got {size} and {ours}). Remove one of them."
        )
    section = {**section, "tensor_parallel_size": size}
    ours = {"ds_ext": section} if "ds_ext" in config else {}
    return {**config, "tensor_parallel": {**tensor_parallel, "autotp_size": 0}, **ours}, section


def _without_expert_parallel(config: dict[str, Any], tensor_parallel_size: Any) -> dict[str, Any]:
    """Return the JSON without DeepSpeed's expert parallelism: tensor-parallel ranks divide the experts of decoders.

    Raises:
        ConfigError: other settings of it than the number of these ranks.
    """
    section: Any = config.get("expert_parallel")
    if not isinstance(section, Mapping) or section.get("enabled") in (None, False):
        return config
    if section["enabled"] is not True:
        raise ConfigError(f"expert_parallel.enabled: must be true or false (got {section['enabled']!r}).")
    size, others = section.get("autoep_size", 1), set(section) - {"enabled", "autoep_size"}
    if others:
        raise ConfigError(
            f"expert_parallel.{min(others)}: not supported (got {section[min(others)]!r}). Remove it: the experts "
            f"and the routers are those of the model."
        )
    if size != tensor_parallel_size:
        raise ConfigError(
            f"expert_parallel.autoep_size: must equal ds_ext.tensor_parallel_size, because tensor-parallel ranks "
            f"divide the experts (got {size!r} and {tensor_parallel_size!r}). Set both to a divisor of their number."
        )
    return {key: value for key, value in config.items() if key != "expert_parallel"}


def parse_section(section: Mapping[str, Any]) -> DsExtConfig:
    try:
        valid = DsExtConfig.model_validate(section)
    except ValidationError as error:
        # If a key accepts several types, pydantic reports one error per type, at (key, "list[int]", ...). One is kept.
        by_key = {
            loc[:1] if "[" in str(loc[1:]) else loc: e for e in error.errors()[::-1] for loc in [e["loc"]]
        }
        raise ConfigError("\n".join(map(_explain, [*by_key.values()][::-1]))) from None
    valid.trace.check()
    _check_slices(valid)
    parse_rank_order(valid.rank_order)
    return valid


def _check_slices(settings: DsExtConfig) -> None:
    lengths, count = settings.slice_lengths, settings.sequence_slices
    if not isinstance(lengths, str) and (len(lengths) != count or min(lengths) < 1):
        raise ConfigError(
            f"ds_ext.slice_lengths: must be {count} positive numbers of tokens, as many as sequence_slices (got "
            f"{lengths}). Set sequence_slices to {len(lengths)}, or change them."
        )
    if count == 1:
        return
    if settings.loss_weighting == "micro_batches":
        raise ConfigError(
            f'ds_ext.loss_weighting: slices need "tokens" (got "micro_batches" with sequence_slices {count}).'
        )


def _decode(text: str) -> dict[str, Any] | None:
    """Return the object of a JSON in base64; None for other text."""
    try:
        json_text = base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    if not json_text.lstrip().startswith("{"):  # the name of a file may be valid base64
        return None
    value = parse_json(json_text, "the JSON in base64")
    return value if isinstance(value, dict) else None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. See configs/ for examples of a DeepSpeed JSON.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}).") from None
    config = parse_json(text, str(path))
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: must contain a JSON object (got {type(config).__name__}).")
    return config


def _explain(error: Mapping[str, Any]) -> str:
    """Return one of pydantic's errors as an error for users."""
    *outer, last = map(str, error["loc"])
    key = ".".join(("ds_ext", *outer, last))
    if error["type"] == "extra_forbidden":
        known = _keys(functools.reduce(_section, outer, DsExtConfig))
        near = difflib.get_close_matches(last, known, n=1)
        fix = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known)}."
        return f"{key}: unknown key (got {error['input']!r}). {fix}"
    problem = re.sub(r"^\w+ should ", "must ", error["msg"].removeprefix("Value error, "))
    if error["type"] == "model_type":
        problem = "must be an object"
    elif error["type"] == "string_pattern_mismatch":
        problem = 'must be like "10:20", "100:" or ":50"'
    return f"{key}: {problem} (got {_as_json(error['input'])}).{_default_sentence(outer, last)}"


def _as_json(value: Any) -> str:
    """Return null, true and false as in JSON, and other values as in Python."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def _default_sentence(outer: Sequence[str], key: str) -> str:
    """Return a sentence with the default of a key; empty if there is none to show."""
    try:
        value = getattr(functools.reduce(getattr, outer, DsExtConfig()), key)
    except AttributeError:  # an element of a list
        return ""
    return f" Default: {json.dumps(value)}." if value and isinstance(value, str | int | float | bool) else ""
