"""What is to be measured, as it is written on the command line: ``bitpipe`` or ``bitpipe:mode=greedy``."""

from __future__ import annotations

from typing import Any

from ..cli.schedule_requests import split_request
from ..pipe_schedules import Schedule, Timetable, get_schedule
from ..pipe_schedules.costs import Costs


def read_request(text: str) -> tuple[Schedule, dict[str, Any]]:
    """A schedule and its options, ``NAME[:KEY=VALUE...]``. Raises ScheduleError."""
    name, options = split_request(text)
    return get_schedule(name), options


def options_for(text: str, costs: Costs) -> dict[str, Any]:
    """Its options: one that plans is told the costs, but neither the jitter nor how long links take."""
    schedule, options = read_request(text)
    if schedule.planned:
        options["costs"] = f"f={costs.forward!r},b={costs.backward_input!r},w={costs.backward_weight!r}"
    return options


def timetable_for(text: str, devices: int, micro_batches: int, costs: Costs) -> Timetable:
    """The order of what is asked for, or the one to expect if it is decided at run time. Raises ScheduleError."""
    schedule, _ = read_request(text)
    met = None if schedule.dynamic is None else costs
    return schedule.timetable(devices, micro_batches, options_for(text, costs), met)
