"""What a schedule is: its order, its placement, its options and the sizes it accepts; one by name is in registry.py."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import ScheduleError
from .costs import Costs, read_costs
from .ops import Op
from .placement import Placement
from .timetables import Timetable

Orders = tuple[tuple[Op, ...], ...]
_MOST_DEVICES = 16_384
_MOST_STAGES = 200_000
_MOST_OPS = 5_000_000  # forwards and backwards of a timetable: to check as many takes a minute and 4 GB
COSTS = "costs"  # the option of a planned schedule that says what to plan for

Generator = Callable[..., Iterator[Op]]
Planner = Callable[..., Orders]
Variants = Callable[[int, int], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Option:
    """An option of a schedule: default, least value if it is a number, what it means, and its words if it has such.

    Its values have the type of the default. A float may be given as an integer, an integer as a float without a
    fraction (4e9, as JSON and command lines write large ones), and true or false as a word.
    """

    default: bool | int | float | str
    minimum: int | None
    help: str
    choices: tuple[str, ...] = ()

    def refusal(self, value: object) -> str | None:
        """What ``value`` should have been; None if it is right."""
        if self.choices:
            return None if value in self.choices else f"one of {', '.join(self.choices)}"
        if isinstance(self.default, bool):
            return None if isinstance(value, bool) else "true or false"
        if isinstance(self.default, str):
            return None if isinstance(value, str) else "a text"
        numbers = (int, float) if isinstance(self.default, float) else (int,)
        right = isinstance(value, numbers) and not isinstance(value, bool) and math.isfinite(value)
        if right and (self.minimum is None or value >= self.minimum):  # pyright: ignore[reportOperatorIssue]
            return None
        return f"{'a number' if float in numbers else 'an integer'} of at least {self.minimum}"

    def read(self, value: object) -> object:
        """``value``, or what a word of the command line, or a whole number written as 4e9, means."""
        if isinstance(self.default, bool):
            return {"true": True, "false": False}.get(str(value).lower(), value)
        if isinstance(self.default, int) and isinstance(value, float) and value.is_integer():
            return int(value)
        return value

    @property
    def described(self) -> str:
        """What it means, and the values that it takes where these are words."""
        if isinstance(self.default, bool):
            return f"{self.help}; true or false"
        return f"{self.help}; one of {', '.join(self.choices)}" if self.choices else self.help

    @property
    def default_text(self) -> str:
        """The default as a command line or a JSON has it."""
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)


class DynamicRules(Protocol):
    """What the devices of a dynamic schedule agree on before a step; the order they find on the way."""

    @property
    def placement(self) -> Placement: ...

    @property
    def micro_batches(self) -> int: ...

    @property
    def split(self) -> bool:
        """Whether backwards are split into input and weight gradient."""
        ...

    def device(self, device: int) -> Any:
        """A new policy (:class:`.list_scheduling.dispatch.Policy`) for one step of a device."""
        ...

    def entering(self, device: int) -> list[Op]:
        """The ops that wait for nothing, of micro-batches that enter at ``device``."""
        ...

    def count(self, device: int) -> int:
        """How many ops ``device`` computes in a step."""
        ...

    def room(self, device: int) -> int:
        """Stages of micro-batches whose activations ``device`` keeps at most."""
        ...


Dynamic = Callable[[Placement, int, Mapping[str, Any]], DynamicRules]


def defaults(num_devices: int, micro_batches: int) -> Sequence[Mapping[str, Any]]:
    """No options worth trying but those that a schedule has by itself."""
    return [{}]


@dataclass(frozen=True)
class Schedule:
    """What a method is: its order, its placement and the sizes it accepts.

    ``variants(D, N)`` lists the options that are worth trying when a schedule is to be chosen. A schedule with
    ``dynamic`` decides its order at run time, by what that gives; its timetable is then one of its runs. One that was
    read from a ``file`` is the timetable that stands there.
    """

    name: str
    program: Callable[..., Any]
    place: Callable[..., Placement]
    even_devices: bool = False
    micro_batches_multiple_of_devices: bool = False
    options: Mapping[str, Option] = field(default_factory=dict)
    planned: bool = False
    variants: Variants = defaults
    dynamic: Dynamic | None = None
    file: str = ""

    @property
    def summary(self) -> str:
        """First line of the method's docstring."""
        return (self.program.__doc__ or "").strip().splitlines()[0]

    def resolve_options(self, options: Mapping[str, object] | None) -> dict[str, Any]:
        """Fill in defaults and check types and ranges. Raises ScheduleError."""
        given = dict(options or {})
        unknown = sorted(set(given) - set(self.options))
        if unknown and self.file:
            raise ScheduleError(
                f"the timetable in {self.file} has its order already and takes no options; got {', '.join(unknown)}. "
                f'Leave them out (in a JSON "schedule_options").'
            )
        if unknown:
            known = ", ".join(sorted(self.options)) or "none"
            raise ScheduleError(
                f"{self.name} has no option {unknown[0]!r}{did_you_mean(unknown[0], self.options)}; "
                f"its options: {known}."
            )
        values = {name: option.read(given.get(name, option.default)) for name, option in self.options.items()}
        for name, option in self.options.items():
            expected = option.refusal(values[name])
            if expected:
                raise ScheduleError(
                    f"{self.name}: option {name} ({option.help}) must be {expected}; got {values[name]!r}."
                )
        return values

    def placement(self, num_devices: int, options: Mapping[str, object] | None = None) -> Placement:
        """Return the placement on ``num_devices`` devices. Raises ScheduleError when it refuses the number."""
        if num_devices > _MOST_DEVICES:
            raise ScheduleError(f"{self.name}: {num_devices} stages are more than {_MOST_DEVICES}.")
        if num_devices < 1:
            raise ScheduleError(
                f"{self.name} needs at least 1 stage (pipeline_parallel_size); got {num_devices}."
            )
        if self.even_devices and num_devices % 2:
            ways = " or ".join(str(n) for n in (num_devices - 1, num_devices + 1) if n >= 2)
            raise ScheduleError(
                f"{self.name} needs an even number of stages (pipeline_parallel_size), because devices work in "
                f"mirrored pairs; got {num_devices}. Use {ways}."
            )
        wanted = inspect.signature(self.place).parameters
        values = {name: value for name, value in self.resolve_options(options).items() if name in wanted}
        # The integers that a placement takes count stages of a device: chunks, waves.
        counts = [value for value in values.values() if isinstance(value, int)]
        if num_devices * math.prod(counts) > _MOST_STAGES:
            given = " x ".join([f"{num_devices} devices", *(f"{value:,}" for value in counts)])
            which = " or ".join(["devices", *(name for name in values if isinstance(values[name], int))])
            raise ScheduleError(
                f"{self.name}: the model would be cut into {given} = {num_devices * math.prod(counts):,} stages, more "
                f"than {_MOST_STAGES:,}. Use fewer {which}."
            )
        with self._naming():
            placement = self.place(num_devices, **values)
        if placement.devices_per_pipe != num_devices:
            raise ScheduleError(
                f"{self.name}: its placement is for {placement.devices_per_pipe} devices; got {num_devices} "
                f"(pipeline_parallel_size). Use {placement.devices_per_pipe}, or have `place` follow the "
                f"number of devices."
            )
        placement.check_replicas(self.name)
        return placement

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """An exception of the schedule's own code as a ScheduleError that names it and the line, caused by it."""
        try:
            yield
        except (ScheduleError, MemoryError):
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            said = " ".join(str(error).split())
            raise ScheduleError(
                f"{self.name}: its code failed with {type(error).__name__}{f' ({said})' if said else ''} in "
                f"{os.path.basename(last.filename)}, line {last.lineno}."
            ) from error

    def timetable(
        self,
        num_devices: int,
        micro_batches: int,
        options: Mapping[str, object] | None = None,
        costs: Costs | None = None,
    ) -> Timetable:
        """The order of every device for ``micro_batches`` per pipeline group and step. Raises ScheduleError.

        Args:
            costs: what a planned schedule plans for; its option "costs" counts if that is None.
        """
        placement = self.placement(num_devices, options)
        if self.micro_batches_multiple_of_devices:
            check_multiple(self.name, micro_batches, placement)
        if micro_batches < 1:
            raise ScheduleError(f"{self.name} needs at least 1 micro-batch; got {micro_batches}.")
        check_size(self.name, placement, micro_batches)
        values = self.resolve_options(options)
        if self.planned:
            text = values.pop(COSTS, "")
            costs = costs or read_costs(text)
        with self._naming():
            if self.planned:
                orders = self.program(placement, micro_batches, costs, **values)
            else:
                orders = every_rank(self.program, placement, micro_batches, **values)
        return Timetable(self.name, placement, micro_batches, tuple(orders))

    def rules(
        self, num_devices: int, micro_batches: int, options: Mapping[str, object] | None = None
    ) -> DynamicRules | None:
        """By what the devices decide at run time; None if the timetable is what they run. Raises ScheduleError."""
        if self.dynamic is None:
            return None
        values = self.resolve_options(options)
        with self._naming():
            return self.dynamic(self.placement(num_devices, options), micro_batches, values)


def every_rank(program: Generator, placement: Placement, micro_batches: int, **options: object) -> Orders:
    """``program(device, num_devices, micro_batches, **options)`` of all devices."""
    num_devices = placement.num_devices
    return tuple(
        tuple(program(device, num_devices, micro_batches, **options)) for device in range(num_devices)
    )


def check_size(name: str, placement: Placement, micro_batches: int) -> None:
    """Refuse a timetable that no memory would hold, before it is made. Raises ScheduleError with the numbers."""
    ops = 2 * placement.stages * micro_batches
    if ops > _MOST_OPS:
        most = _MOST_OPS // (2 * placement.stages)
        raise ScheduleError(
            f"{name}: {placement.stages:,} stages of the model and {micro_batches:,} micro-batches make {ops:,} "
            f"forwards and backwards, more than {_MOST_OPS:,}. Use at most {most:,} micro-batches, or fewer stages."
        )


def check_multiple(name: str, micro_batches: int, placement: Placement, otherwise: str = "") -> None:
    """Refuse a number of micro-batches that is not a multiple of D; ``otherwise`` is one more way out.

    Raises:
        ScheduleError: with the nearest numbers, also as DeepSpeed's gradient_accumulation_steps.
    """
    step = placement.num_devices
    if micro_batches >= 1 and micro_batches % step == 0:
        return
    below, above = micro_batches // step * step, (micro_batches // step + 1) * step
    ways = [n for n in (below, above) if n >= step] or [step]
    raise ScheduleError(
        f"{name} needs micro_batches to be a multiple of {step} (stages); got {micro_batches}. "
        f"Use {' or '.join(map(str, ways))}, that is gradient_accumulation_steps "
        f"{' or '.join(str(n // placement.replicas) for n in ways)}.{otherwise}"
    )


def did_you_mean(name: str, known: Mapping[str, object]) -> str:
    """The nearest known name, as part of an error."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
