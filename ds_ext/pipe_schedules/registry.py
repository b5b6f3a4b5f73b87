"""The registry of schedules. A schedule states its own properties, so that nobody compares names elsewhere.

A method is one file with one decorated generator::

    @schedule("1f1b", place=linear)
    def one_f_one_b(rank, ranks, micro_batches):
        ...
        yield Op("F", stage, micro_batch)

:func:`timetable` runs it for every rank and gives a :class:`~ds_ext.pipe_schedules.ops.Timetable`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ..errors import ScheduleError
from .ops import Op, Timetable
from .placement import Placement

Generator = Callable[..., Iterator[Op]]


@dataclass(frozen=True)
class Option:
    """An integer option of a schedule: default, least value, and what it means."""

    default: int
    minimum: int
    help: str


@dataclass(frozen=True)
class Schedule:
    """What a method is: its order, its placement and the sizes it accepts."""

    name: str
    program: Generator
    place: Callable[..., Placement]
    even_ranks: bool = False
    micro_batches_multiple_of_ranks: bool = False
    options: Mapping[str, Option] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """First line of the generator's docstring."""
        return (self.program.__doc__ or "").strip().splitlines()[0]

    def resolve_options(self, options: Mapping[str, object] | None) -> dict[str, int]:
        """Fill in defaults and check types and ranges. Raises ScheduleError."""
        given = dict(options or {})
        unknown = sorted(set(given) - set(self.options))
        if unknown:
            known = ", ".join(sorted(self.options)) or "none"
            raise ScheduleError(
                f"{self.name} has no option {unknown[0]!r}{_did_you_mean(unknown[0], self.options)}; "
                f"its options: {known}."
            )
        values = {}
        for name, option in self.options.items():
            value = given.get(name, option.default)
            if isinstance(value, bool) or not isinstance(value, int) or value < option.minimum:
                raise ScheduleError(
                    f"{self.name}: option {name} ({option.help}) must be an integer of at least "
                    f"{option.minimum}; got {value!r}."
                )
            values[name] = value
        return values

    def placement(self, ranks: int, options: Mapping[str, object] | None = None) -> Placement:
        """Where the stages live on ``ranks`` devices. Raises ScheduleError when it cannot use that many."""
        if ranks < 1:
            raise ScheduleError(f"{self.name} needs at least 1 stage (pipeline_parallel_size); got {ranks}.")
        if self.even_ranks and ranks % 2:
            ways = " or ".join(str(n) for n in (ranks - 1, ranks + 1) if n >= 2)
            raise ScheduleError(
                f"{self.name} needs an even number of stages (pipeline_parallel_size), because devices work in "
                f"mirrored pairs; got {ranks}. Use {ways}."
            )
        placement = self.place(ranks, **self.resolve_options(options))
        placement.check_replicas(self.name)
        return placement

    def timetable(
        self, ranks: int, micro_batches: int, options: Mapping[str, object] | None = None
    ) -> Timetable:
        """The order of every rank for ``micro_batches`` per pipeline group and step. Raises ScheduleError."""
        placement = self.placement(ranks, options)
        self._check_micro_batches(ranks, micro_batches, placement.replicas)
        values = self.resolve_options(options)
        order = tuple(tuple(self.program(rank, ranks, micro_batches, **values)) for rank in range(ranks))
        return Timetable(self.name, placement, micro_batches, order)

    def _check_micro_batches(self, ranks: int, micro_batches: int, replicas: int) -> None:
        step = ranks if self.micro_batches_multiple_of_ranks else 1
        if micro_batches >= 1 and micro_batches % step == 0:
            return
        if step == 1:
            raise ScheduleError(f"{self.name} needs at least 1 micro-batch; got {micro_batches}.")
        below, above = micro_batches // step * step, (micro_batches // step + 1) * step
        ways = [n for n in (below, above) if n >= step] or [step]
        raise ScheduleError(
            f"{self.name} needs micro_batches to be a multiple of {step} (stages); got {micro_batches}. "
            f"Use {' or '.join(map(str, ways))}, that is gradient_accumulation_steps "
            f"{' or '.join(str(n // replicas) for n in ways)}."
        )


_SCHEDULES: dict[str, Schedule] = {}
SCHEDULES: Mapping[str, Schedule] = MappingProxyType(_SCHEDULES)


def schedule(
    name: str,
    *,
    place: Callable[..., Placement],
    even_ranks: bool = False,
    micro_batches_multiple_of_ranks: bool = False,
    options: Mapping[str, Option] | None = None,
) -> Callable[[Generator], Generator]:
    """Register a generator ``program(rank, ranks, micro_batches, **options) -> Iterator[Op]``.

    Args:
        name: what the JSON and the command line call it; lower case.
        place: makes the placement from ``(ranks, **options)``.
        even_ranks: the method needs an even number of devices.
        micro_batches_multiple_of_ranks: the method needs N to be a multiple of D.
        options: the keys of "schedule_options" that it takes.
    """

    def register(program: Generator) -> Generator:
        known = _SCHEDULES.get(name)
        if known is not None and known.program.__module__ != program.__module__:
            raise ScheduleError(f"schedule {name!r} is already registered by {known.program.__module__}.")
        _SCHEDULES[name] = Schedule(
            name,
            program,
            place,
            even_ranks,
            micro_batches_multiple_of_ranks,
            MappingProxyType(dict(options or {})),
        )
        return program

    return register


def get_schedule(name: str) -> Schedule:
    """The schedule called ``name`` (any case). Raises ScheduleError with the nearest and all names."""
    found = _SCHEDULES.get(name.lower())
    if found is None:
        raise ScheduleError(
            f"schedule {name!r} is not known{_did_you_mean(name, _SCHEDULES)}; "
            f"known: {', '.join(sorted(_SCHEDULES))}."
        )
    return found


def timetable(name: str, ranks: int, micro_batches: int, **options: object) -> Timetable:
    """``timetable("bitpipe", 4, 8)``: shorthand for ``get_schedule(name).timetable(...)``."""
    return get_schedule(name).timetable(ranks, micro_batches, options)


def _did_you_mean(name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
