"""The ``"ds_ext"`` section of a DeepSpeed JSON: its keys, their types, and every check across fields.

Pure: no torch, no processes. All errors are ConfigError with one sentence that gives the numbers and the way
out.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, ValidationError

from ..errors import ConfigError, ScheduleError
from ..pipe_schedules import Placement, Schedule, Timetable, get_schedule
from ..pipe_schedules.files import is_timetable_file, schedule_of_file
from ..pipe_schedules.registry import DynamicRules
from ..planner.auto import AUTO, choose_for_job, chosen_schedule, launched_world
from ..planner.candidates import Choice
from .deepspeed_json import check_deepspeed_keys, refuse_duplicate_keys
from .sections import FbdOptions, Section, TraceOptions, TransportOptions


class DsExtConfig(Section):
    """Everything of ours in the DeepSpeed JSON."""

    schedule: str = "1f1b"
    pipeline_parallel_size: int = Field(default=1, ge=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
    sequence_parallel: bool = False
    schedule_options: dict[str, Any] = Field(default_factory=dict)
    eager_gradient_sync: bool = True
    max_nonfinite_losses: int = Field(default=10, ge=0)
    transport: Literal["auto", "shm", "rdma", "tcp", "torch"] = "auto"
    transport_options: TransportOptions = TransportOptions()
    fbd: FbdOptions = FbdOptions()
    trace: TraceOptions = TraceOptions()
    train: dict[str, Any] = Field(default_factory=dict)

    # The JSON around the section, by which "auto" chooses; and what it chose, by world size.
    _job: Mapping[str, Any] | None = PrivateAttr(default=None)
    _choices: dict[int | None, Choice] = PrivateAttr(default_factory=dict)

    def resolve_schedule(self, world_size: int | None = None) -> Schedule:
        """The schedule by name, from a timetable file, or chosen for the job. Raises ConfigError.

        Args:
            world_size: for "auto", see :func:`~ds_ext.planner.auto.choose_for_job`.
        """
        choice = self.choice(world_size)
        if choice is not None:
            return chosen_schedule(choice)
        return self._runnable(named_schedule(self.schedule))

    def _runnable(self, schedule: Schedule) -> Schedule:
        """Refuse an order that is decided at run time over what cannot be polled."""
        if schedule.dynamic is not None and self.transport == "torch":
            raise ConfigError(
                f'"schedule": "{schedule.name}" decides its order by what has arrived, and "transport": "torch" cannot '
                f"tell that without waiting: gloo reports a finished receive only to who waits for it. Use "
                f'"transport": "auto" or "shm", or a static schedule.'
            )
        return schedule

    def choice(self, world_size: int | None = None) -> Choice | None:
        """What "auto" chose and from what; None for any other schedule. Raises ConfigError."""
        if self.schedule != AUTO:
            return None
        if self._job is None:
            raise ConfigError(
                '"schedule": "auto" needs the whole DeepSpeed JSON, as load_config reads it, and not its "ds_ext" '
                "section alone."
            )
        world = launched_world(world_size)
        if world not in self._choices:
            self._choices[world] = choose_for_job(
                self._job,
                devices=self.pipeline_parallel_size,
                tensor_parallel=self.tensor_parallel_size,
                options=self.schedule_options,
                train=self.train,
                world_size=world,
            )
        return self._choices[world]

    def options(self, schedule: Schedule) -> dict[str, Any]:
        """The schedule's options: "schedule_options" and what "fbd" adds. Raises ConfigError."""
        options = dict(self.schedule_options)
        for key, value in self.fbd.options(self.tensor_parallel_size).items():
            if key not in schedule.options:
                raise ConfigError(
                    f'"ds_ext": fbd.{key} is for a schedule with forward ranks, such as "fbd"; the schedule is '
                    f'"{schedule.name}". Leave it out, or set "schedule": "fbd".'
                )
            if options.setdefault(key, value) != value:
                raise ConfigError(
                    f'"ds_ext": schedule_options.{key} {options[key]} contradicts "fbd", which makes it {value}. '
                    f"Give one of them."
                )
        self.fbd.require_something_to_merge(self.tensor_parallel_size)
        return options

    def placement(self, world_size: int | None = None) -> Placement:
        """Where the stages live. Raises ConfigError when the schedule cannot use these sizes."""
        schedule = self.resolve_schedule(world_size)
        with _as_config_error():
            found = schedule.placement(self.pipeline_parallel_size, self.options(schedule))
        if self.fbd.forward_hosts is not None and found.forward is None:
            raise ConfigError(
                f'"ds_ext": fbd.forward_hosts is for a schedule with forward ranks, such as "fbd"; the schedule is '
                f'"{schedule.name}". Leave it out, or set "schedule": "fbd".'
            )
        if found.forward is not None and found.forward.merged > 1 and self.sequence_parallel:
            raise ConfigError(
                '"sequence_parallel": true and merged forward ranks exclude each other: the ranks of a tensor-parallel '
                "group take slices of the tokens, and a merged rank has all of them. Leave one of the two out."
            )
        return found

    def timetable(self, micro_batches: int, world_size: int | None = None) -> Timetable:
        """The order of work to train ``micro_batches`` per pipeline group. Raises ConfigError."""
        schedule = self.resolve_schedule(world_size)
        with _as_config_error():
            return schedule.timetable(self.pipeline_parallel_size, micro_batches, self.options(schedule))

    def rules(self, micro_batches: int) -> DynamicRules | None:
        """By what devices decide their order at run time; None for a static schedule. Raises ConfigError."""
        with _as_config_error():
            return self.resolve_schedule().rules(
                self.pipeline_parallel_size, micro_batches, self.schedule_options
            )


def named_schedule(name: str) -> Schedule:
    """The schedule of that name, or of the timetable file at that path. Raises ConfigError."""
    with _as_config_error():
        if is_timetable_file(name):
            return schedule_of_file(name)
        try:
            return get_schedule(name)
        except ScheduleError as error:
            raise ConfigError(f'{error} In a job also "auto", or the path of a timetable file.') from None


@contextlib.contextmanager
def _as_config_error() -> Iterator[None]:
    """A schedule refuses sizes with ScheduleError; here they come from the JSON."""
    try:
        yield
    except ScheduleError as error:
        raise ConfigError(str(error)) from None


@dataclass(frozen=True)
class JobConfig:
    """A whole DeepSpeed JSON: the dict for DeepSpeed, and our validated section of it.

    ``flags`` says which keys a flag filled in, for errors: "train_batch_size" -> "--global-batch-size 48".
    """

    deepspeed: dict[str, Any]
    ds_ext: DsExtConfig
    path: str | None = None
    flags: Mapping[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """What is valid, and perhaps not what was meant."""
        notes = []
        if self.ds_ext.sequence_parallel and self.ds_ext.tensor_parallel_size == 1:
            notes.append(
                "sequence_parallel has no effect with tensor_parallel_size 1: a rank has all tokens of its samples"
            )
        return notes


def require_section(job: JobConfig) -> None:
    """Raise ConfigError for a JSON without our section: it would train without a pipeline."""
    if "ds_ext" not in job.deepspeed:
        raise ConfigError(
            f'"ds_ext": missing in {f"the JSON {job.path}" if job.path else "the configuration"}. Add '
            '"ds_ext": {"schedule": "bitpipe", "pipeline_parallel_size": 4}, or "ds_ext": {} for no pipeline.'
        )


def load_config(source: str | Path | Mapping[str, Any]) -> JobConfig:
    """Read and validate a DeepSpeed JSON (path or dict). Raises ConfigError."""
    path = None if isinstance(source, Mapping) else str(source)
    config = dict(source) if isinstance(source, Mapping) else _read(Path(source))
    section = config.get("ds_ext", {})
    if not isinstance(section, Mapping):
        raise ConfigError(f'"ds_ext" must be an object such as {{"schedule": "bitpipe"}}; got {section!r}.')
    check_deepspeed_keys(config, set(DsExtConfig.model_fields) - {"train"})
    settings = parse_section(section)
    if settings.schedule == AUTO:
        settings._job = config
    return JobConfig(config, settings, path)


def parse_section(section: Mapping[str, Any]) -> DsExtConfig:
    """Validate the ``"ds_ext"`` section. Raises ConfigError that names the key, and the nearest for a typo."""
    try:
        valid = DsExtConfig.model_validate(section)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None
    valid.trace.check()
    return valid


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        config = json.loads(text)
    except FileNotFoundError:
        raise ConfigError(
            f"the DeepSpeed JSON {str(path)!r} does not exist. The examples are in configs/."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the DeepSpeed JSON {str(path)!r} cannot be read: {error}.") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: line {error.lineno}, column {error.colno}: {error.msg}.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object; got {type(config).__name__}.")
    refuse_duplicate_keys(text, str(path))
    return config


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    *outer, last = map(str, first["loc"])
    key = ".".join((*outer, last))
    if first["type"] == "extra_forbidden":
        section = functools.reduce(getattr, outer, DsExtConfig())
        known = [*type(section).model_fields]
        near = difflib.get_close_matches(last, known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        where = ".".join(("ds_ext", *outer))
        return f'"{where}" has no key {last!r}{hint}; its keys: {", ".join(known)}.'
    if first["type"] == "model_type":
        return f'"ds_ext": {key} must be an object; got {first["input"]!r}.'
    said = first["msg"].removeprefix("Value error, ")
    if first["type"] == "string_pattern_mismatch":
        said = 'Input should be as "10:20", "100:" or ":50"'
    must = (
        f"{key} must{said.removeprefix('Input should')}"
        if said.startswith("Input should")
        else f"{key}: {said}"
    )
    return f'"ds_ext": {must}; got {first["input"]!r}.'
