"""The registry of schedules. A schedule states its own properties, so that nobody compares names elsewhere.

A method is one file with one decorated generator::

    @schedule("1f1b", place=linear)
    def one_f_one_b(device, num_devices, micro_batches):
        ...
        yield Op(FORWARD, micro_batch, stage)

:func:`timetable` runs it for every device and gives a :class:`.Timetable`. A method whose
order depends on what computations and messages cost is a function of all devices, :func:`planned_schedule`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType

from ..errors import ScheduleError
from .placement import Placement
from .schedule import (
    COSTS,
    Dynamic,
    DynamicRules,
    Generator,
    Option,
    Orders,
    Planner,
    Schedule,
    Variants,
    check_multiple,
    check_size,
    defaults,
    did_you_mean,
    every_rank,
)
from .timetables import Timetable

__all__ = [
    "SCHEDULES",
    "DynamicRules",
    "Option",
    "Orders",
    "Schedule",
    "check_multiple",
    "check_size",
    "every_rank",
    "get_schedule",
    "import_modules",
    "planned_schedule",
    "schedule",
    "timetable",
]

_SCHEDULES: dict[str, Schedule] = {}
SCHEDULES: Mapping[str, Schedule] = MappingProxyType(_SCHEDULES)
_COSTS_OPTION = Option("f=1,b=1,w=1,comm=0", None, "what to plan for, as --costs")


def schedule(
    name: str,
    *,
    place: Callable[..., Placement],
    even_devices: bool = False,
    micro_batches_multiple_of_devices: bool = False,
    options: Mapping[str, Option] | None = None,
    variants: Variants = defaults,
) -> Callable[[Generator], Generator]:
    """Register a generator ``program(device, num_devices, micro_batches, **options) -> Iterator[Op]``.

    Args:
        name: what the JSON and the command line call it; lower case.
        place: makes the placement from the number of devices and those of the options that it has as parameters.
        even_devices: the method needs an even number of devices.
        micro_batches_multiple_of_devices: the method needs N to be a multiple of D.
        options: the keys of "schedule_options" that it takes.
        variants: (D, N) -> the options that are worth trying when a schedule is to be chosen.
    """

    def register(program: Generator) -> Generator:
        known = MappingProxyType(dict(options or {}))
        multiple = micro_batches_multiple_of_devices
        _register(Schedule(name, program, place, even_devices, multiple, known, variants=variants))
        return program

    return register


def planned_schedule(
    name: str,
    *,
    place: Callable[..., Placement],
    even_devices: bool = False,
    options: Mapping[str, Option] | None = None,
    variants: Variants = defaults,
    dynamic: Dynamic | None = None,
) -> Callable[[Planner], Planner]:
    """Register ``program(placement, micro_batches, costs, **options) -> the order of every device``.

    ``place`` makes the placement from the number of devices and those of the options that it has as parameters. The
    schedule gets one more option, "costs", for where nothing else gives them, as in the JSON of a job.
    ``dynamic(placement, micro_batches, options)`` makes the rules of an order that is decided at run time.
    """

    def register(program: Planner) -> Planner:
        known = MappingProxyType({**(options or {}), COSTS: _COSTS_OPTION})
        _register(
            Schedule(
                name,
                program,
                place,
                even_devices,
                options=known,
                planned=True,
                variants=variants,
                dynamic=dynamic,
            )
        )
        return program

    return register


def _register(made: Schedule) -> None:
    known = _SCHEDULES.get(made.name)
    if known is not None and known.program.__module__ != made.program.__module__:
        raise ScheduleError(f"schedule {made.name!r} is already registered by {known.program.__module__}.")
    _SCHEDULES[made.name] = made


def get_schedule(name: str) -> Schedule:
    """The schedule called ``name`` (any case). Raises ScheduleError with the nearest and all names."""
    found = _SCHEDULES.get(name.lower())
    if found is None:
        raise ScheduleError(
            f"schedule {name!r} is not known{did_you_mean(name, _SCHEDULES)}; "
            f"known: {', '.join(sorted(_SCHEDULES))}."
        )
    return found


def import_modules(names: Sequence[str], given_by: str, folder: str | os.PathLike[str] = ".") -> None:
    """Import modules that register schedules of their own.

    Args:
        names: as in an import statement; found in ``folder``, the current folder and PYTHONPATH.
        given_by: the flag or key that lists them, for errors.
        folder: one more folder to look in.

    Raises:
        ScheduleError: a module does not exist or fails.
    """
    for path in (os.path.abspath(folder), os.getcwd()) if names else ():
        if path not in sys.path:
            sys.path.append(path)
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")) or name.endswith(".py"):
            raise ScheduleError(
                f"{given_by}: {name!r} is not the name of a module. Use my_schedules for the file my_schedules.py."
            )
        try:
            import_module(name)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
                raise ScheduleError(
                    f"{given_by}: no module {error.name!r} in the current folder or PYTHONPATH (got {name!r}). "
                    f"Start the job in its folder, or add that to PYTHONPATH on every host."
                ) from None
            raise ScheduleError(
                f"{given_by}: module {name!r} cannot be imported: {type(error).__name__}: {error} "
                f"({_line_of(error)}). Correct the module; `python -c 'import {name}'` shows the whole error."
            ) from error


def _line_of(error: Exception) -> str:
    """Return the file and line at which importing failed."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    file, line = last.filename, last.lineno
    if isinstance(error, SyntaxError) and error.filename:
        file, line = error.filename, error.lineno
    return f"{os.path.basename(file)}, line {line}"


def timetable(name: str, num_devices: int, micro_batches: int, **options: object) -> Timetable:
    """``timetable("bitpipe", 4, 8)``: shorthand for ``get_schedule(name).timetable(...)``."""
    return get_schedule(name).timetable(num_devices, micro_batches, options)
