"""The flags of ``python -m ds_ext`` that say which timetable is meant and what its computations cost."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ScheduleError
from ..pipe_schedules import SCHEDULES, Placement, Timetable, get_schedule
from ..pipe_schedules.check.program import check_timetable
from ..pipe_schedules.costs import Costs, read_costs
from ..pipe_schedules.files import read_timetable
from ..pipe_schedules.inference import forward_timetable
from ..pipe_schedules.schedule import COSTS
from ..pipe_schedules.simulate import Simulation, simulate
from ..planner.stage_costs import cut, stage_costs
from .model_flags import model_of
from .schedule_requests import is_file, read_options, split_request

_DEFAULT_COSTS = "f=1,b=1,w=1,comm=0"


def add_schedule_flags(verb: argparse.ArgumentParser, *, several: bool, forward_only: bool) -> None:
    """What all verbs about schedules take; ``forward_only``: also an evaluation."""
    own = "with options of its own, dpp:placement=v:backward=split"
    if several:
        text = f"schedules, see below, also {own}, or timetable files"
        verb.add_argument("schedules", nargs="+", metavar="NAME", help=text)
    else:
        text = f"a schedule, see below, also {own}, or a timetable file"
        verb.add_argument("schedule", metavar="NAME", help=text)
    verb.add_argument("--stages", type=int, metavar="D", help="devices of one pipeline group")
    verb.add_argument(
        "--micro-batches", type=int, metavar="N", help="micro-batches per pipeline group and step"
    )
    verb.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="K=V",
        help="an option of the schedule, e.g. chunks=3",
    )
    verb.add_argument(
        "--costs",
        metavar=_DEFAULT_COSTS,
        help="times of forward, input gradient, weight gradient of one D-th of the model, and of a message; or a "
        "JSON file with these and more (stages, links, jitter, seed)",
    )
    if forward_only:
        verb.add_argument(
            "--forward-only",
            action="store_true",
            help="an evaluation on the schedule's placement; any number of micro-batches",
        )
    add_import_flag(verb)


def add_import_flag(verb: argparse.ArgumentParser) -> None:
    """``--import``, for schedules that are not part of the package."""
    verb.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="a Python module with a schedule of your own, from this folder or PYTHONPATH; repeatable",
    )


def simulation_of(args: argparse.Namespace) -> Simulation:
    """The priced timetable that the flags ask for. Raises ScheduleError."""
    return _priced(*_request(args), args)


def timetable_of(args: argparse.Namespace) -> Timetable:
    """The timetable that the flags ask for. Raises ScheduleError."""
    return _timetable(*_request(args), args)[0]


def _request(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The schedule of a verb about one, and its options."""
    name, own = split_request(args.schedule)
    return name, _joined(args.schedule, own, _options(args))


def _joined(text: str, own: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a request and those of ``--option``. Raises ScheduleError for one that both give."""
    for key in own:
        if key in others:
            raise ScheduleError(
                f"{key} is given twice, by {text} and by --option {key}={others[key]}; give it once."
            )
    return {**others, **own}


@dataclass(frozen=True)
class Comparison:
    """Schedules side by side: those that are possible, why the others are not, and what to know about the table.

    ``refused`` maps the place of a schedule among those asked for to its name and the reason.
    """

    simulations: tuple[Simulation, ...]
    refused: Mapping[int, tuple[str, str]]
    notes: tuple[str, ...]


def comparison_of(args: argparse.Namespace) -> Comparison:
    """Every schedule of a comparison, priced, or the reason why it is not possible.

    One with options of its own goes by the whole request. Raises ScheduleError when none is possible, for a schedule
    that is not known and for an option that none has.
    """
    options, requests = _options(args), {text: split_request(text) for text in args.schedules}
    known = {t: {} if is_file(name) else get_schedule(name).options for t, (name, _) in requests.items()}
    notes = _partial(options, known)
    simulations: list[Simulation] = []
    refused: dict[int, tuple[str, str]] = {}
    first: ScheduleError | None = None
    for place, text in enumerate(args.schedules):
        name, own = requests[text]
        if COSTS in own:
            raise ScheduleError(
                f"{text}: a comparison has one price list; give --costs {own[COSTS]} for all."
            )
        mine = _joined(text, own, {k: v for k, v in options.items() if k in known[text]})
        try:
            priced = _priced(name, mine, args)
        except ScheduleError as error:
            first = first or error
            refused[place] = (text, str(error).splitlines()[0].removeprefix(f"{name}: "))
        else:
            named = replace(priced.timetable, schedule=text) if own or is_file(name) else priced.timetable
            simulations.append(replace(priced, timetable=named))
    if first is not None and not simulations:
        raise first
    if len({s.timetable.micro_batches for s in simulations}) > 1:
        sizes = simulations[0].timetable.micro_batches
        notes.append(f"vs first: only for {sizes} micro-batches, as the first has.")
    return Comparison(tuple(simulations), refused, tuple(notes))


def _priced(name: str, options: Mapping[str, object], args: argparse.Namespace) -> Simulation:
    made, costs = _timetable(name, options, args)
    # A file may hold anything: its computations are looked at before they are priced.
    with naming(name):
        check_timetable(made)
        return simulate(made, costs)


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Errors about a timetable file say its name: the schedule's, in its first line, may be another one's."""
    try:
        yield
    except ScheduleError as error:
        raise error if not is_file(name) else ScheduleError(f"{name}: {error}") from None


def _partial(options: Mapping[str, object], known: Mapping[str, Mapping[str, object]]) -> list[str]:
    """What each option that not all schedules have is for. Raises ScheduleError for one that none has."""
    notes = []
    for key, value in options.items():
        having = [name for name, its in known.items() if key in its]
        if not having:
            each = "; ".join(f"{name} has {', '.join(sorted(its)) or 'none'}" for name, its in known.items())
            raise ScheduleError(f"--option {key}: none of the schedules has it; {each}.")
        if len(having) < len(known):
            whose = ", ".join(having)
            told = f"planned for by {whose}; all are priced with them" if key == COSTS else f"{whose} only"
            notes.append(f"--option {key}={value}: {told}.")
    return notes


def _timetable(name: str, options: Mapping[str, object], args: argparse.Namespace) -> tuple[Timetable, Costs]:
    """A registered schedule for the given sizes, or a timetable file, which has its own; and the costs.

    With a model these are the costs of its stages.
    """
    costs, model = _costs_of(args, options), model_of(args) if "model" in args else None

    def of(placement: Placement) -> Costs:
        fitting = costs if model is None else stage_costs(costs, cut(model, placement, name))
        fitting.check_fits(placement)
        return fitting

    if is_file(name):
        made = _from_file(name, args)
        return made, of(made.placement)
    schedule = get_schedule(name)
    if args.stages is None or args.micro_batches is None:
        raise ScheduleError(
            f"{schedule.name} needs --stages D and --micro-batches N, for example --stages 4 --micro-batches 8."
        )
    # First what the schedule itself refuses.
    placement = schedule.placement(args.stages, options)
    if getattr(args, "forward_only", False):
        made = forward_timetable(placement, args.micro_batches, schedule.name)
        return made, of(placement)
    fitting = of(placement)
    return schedule.timetable(args.stages, args.micro_batches, options, fitting), fitting


def _from_file(name: str, args: argparse.Namespace) -> Timetable:
    """A timetable from a file, which other sizes and options cannot be asked of, but for an evaluation any N."""
    if args.option and "schedule" in args:
        raise ScheduleError(f"--option {args.option[0]}: a timetable file has no options; leave it out.")
    made = read_timetable(name)
    has = (made.placement.num_devices, made.micro_batches)
    asked = (args.stages, args.micro_batches)
    forward_only = getattr(args, "forward_only", False)
    if asked[0] not in (None, has[0]) or (asked[1] not in (None, has[1]) and not forward_only):
        raise ScheduleError(
            f"the timetable file {name} is for --stages {has[0]} --micro-batches {has[1]}; leave both out."
        )
    if not forward_only:
        return made
    micro_batches = made.micro_batches if args.micro_batches is None else args.micro_batches
    return forward_timetable(made.placement, micro_batches, made.schedule)


def _costs_of(args: argparse.Namespace, options: Mapping[str, object]) -> Costs:
    """``--costs``, or the option "costs" of planned schedules, which here means the same. Raises ScheduleError."""
    option = {**_options(args), **options}.get(COSTS)
    if option is not None and args.costs is not None:
        raise ScheduleError(
            f"costs are given twice, --costs {args.costs} and --option costs={option}, and both say what is planned "
            "for and priced with; give one of them."
        )
    given = args.costs if option is None else str(option)
    return read_costs(_DEFAULT_COSTS if given is None else given)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """``--option`` as a dict. Raises ScheduleError."""
    return read_options(
        args.option,
        lambda text: f"--option {text!r}",
        "chunks=3",
        lambda key: f"--option {key} is given twice",
    )


def list_schedules() -> str:
    """All registered schedules with their options, a line each."""
    width = max(map(len, SCHEDULES))
    lines = []
    for name, schedule in sorted(SCHEDULES.items()):
        known = sorted(schedule.options.items())
        options = [f"--option {key}={o.default_text} ({o.described})" for key, o in known]
        lines += [f"  {name:<{width}}  {schedule.summary}", *(f"  {'':<{width}}  {o}" for o in options)]
    return "\n".join(lines)
