"""Pipeline schedules as values: generate, lower, check, simulate and draw timetables, without torch.

A method file needs only the names below. Importing this package imports every file in :mod:`.methods`, which registers
its schedules.
"""

from importlib import import_module
from pkgutil import iter_modules

from ..errors import ScheduleError
from . import methods
from .checks.program import check
from .costs import Costs
from .definition import Option, Orders, Schedule
from .draw.grid import time_grid
from .lowering import lower
from .ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE, Instruction, Op
from .placement import Chunk, ForwardPipe, Placement, bidirectional_linear, bidirectional_v, linear, looped, v
from .registry import SCHEDULES, get_schedule, planned_schedule, schedule, timetable
from .simulation import Simulation, simulate
from .timetables import Program, Timetable

__all__ = [
    "BACKWARD",
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
    "FORWARD",
    "RECOMPUTE",
    "SCHEDULES",
    "Chunk",
    "Costs",
    "ForwardPipe",
    "Instruction",
    "Op",
    "Option",
    "Orders",
    "Placement",
    "Program",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "Timetable",
    "bidirectional_linear",
    "bidirectional_v",
    "check",
    "get_schedule",
    "linear",
    "looped",
    "lower",
    "planned_schedule",
    "schedule",
    "simulate",
    "time_grid",
    "timetable",
    "v",
]

for _method in sorted(module.name for module in iter_modules(methods.__path__)):
    import_module(f"{methods.__name__}.{_method}")
