"""Timetable files: output of ``show -o FILE.txt``, ``optimise -o FILE`` or ``dump``, torch's CSV, handwritten text."""

from __future__ import annotations

import json
import os
from operator import index
from pathlib import Path
from typing import Any

from ..errors import ScheduleError
from .costs import Costs
from .definition import Orders, Schedule, check_size
from .ops import COMPUTE, Instruction, Op
from .placement import Placement
from .text import loads, require_written_kinds
from .timetables import Program, Timetable

DUMP_VERSION = 2  # 1: only messages and copies of the head had an other_stage
_ENDINGS = (".txt", ".csv", ".json")
_MAX_MICRO_BATCHES = 1_000_000


def is_timetable_file(name: str) -> bool:
    return os.sep in name or Path(name).suffix in _ENDINGS


def read_timetable(path: str | Path) -> Timetable:
    try:
        text = Path(path).read_text("utf-8-sig")
    except OSError as error:
        raise ScheduleError(f"timetable {path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ScheduleError(f"timetable {path}: not UTF-8 text.") from None
    if text.lstrip().startswith("{"):
        return read_dump(text, f"timetable {path}")
    return loads(text, Path(path).stem, f"timetable {path}")


def schedule_of_file(path: str | Path) -> Schedule:
    """Return a schedule that supports only the sizes of the timetable in a file."""
    timetable = read_timetable(path)
    if not timetable.trains:
        raise ScheduleError(f"timetable {path}: has no backwards. A job needs one for every forward.")
    num_devices, micro_batches = timetable.placement.num_devices, timetable.micro_batches

    def place(requested: int) -> Placement:
        if requested != num_devices:
            raise ScheduleError(
                f"timetable {path}: pipeline_parallel_size must be {num_devices} (got {requested})."
            )
        return timetable.placement

    def orders(placement: Placement, requested: int, costs: Costs, slices: int) -> Orders:
        if slices != timetable.slices:
            raise ScheduleError(
                f"timetable {path}: sequence_slices must be {timetable.slices} (got {slices})."
            )
        if requested != micro_batches:
            fix = f"Use {micro_batches}."
            if micro_batches % placement.replicas:
                fix = f"No job can run it: the {placement.replicas} pipes need equal shares."
            raise ScheduleError(
                f"timetable {path}: micro_batches must be {micro_batches} (got {requested}). {fix}"
            )
        return timetable.orders

    return Schedule(timetable.schedule, orders, place, planned=True, file=str(path))


def dump(program: Program) -> dict[str, object]:
    """Return the program as data for JSON, with the keys of "Timetable dump" in docs/reference.md."""
    timetable, placement = program.timetable, program.timetable.placement
    require_written_kinds(timetable)
    return {
        "version": DUMP_VERSION,
        "schedule": timetable.schedule,
        "stages": placement.devices_per_pipe,
        "devices": placement.num_devices,
        "micro_batches": timetable.micro_batches,
        "model_stages": placement.stages,
        **({"slices": timetable.slices} if timetable.slices > 1 else {}),
        **({"head_parts": placement.head_parts} if placement.head_parts else {}),
        "chunks": [
            {
                "rank": device,
                "device": device,
                "chunk": index,
                "stage": chunk.stage,
                "pipe": chunk.pipe,
                **_role(placement, device),
            }
            for device, chunks in enumerate(placement.chunks)
            for index, chunk in enumerate(chunks)
        ],
        "ranks": [[_dump_instruction(i) for i in instructions] for instructions in program.instructions],
    }


def _role(placement: Placement, device: int) -> dict[str, str]:
    if not placement.forward_devices:
        return {}
    return {"role": "forward" if device in placement.forward_devices else "backward"}


def _dump_instruction(instruction: Instruction) -> dict[str, object]:
    fields: dict[str, object] = {"op": instruction.name}
    for key in ("micro_batch", "stage", "pipe", "chunk", "peer", "other_stage"):
        value = getattr(instruction, key)
        if value is not None:
            fields[key] = value
    if instruction.slice:
        fields["slice"] = instruction.slice
    return fields


def read_dump(text: str, source: str) -> Timetable:
    """Return the unchecked timetable of a dump, without its messages and loads, which lowering inserts again."""
    try:
        dump = json.loads(text)
        name, micro_batches = dump["schedule"], dump["micro_batches"]
        valid = type(micro_batches) is int and 0 < micro_batches <= _MAX_MICRO_BATCHES
        if not isinstance(name, str) or not valid:
            raise ValueError(f"schedule {name!r}, micro_batches {micro_batches!r}")
        if dump.get("version", 1) not in range(1, DUMP_VERSION + 1):
            raise ValueError(f"version {dump['version']!r} instead of 1 to {DUMP_VERSION}")
        parts, chunks = dump.get("head_parts"), dump["chunks"]
        if parts:
            chunks = [chunk for chunk in chunks if chunk["stage"] < dump["model_stages"]]
        placement = _placement(chunks, dump["stages"])
        if parts:
            placement = placement.with_head_parts(name)
        slices = dump.get("slices", 1)
        if type(slices) is not int or slices < 1:
            raise ValueError(f"slices {slices!r}")
        check_size(name, placement, micro_batches, slices)
        orders = tuple(tuple(_ops(instructions)) for instructions in dump["ranks"])
    except RecursionError:
        raise ScheduleError(f"{source}: nested too deeply.") from None
    except ScheduleError as error:
        raise ScheduleError(f"{source}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        problem = f"no key {error}" if isinstance(error, KeyError) else str(error)
        raise ScheduleError(
            f"{source}: not a dump ({problem}). The 5 keys are schedule, stages, micro_batches, chunks, ranks."
        ) from None
    if len(orders) != placement.num_devices:
        raise ScheduleError(
            f"{source}: ranks must have {placement.num_devices} entries, one per device (got {len(orders)})."
        )
    return Timetable(name, placement, micro_batches, orders, slices)


def _placement(chunks: list[dict[str, Any]], num_devices: int) -> Placement:
    """Return the placement in a dump. Raises KeyError, TypeError or ValueError if the chunks do not form one."""
    if any("role" in chunk for chunk in chunks):
        raise ValueError("dumps with forward and backward devices are not supported")
    device_of = {(index(chunk["pipe"]), index(chunk["stage"])): index(chunk["rank"]) for chunk in chunks}
    pipes, stages = (1 + max(key[i] for key in device_of) for i in (0, 1))
    if len(device_of) != len(chunks) or len(device_of) != pipes * stages or min(map(min, device_of)) < 0:
        raise ValueError(f"{len(chunks)} chunks do not form {pipes} pipes of {stages} stages")
    first, last = min(device_of.values()), max(device_of.values())
    if first < 0 or last != num_devices - 1:  # a device between them may have no chunk
        raise ValueError(f"the ranks of the chunks are {first}..{last}, stages is {num_devices}")
    return Placement(tuple(tuple(device_of[pipe, stage] for stage in range(stages)) for pipe in range(pipes)))


def _ops(instructions: list[dict[str, Any]]) -> list[Op]:
    return [
        Op(COMPUTE[i["op"]], index(i["micro_batch"]), index(i["stage"]), index(i.get("slice", 0)))
        for i in instructions
        if i["op"] in COMPUTE
    ]
