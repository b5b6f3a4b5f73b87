"""Registry of schedules.

A method is one file with one decorated generator::

    @schedule("1f1b", place=linear)
    def one_f_one_b(device, num_devices, micro_batches):
        ...
        yield Op(FORWARD, micro_batch, stage)

:func:`timetable` runs it for every device and returns a :class:`.Timetable`. If the order depends on costs, decorate
one function for all devices with :func:`planned_schedule`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType

from ..errors import ScheduleError
from .definition import (
    COSTS,
    COSTS_OPTION,
    REGISTERED,
    Dynamic,
    Generator,
    Option,
    Planner,
    Schedule,
    Variants,
    defaults_only,
    did_you_mean,
)
from .placement import Placement
from .timetables import Timetable

SCHEDULES: Mapping[str, Schedule] = MappingProxyType(REGISTERED)


def schedule(
    name: str,
    *,
    place: Callable[..., Placement],
    even_devices: bool = False,
    micro_batches_multiple_of_devices: bool = False,
    options: Mapping[str, Option] | None = None,
    variants: Variants = defaults_only,
) -> Callable[[Generator], Generator]:
    """Register a generator ``generate(device, num_devices, micro_batches, **options) -> Iterator[Op]``.

    Args:
        name: name in the JSON and on the command line; lower case.
        place: function that maps the number of devices, and any options among its parameters, to the placement.
        even_devices: True if the number of devices must be even.
        micro_batches_multiple_of_devices: True if N must be a multiple of D.
        options: keys of "schedule_options".
        variants: function that maps (D, N) to the options that a planner should try.
    """

    def register(generate: Generator) -> Generator:
        known = MappingProxyType(dict(options or {}))
        multiple = micro_batches_multiple_of_devices
        _register(Schedule(name, generate, place, even_devices, multiple, known, variants=variants))
        return generate

    return register


def planned_schedule(
    name: str,
    *,
    place: Callable[..., Placement],
    even_devices: bool = False,
    options: Mapping[str, Option] | None = None,
    variants: Variants = defaults_only,
    dynamic: Dynamic | None = None,
) -> Callable[[Planner], Planner]:
    """Register a function ``plan(placement, micro_batches, costs, **options)`` that returns the order of every device.

    The schedule gets one more option, "costs", for callers that pass no costs. The other arguments are those of
    :func:`schedule`.

    Args:
        dynamic: function that maps (placement, micro_batches, options) to the rules of a dynamic schedule.
    """

    def register(plan: Planner) -> Planner:
        known = MappingProxyType({**(options or {}), COSTS: COSTS_OPTION})
        _register(
            Schedule(
                name,
                plan,
                place,
                even_devices,
                options=known,
                planned=True,
                variants=variants,
                dynamic=dynamic,
            )
        )
        return plan

    return register


def _register(new: Schedule) -> None:
    """Add a schedule. A module may register its schedules again, but not those of another module."""
    known = REGISTERED.get(new.name)
    if known is not None and known.generate.__module__ != new.generate.__module__:
        raise ScheduleError(f"schedule {new.name!r} is already registered by {known.generate.__module__}.")
    REGISTERED[new.name] = new


def get_schedule(name: str) -> Schedule:
    schedule = REGISTERED.get(name.lower())
    if schedule is None:
        choice = ' "auto" is possible in the JSON of a job only.' if name.lower() == "auto" else ""
        raise ScheduleError(
            f"schedule: unknown name {name!r}{did_you_mean(name, REGISTERED)}.{choice} "
            f"Schedules: {', '.join(sorted(REGISTERED))}."
        )
    return schedule


def import_modules(names: Sequence[str], source: str, folder: str | os.PathLike[str] = ".") -> None:
    """Import modules that register schedules. Adds the folders of the search to ``sys.path``.

    Modules are looked up in ``folder``, the current directory and PYTHONPATH. ``source`` is the flag or key that lists
    them, for errors.
    """
    if names:
        for path in (os.path.abspath(folder), os.getcwd()):
            if path not in sys.path:
                sys.path.append(path)
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")) or name.endswith(".py"):
            raise ScheduleError(
                f"{source}: not a module name (got {name!r}). Use my_schedules for the file my_schedules.py."
            )
        try:
            import_module(name)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
                raise ScheduleError(
                    f"{source}: no module {error.name!r} in the current directory or PYTHONPATH (got {name!r}). "
                    f"Start the job in the module's directory, or add that directory to PYTHONPATH on every host."
                ) from None
            raise ScheduleError(
                f"{source}: the import of module {name!r} failed with {type(error).__name__}: {error} "
                f"({_error_line(error)}). Run `python -c 'import {name}'` for the traceback."
            ) from error


def _error_line(error: Exception) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.basename(error.filename)}, line {error.lineno}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{os.path.basename(frame.filename)}, line {frame.lineno}"


def timetable(name: str, num_devices: int, micro_batches: int, **options: object) -> Timetable:
    """Return ``get_schedule(name).timetable(num_devices, micro_batches, options)``."""
    return get_schedule(name).timetable(num_devices, micro_batches, options)
