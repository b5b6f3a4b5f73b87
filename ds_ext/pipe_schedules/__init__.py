"""Schedules as values: generate, lower, check, simulate and draw pipeline timetables without torch."""

from importlib import import_module

from .ops import Instruction, Op
from .placement import Chunk, Placement
from .registry import SCHEDULES, Option, Schedule, get_schedule, planned_schedule, schedule, timetable
from .timetables import Program, Timetable

__all__ = [
    "SCHEDULES",
    "Chunk",
    "Instruction",
    "Op",
    "Option",
    "Placement",
    "Program",
    "Schedule",
    "Timetable",
    "get_schedule",
    "planned_schedule",
    "schedule",
    "timetable",
]

# Importing a method's file registers it.
METHODS = (
    "bitpipe",
    "chimera",
    "dpp",
    "dualpipev",
    "fbd",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "zero_bubble",
)
for _method in METHODS:
    import_module(f".methods.{_method}", __name__)
