"""Flags of ``python -m ds_ext`` for schedules, their sizes, options and costs."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..errors import ScheduleError
from ..parallel.slices import EQUAL
from ..pipe_schedules import SCHEDULES, Placement, Timetable, get_schedule
from ..pipe_schedules.checks.timetable import check_timetable
from ..pipe_schedules.costs import TYPICAL_HEAD, Costs, read_costs
from ..pipe_schedules.definition import COSTS
from ..pipe_schedules.files import is_timetable_file, read_timetable
from ..pipe_schedules.inference import forward_timetable
from ..pipe_schedules.simulation import Simulation, simulate
from ..pipe_schedules.stage_kinds import HEAD_PART
from ..planner.stage_costs import slice_costs, slice_tokens, split_layers, stage_costs
from ..planner.training_sizes import TrainingSizes
from .model_flags import model_of

_DEFAULT_COSTS = "f=1,b=1,w=1,comm=0"
_MOST_END_LAYERS = 4  # pipeline layers of a model besides its transformer layers
_WITH_OPTIONS = re.compile(r"[\w-]+:\w+=")
# In errors: keys of the JSON whose flags have other names; and words that may be flags, which are the first one and
# those with an underscore, except options behind the name of their schedule.
_DESTS = {
    "pipeline_parallel_size": "num_devices",
    "micro_batches": "micro_batches",
    "sequence_slices": "sequence_slices",
    "vocabulary_parallel_head": "vocabulary_parallel_head",
    "schedule_options": "option",
}
_WORDS = re.compile(rf"^\w+|\b(?:{'|'.join(_DESTS)})\b|(?<!: )\b[a-z]+_[a-z_]+\b")
_NO_FLAGS = ("modules", "run", "schedule", "schedules", "verb")

# --- flags -----------------------------------------------------------------------------------------------------------


def add_schedule_flags(verb: argparse.ArgumentParser, *, several: bool, forward_only: bool) -> None:
    text = "listed below, with options as in dpp:placement=v:backward=split, or a timetable file"
    if several:
        verb.add_argument("schedules", nargs="*", metavar="NAME", help=f"schedules, {text}; all if missing")
    else:
        verb.add_argument("schedule", metavar="NAME", help=f"schedule, {text}")
    verb.add_argument("--num-devices", "--stages", type=int, metavar="D", help="devices of a pipeline group")
    micro_batches = "micro-batches per pipeline group and step"
    verb.add_argument("--micro-batches", type=int, metavar="N", help=micro_batches)
    slices = "slices of the sequence of every micro-batch (1)"
    verb.add_argument("--sequence-slices", type=int, metavar="K", help=slices)
    add_head_flag(verb)
    option = "option of the schedule, e.g. chunks=3"
    verb.add_argument("--option", action="append", default=[], metavar="K=V", help=option)
    verb.add_argument(
        "--costs",
        metavar=_DEFAULT_COSTS,
        help="times of forward, backward_input and backward_weight of 1/D of the model, and of a message; or a JSON "
        "file with these and stages, links, jitter, seed, or from `trace costs`",
    )
    if forward_only:
        text = "timetable of an evaluation; any number of micro-batches"
        verb.add_argument("--forward-only", action="store_true", help=text)
    add_import_flag(verb)


def add_head_flag(verb: argparse.ArgumentParser) -> None:
    head = "every device computes a part of the model's head; without --model, its time is head in --costs "
    head += f"({TYPICAL_HEAD:g})"
    verb.add_argument("--vocabulary-parallel-head", action="store_true", help=head)


def add_import_flag(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="Python module with a custom schedule, from the current directory or PYTHONPATH; repeatable",
    )


def list_schedules() -> str:
    width = max(map(len, SCHEDULES))
    lines = []
    for name, schedule in sorted(SCHEDULES.items()):
        known = sorted(schedule.options.items())
        options = [f"--option {key}={o.default_text} ({o.description})" for key, o in known]
        lines += [f"  {name:<{width}}  {schedule.summary}", *(f"  {'':<{width}}  {o}" for o in options)]
    return "\n".join(lines)


def name_flags(error: str, args: argparse.Namespace) -> str:
    """Return an error with the flags of a verb in place of keys and arguments of functions."""

    def flag(match: re.Match[str]) -> str:
        dest = _DESTS.get(match[0], match[0])
        is_flag = dest in vars(args) and dest not in _NO_FLAGS
        return "--" + dest.replace("_", "-") if is_flag else match[0]

    return _WORDS.sub(flag, error) if "costs" in args else error


# --- requests: NAME[:KEY=VALUE...], or the path of a timetable file ---------------------------------------------------


def split_request(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name or path, and the options of ``"dpp:placement=v:policy=depth"``; a path has no options."""
    if is_file(text):
        return text, {}
    name, *options = text.split(":")
    return name, _read_options(options, text)


def is_file(text: str) -> bool:
    """Return whether a request is a timetable file, not a name whose option looks like a path."""
    return os.path.isfile(text) or (is_timetable_file(text) and _WITH_OPTIONS.match(text) is None)


def _read_options(words: Iterable[str], source: str) -> dict[str, Any]:
    """Return options such as ``chunks=3``; ``source`` is the flag or request in errors."""
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise ScheduleError(
                f"{source}: not of the form KEY=VALUE (got {word!r}). Write for example chunks=3."
            )
        if key in options:
            raise ScheduleError(
                f"{source}: {key} is given twice (got {options[key]} and {value}). Give it once."
            )
        options[key] = _number_or_text(value)
    return options


def _number_or_text(value: str) -> int | float | str:
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(value)
    return value


def _flag_options(args: argparse.Namespace) -> dict[str, Any]:
    return _read_options(args.option, "--option")


def _join_options(
    text: str, request_options: Mapping[str, Any], flag_options: Mapping[str, Any]
) -> dict[str, Any]:
    for key in request_options:
        if key in flag_options:
            raise ScheduleError(
                f"{text}: {key} is given twice (got --option {key}={flag_options[key]}). Give it once."
            )
    return {**flag_options, **request_options}


# --- timetables ------------------------------------------------------------------------------------------------------


def timetable_of(args: argparse.Namespace) -> Timetable:
    name, options = split_request(args.schedule)
    timetable, _ = _timetable(name, _join_options(args.schedule, options, _flag_options(args)), args)
    return timetable


def simulation_of(args: argparse.Namespace) -> Simulation:
    name, options = split_request(args.schedule)
    return _simulate(name, _join_options(args.schedule, options, _flag_options(args)), args)


def _simulate(name: str, options: Mapping[str, object], args: argparse.Namespace) -> Simulation:
    timetable, costs = _timetable(name, options, args)
    # A file may contain any ops, so they are checked first.
    with naming_file(name):
        check_timetable(timetable)
        return simulate(timetable, costs)


@contextlib.contextmanager
def naming_file(name: str) -> Iterator[None]:
    """Prepend the path to errors about a timetable file, whose schedule may have a different name."""
    try:
        yield
    except ScheduleError as error:
        raise error if not is_file(name) else ScheduleError(f"{name}: {error}") from None


def _timetable(name: str, options: Mapping[str, object], args: argparse.Namespace) -> tuple[Timetable, Costs]:
    """Return the timetable of a schedule or file, and its costs; with a model, these are the costs of its stages."""
    base_costs = _costs_of(args, options)
    model = model_of(args) if "model" in args else None

    def costs_on(placement: Placement, slices: int) -> Costs:
        costs = base_costs
        if model is not None:
            _check_measured(base_costs, model)
            parts = len(placement.stages_of_kind(HEAD_PART))
            costs = stage_costs(base_costs, split_layers(model, placement, name), parts)
            costs = slice_costs(costs, model, slice_tokens(model, slices, EQUAL, shards=1))
        return costs.fit(placement)

    if is_file(name):
        timetable = _from_file(name, args)
        return timetable, costs_on(timetable.placement, timetable.slices)
    schedule = get_schedule(name).dividing_head(args.vocabulary_parallel_head)
    if args.num_devices is None or args.micro_batches is None:
        raise ScheduleError(f"{name}: sizes are missing. Add --num-devices D and --micro-batches N.")
    # Errors of the schedule come before errors of the costs.
    placement = schedule.placement(args.num_devices, options)
    slices = 1 if args.sequence_slices is None else args.sequence_slices
    schedule.check_slices(slices)
    if getattr(args, "forward_only", False):
        timetable = forward_timetable(placement, args.micro_batches, schedule.name, slices)
        return timetable, costs_on(placement, slices)
    costs = costs_on(placement, slices)
    return schedule.timetable(args.num_devices, args.micro_batches, options, costs, slices), costs


def head_notes(simulations: Iterable[Simulation]) -> list[str]:
    """Return a note if heads in parts have the time that is assumed without a factor in ``--costs``."""
    devices = {s.timetable.placement.devices_per_pipe for s in simulations if s.costs.head == TYPICAL_HEAD}
    return [
        f"head: takes {TYPICAL_HEAD:g} times as long as 1/{count} of the layers. Another factor: --costs head={count}."
        for count in sorted(devices)
    ]


def _check_measured(costs: Costs, model: TrainingSizes) -> None:
    """Raise ScheduleError for costs that were measured with another micro-batch size or number of layers."""
    costs.check_measured({"micro_batch_size": model.micro_batch})
    layers = sum(costs.measured.get("stage_layers") or ())
    if layers and not 0 <= layers - model.num_layers <= _MOST_END_LAYERS:
        raise ScheduleError(
            f"costs: must be measured with {model.num_layers} transformer layers (got {layers} pipeline layers). "
            "Trace a run with these sizes."
        )


def _from_file(name: str, args: argparse.Namespace) -> Timetable:
    """Return the timetable of a file, whose sizes are fixed except for the N of an evaluation."""
    if args.option and "schedule" in args:
        raise ScheduleError(f"--option: a timetable file has no options (got {args.option[0]}). Remove it.")
    timetable = read_timetable(name)
    micro_batches = timetable.micro_batches
    forward_only = getattr(args, "forward_only", False)
    sizes = {
        "--num-devices": (timetable.placement.num_devices, args.num_devices),
        "--micro-batches": (micro_batches, None if forward_only else args.micro_batches),
        "--sequence-slices": (timetable.slices, args.sequence_slices),
        "--vocabulary-parallel-head": (
            HEAD_PART in timetable.placement.stage_kinds,
            args.vocabulary_parallel_head or None,
        ),
    }
    wrong = {flag: pair for flag, pair in sizes.items() if pair[1] not in (None, pair[0])}
    if wrong:
        fixed = " ".join(f"{flag} {size}" for flag, (size, _) in wrong.items())
        requested = " and ".join(str(request) for _, request in wrong.values())
        raise ScheduleError(f"{name}: has fixed sizes, {fixed} (got {requested}). Remove these flags.")
    if not forward_only:
        return timetable
    n = micro_batches if args.micro_batches is None else args.micro_batches
    return forward_timetable(timetable.placement, n, timetable.schedule, timetable.slices)


def _costs_of(args: argparse.Namespace, options: Mapping[str, object]) -> Costs:
    """Return the costs of ``--costs`` or of the option "costs", by default ``_DEFAULT_COSTS``.

    With ``--hosts``, measured costs keep only f, b and w: the rate and the model give the times.
    """
    option = {**_flag_options(args), **options}.get(COSTS)
    if option is not None and args.costs is not None:
        raise ScheduleError(
            f"--costs: given twice (got --costs {args.costs} and the option costs={option}). Give one of them."
        )
    text = args.costs if option is None else str(option)
    costs = read_costs(_DEFAULT_COSTS if text is None else text)
    if getattr(args, "hosts", None) is not None:  # some verbs have no hosts
        return costs.ratios()
    return costs


# --- comparisons -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Simulated schedules, refused schedules and notes on the table.

    ``refused`` maps the index of a refused schedule in the request to its name and the reason.
    """

    simulations: tuple[Simulation, ...]
    refused: Mapping[int, tuple[str, str]]
    notes: tuple[str, ...]


def comparison_of(
    args: argparse.Namespace, run_sizes: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> Comparison:
    """Simulate every schedule of a comparison. A schedule that has its own options is listed together with them.

    ``run_sizes`` maps the path of a run's timetable file to the MEASURED_SIZES that its costs must have. Other runs
    are refused.
    """
    options = _flag_options(args)
    requests = {text: split_request(text) for text in args.schedules}
    known_options = {
        text: {}
        if is_file(name)
        else get_schedule(name).dividing_head(args.vocabulary_parallel_head).known_options
        for text, (name, _) in requests.items()
    }
    notes = _option_notes(options, known_options)
    simulations: list[Simulation] = []
    refused: dict[int, tuple[str, str]] = {}
    first_error: ScheduleError | None = None
    for index, text in enumerate(args.schedules):
        name, request_options = requests[text]
        if COSTS in request_options:
            raise ScheduleError(
                f"{text}: a comparison has one set of costs. Use --costs {request_options[COSTS]} for all."
            )
        flag_options = {key: value for key, value in options.items() if key in known_options[text]}
        all_options = _join_options(text, request_options, flag_options)
        try:
            simulation = _simulate(name, all_options, args)
            simulation.costs.check_measured(run_sizes.get(text, {}))
        except ScheduleError as error:
            first_error = first_error or error
            reason = name_flags(str(error).splitlines()[0], args)
            refused[index] = (text, reason.removeprefix(f"{name}: "))
            continue
        if request_options or is_file(name):
            simulation = replace(simulation, timetable=replace(simulation.timetable, schedule=text))
        simulations.append(simulation)
    if first_error is not None and not simulations:
        raise first_error
    if len({s.timetable.micro_batches for s in simulations}) > 1:
        notes.append(
            f"vs first: only for {simulations[0].timetable.micro_batches} micro-batches, as in the first row."
        )
    return Comparison(tuple(simulations), refused, tuple(notes))


def _option_notes(options: Mapping[str, object], known: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Return a note for each option that only some schedules have."""
    notes = []
    for key, value in options.items():
        owners = [name for name, schedule_options in known.items() if key in schedule_options]
        if not owners:
            lists = "; ".join(
                f"{name}: {', '.join(sorted(names)) or 'none'}" for name, names in known.items()
            )
            raise ScheduleError(f"--option: unknown to all schedules (got {key}). Known options: {lists}.")
        if len(owners) < len(known):
            use = "to plan, and by all to simulate" if key == COSTS else "only"
            notes.append(f"--option {key}={value}: used by {', '.join(owners)} {use}.")
    return notes
