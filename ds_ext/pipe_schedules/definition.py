"""Schedule: order, placement, options and supported sizes of one method."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ScheduleError
from .costs import Costs, read_costs
from .dynamic import DynamicRules
from .list_scheduling.head_parts import insert_head_parts
from .ops import Op
from .placement import Placement
from .simulation import peak_stages
from .stage_kinds import HEAD_PART
from .timetables import Timetable

Orders = tuple[tuple[Op, ...], ...]
_MAX_DEVICES = 16_384
_MAX_STAGES = 200_000
_MAX_OPS = 5_000_000  # forwards and whole backwards; checking that many takes a minute and 4 GB
COSTS = "costs"  # the option of a planned schedule for the costs to plan for
LIMIT = "max_activations"  # the option of schedules that limit the live activations of a device

Generator = Callable[..., Iterator[Op]]
Planner = Callable[..., Orders]
Variants = Callable[[int, int], Sequence[Mapping[str, Any]]]
Dynamic = Callable[[Placement, int, Mapping[str, Any]], DynamicRules]


@dataclass(frozen=True)
class Option:
    """Option of a schedule: default, minimum (for a number), help text, and any restriction to certain words.

    Values have the type of the default. A float option accepts integers. An integer option accepts floats without a
    fraction, such as 4e9. A boolean option accepts the words true and false.
    """

    default: bool | int | float | str
    minimum: int | None
    help: str
    choices: tuple[str, ...] = ()

    def expected(self, value: object) -> str | None:
        """Return the kind of value that the option needs, or None if ``value`` is valid."""
        if self.choices:
            return None if value in self.choices else f"one of {', '.join(self.choices)}"
        if isinstance(self.default, bool):
            return None if isinstance(value, bool) else "true or false"
        if isinstance(self.default, str):
            return None if isinstance(value, str) else "a string"
        numbers = (int, float) if isinstance(self.default, float) else (int,)
        valid = isinstance(value, numbers) and not isinstance(value, bool) and math.isfinite(value)
        if valid and (self.minimum is None or value >= self.minimum):  # pyright: ignore[reportOperatorIssue]
            return None
        return f"{'a number' if float in numbers else 'an integer'} of at least {self.minimum}"

    def convert(self, value: object) -> object:
        if isinstance(self.default, bool):
            return {"true": True, "false": False}.get(str(value).lower(), value)
        if isinstance(self.default, int) and isinstance(value, float) and value.is_integer():
            return int(value)
        return value

    @property
    def description(self) -> str:
        if isinstance(self.default, bool):
            return f"{self.help}; true or false"
        return f"{self.help}; one of {', '.join(self.choices)}" if self.choices else self.help

    @property
    def default_text(self) -> str:
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)


COSTS_OPTION = Option("f=1,b=1,w=1,comm=0", None, "costs to plan for, in the format of --costs")
_LIMIT = Option(0.0, 0, "maximum live activations per device, in units of 1/D of the model; 0: no limit")


def defaults_only(num_devices: int, micro_batches: int) -> Sequence[Mapping[str, Any]]:
    return [{}]


@dataclass(frozen=True)
class Schedule:
    """Method of pipeline parallelism, with its placement, options and supported sizes.

    ``generate`` yields the ops of one device, or, if ``planned``, returns the orders of all devices for given costs.
    ``variants(D, N)`` lists the options that a planner should try. ``dynamic`` makes the runtime rules of a dynamic
    schedule; its timetable is then one possible run. ``file`` is the timetable file from which the schedule was read.
    With ``divides_head``, every device has a part of the model's head (``vocabulary_parallel_head``).
    """

    name: str
    generate: Callable[..., Any]
    place: Callable[..., Placement]
    even_devices: bool = False
    micro_batches_multiple_of_devices: bool = False
    options: Mapping[str, Option] = field(default_factory=dict)
    planned: bool = False
    variants: Variants = defaults_only
    dynamic: Dynamic | None = None
    file: str = ""
    divides_head: bool = False

    @property
    def has_slices(self) -> bool:
        """True if micro-batches can be sliced: the function has a parameter ``slices``, and no option has that name."""
        return "slices" in inspect.signature(self.generate).parameters and "slices" not in self.options

    @property
    def summary(self) -> str:
        return (self.generate.__doc__ or "").strip().splitlines()[0]

    def dividing_head(self, divides_head: bool = True) -> Schedule:
        """Return the schedule with a part of the model's head on every device, or without."""
        return replace(self, divides_head=divides_head)

    @property
    def known_options(self) -> Mapping[str, Option]:
        return {LIMIT: _LIMIT, COSTS: COSTS_OPTION, **self.options} if self.divides_head else self.options

    def resolve_options(self, options: Mapping[str, object] | None) -> dict[str, Any]:
        known = self.known_options
        requested = dict(options or {})
        self._check_names(requested, known)
        values = {name: option.convert(requested.get(name, option.default)) for name, option in known.items()}
        for name, option in known.items():
            expected = option.expected(values[name])
            if expected:
                raise ScheduleError(
                    f"{self.name}: option {name} ({option.help}) must be {expected} (got {values[name]!r})."
                )
        return values

    def _check_names(self, options: Mapping[str, object], known: Mapping[str, Option]) -> None:
        unknown = sorted(set(options) - set(known))
        if unknown and self.file:
            raise ScheduleError(
                f"schedule_options: the timetable file {self.file} takes no options (got {', '.join(unknown)}). "
                f"Remove them."
            )
        if unknown:
            names = ", ".join(sorted(known)) or "none"
            raise ScheduleError(
                f"{self.name}: unknown option {unknown[0]!r}{did_you_mean(unknown[0], known)}. Options: {names}."
            )

    def placement(self, num_devices: int, options: Mapping[str, object] | None = None) -> Placement:
        if not 1 <= num_devices <= _MAX_DEVICES:
            raise ScheduleError(
                f"{self.name}: pipeline_parallel_size must be 1 to {_MAX_DEVICES} (got {num_devices})."
            )
        if self.even_devices and num_devices % 2:
            raise ScheduleError(needs_even_devices(self.name, num_devices))
        parameters = inspect.signature(self.place).parameters
        values = self.resolve_options(options)
        values = {name: value for name, value in values.items() if name in parameters}
        self._check_num_stages(num_devices, values)
        with self._wrap_errors():
            placement = self.place(num_devices, **values)
        if placement.devices_per_pipe != num_devices:
            raise ScheduleError(
                f"{self.name}: its placement has {placement.devices_per_pipe} devices "
                f"(got pipeline_parallel_size {num_devices}). Use {placement.devices_per_pipe}, or make `place` depend "
                f"on the number of devices."
            )
        placement.check_replicas(self.name)
        if not self.divides_head:
            if parts := placement.stages_of_kind(HEAD_PART):
                raise ScheduleError(
                    f"{self.name}: its timetable has {len(parts)} parts of the head (got vocabulary_parallel_head "
                    f"false). Set it to true."
                )
            return placement
        if self.dynamic is not None:
            raise ScheduleError(
                f"{self.name}: vocabulary_parallel_head needs a fixed order (got {num_devices} devices that choose "
                f"their ops at run time). Remove it, or use another schedule."
            )
        return placement.with_head_parts(self.name)

    def _check_num_stages(self, num_devices: int, options: Mapping[str, Any]) -> None:
        """Raise ScheduleError for too many stages. Every integer option multiplies the stages per device."""
        counts = {name: value for name, value in options.items() if isinstance(value, int)}
        stages = num_devices * math.prod(counts.values())
        if stages > _MAX_STAGES:
            factors = " x ".join(
                [f"{num_devices} devices", *(f"{count:,} {name}" for name, count in counts.items())]
            )
            raise ScheduleError(
                f"{self.name}: too many stages (got {factors} = {stages:,}). Use at most {_MAX_STAGES:,}."
            )

    @contextlib.contextmanager
    def _wrap_errors(self) -> Iterator[None]:
        """Convert any exception raised by the method's own code into a ScheduleError with file and line."""
        try:
            yield
        except (ScheduleError, MemoryError):
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())
            if isinstance(error, ValueError) and "too many values to unpack (expected 3" in text:
                text += "; an Op has the fields kind, micro_batch, stage and slice"
            raise ScheduleError(
                f"{self.name}: its code failed with {type(error).__name__}{f' ({text})' if text else ''} in "
                f"{os.path.basename(frame.filename)}, line {frame.lineno}."
            ) from error

    def timetable(
        self,
        num_devices: int,
        micro_batches: int,
        options: Mapping[str, object] | None = None,
        costs: Costs | None = None,
        slices: int = 1,
    ) -> Timetable:
        """Return the timetable of one step of a pipeline group.

        Args:
            micro_batches: N, summed over the pipes.
            costs: costs that a planned schedule plans for; None: those of its option "costs".
            slices: parts of the sequence of every micro-batch.
        """
        placement = self.placement(num_devices, options)
        if self.micro_batches_multiple_of_devices:
            check_multiple(self.name, micro_batches, placement)
        self.check_slices(slices)
        check_size(self.name, placement, micro_batches, slices)
        values: dict[str, Any] = self.resolve_options(options)
        limit = values.get(LIMIT, 0)
        if LIMIT not in self.options:
            values.pop(LIMIT, None)
        if self.has_slices:
            values["slices"] = slices
        costs = costs or (read_costs(values[COSTS]) if values.get(COSTS) else Costs())
        if not self.planned:
            if COSTS not in self.options:
                values.pop(COSTS, None)  # of parts of the head
            with self._wrap_errors():
                orders = every_device(self.generate, placement, micro_batches, **values)
        else:
            values.pop(COSTS, None)  # a timetable file has no such option
            costs = costs.fit(placement)
            body = replace(costs, head=0.0) if costs.head else costs
            with self._wrap_errors():
                of_layers = placement.of_layers() if self.divides_head else placement
                orders = self.generate(of_layers, micro_batches, body, **values)
        timetable = Timetable(self.name, placement, micro_batches, tuple(orders), slices)
        if not self.divides_head:
            return timetable
        if limit:
            peak = max(peak_stages(order, stages=placement.stages) for order in timetable.orders)
            if limit < (peak := peak * num_devices / placement.stages / slices):
                raise ScheduleError(
                    f"{self.name}: {LIMIT} must be at least {peak:g} (got {limit:g}). Use {peak:g}."
                )
        has_parts = any(op.stage >= placement.stages for order in orders for op in order)
        return timetable if has_parts else insert_head_parts(timetable, costs, 0 if limit else 1)

    def check_slices(self, slices: int) -> None:
        if slices < 1:
            raise ScheduleError(f"{self.name}: sequence_slices must be at least 1 (got {slices}).")
        if slices > 1 and not self.has_slices:
            names = ", ".join(sorted(name for name, schedule in REGISTERED.items() if schedule.has_slices))
            raise ScheduleError(
                f"{self.name}: sequence_slices must be 1 (got {slices}). Schedules with slices: {names}."
            )

    def make_dynamic_rules(
        self, num_devices: int, micro_batches: int, options: Mapping[str, object] | None = None
    ) -> DynamicRules | None:
        if self.dynamic is None:
            return None
        placement = self.placement(num_devices, options)
        values = self.resolve_options(options)
        with self._wrap_errors():
            return self.dynamic(placement, micro_batches, values)


REGISTERED: dict[str, Schedule] = {}  # by name; :mod:`.registry` adds them


def every_device(generate: Generator, placement: Placement, micro_batches: int, **options: object) -> Orders:
    num_devices = placement.num_devices
    return tuple(
        tuple(generate(device, num_devices, micro_batches, **options)) for device in range(num_devices)
    )


def check_size(name: str, placement: Placement, micro_batches: int, slices: int = 1) -> None:
    if micro_batches < 1:
        raise ScheduleError(f"{name}: micro_batches must be at least 1 (got {micro_batches}).")
    ops = 2 * placement.stages * micro_batches * slices
    if ops > _MAX_OPS:
        most = _MAX_OPS // (2 * placement.stages * slices)
        parts = f" x {slices:,} slices" if slices > 1 else ""
        raise ScheduleError(
            f"{name}: at most {_MAX_OPS:,} forwards and backwards (got {ops:,} = 2 x {placement.stages:,} stages x "
            f"{micro_batches:,} micro-batches{parts}). Use at most {most:,} micro-batches, or fewer stages."
        )


def check_multiple(name: str, micro_batches: int, placement: Placement, alternative: str = "") -> None:
    """Raise ScheduleError if N is not a multiple of D; ``alternative`` is a further fix, appended to the error."""
    step = placement.num_devices
    if micro_batches >= 1 and micro_batches % step == 0:
        return
    below = micro_batches // step * step
    valid = [n for n in (below, below + step) if n >= step] or [step]
    raise ScheduleError(
        f"{name}: micro_batches must be a multiple of {step}, the number of devices (got {micro_batches}). "
        f"Use {' or '.join(map(str, valid))}.{alternative}"
    )


def needs_even_devices(name: str, num_devices: int) -> str:
    """Return the text of the error for an odd number of devices."""
    valid = " or ".join(str(n) for n in (num_devices - 1, num_devices + 1) if n >= 2)
    return f"{name}: pipeline_parallel_size must be even (got {num_devices}). Use {valid}."


def did_you_mean(name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
