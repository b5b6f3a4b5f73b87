"""Timetables as text that people and other programs write: one line a rank, one cell a computation.

The cells are either ours, ``F3@1``, or those of ``torch.distributed.pipelining``, ``1F3``: forward of micro-batch 3
at stage 1. Cells are separated by commas or blanks. An empty cell or ``.`` is a wait; a timetable holds only the
order, so waits carry no meaning. A first line like ::

    # timetable schedule=bitpipe micro_batches=4 pipes=0,1,1,0;1,0,0,1

says what the cells cannot: the device of every stage of every pipe. Where forwards have devices of their own, those
are after ``forward=``, with the tensor-parallel ranks that one of theirs stands for and how much slower they are:
``forward=0,2:1:1.0``. Without a header there is one pipe, and a stage lives on the rank whose line has it. Other lines
that begin with ``#`` are comments.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import ScheduleError
from .costs import Costs
from .events import Work
from .ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE, Op
from .placement import ForwardPipe, Placement
from .registry import check_size
from .simulate import in_order, simulate
from .timetables import Timetable

_HEADER = "# timetable"
_WAIT = "."
_MOST_MICRO_BATCHES = 1_000_000
_KEYS = ("schedule", "micro_batches", "pipes", "forward")

# A cell may hold blanks only between parentheses: torch writes two overlapped computations as (0F1;1B0)OVERLAP_F_B.
_CELL = re.compile(r'\([^)]*\)[^\s,"]*|[^\s,"]+')
_OWN = re.compile(r"([FBIWR])(\d{1,9})@(\d{1,9})")
_TORCH = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_OVERLAP = re.compile(r"\(([^)]*)\)OVERLAP_F_B")
# What torch inserts between the computations; lowering inserts ours.
_NOT_COMPUTED = re.compile(r"\d{1,9}(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d{0,9}")


def dumps(timetable: Timetable) -> str:
    """Text from which :func:`loads` makes an equal timetable, whatever its placement and order."""
    name = timetable.schedule
    if not name.isprintable():
        raise ScheduleError(f"the schedule's name is written on one line; got {name!r}.")
    pipes = ";".join(",".join(map(str, pipe)) for pipe in timetable.placement.pipes)
    header = f"{_HEADER} schedule={shlex.quote(name)} micro_batches={timetable.micro_batches} pipes={pipes}"
    apart = timetable.placement.forward
    if apart is not None:
        header += f" forward={','.join(map(str, apart.devices))}:{apart.merged}:{apart.slowdown!r}"
    orders = (", ".join(map(str, order)) or _WAIT for order in timetable.orders)
    return "\n".join((header, *orders)) + "\n"


def torch_csv(timetable: Timetable) -> str:
    """The compute-only CSV of ``torch.distributed.pipelining``: ``2F0 2I0 2W0 2B0``, all ranks step by step.

    Every computation takes one step, and an empty cell is a step in which a rank waits. Raises ScheduleError for
    more than one pipe, which that format has no words for, and for a timetable that does not end.
    """
    if timetable.placement.replicas > 1:
        raise ScheduleError(
            f"{timetable.schedule} has {timetable.placement.replicas} pipes, and torch's CSV holds one: its cells "
            f"do not say which pipe a stage belongs to. Write a timetable file instead (FILE.txt, dumps())."
        )
    if timetable.placement.forward_devices:
        raise ScheduleError(
            f"{timetable.schedule} computes forwards on devices of their own, and torch's CSV has one device a stage. "
            f"Write a timetable file instead (FILE.txt, dumps())."
        )
    simulate(timetable)
    # With input gradients in the place of whole backwards every computation costs the same: one step.
    orders = tuple(tuple(map(_one_step, order)) for order in timetable.orders)
    steps = in_order(Work(timetable.placement, timetable.micro_batches, Costs(), split=True), orders)
    share = timetable.placement.devices_per_pipe / timetable.placement.stages
    rows = []
    for order, starts in zip(timetable.orders, steps.starts, strict=True):
        cells: list[str] = []
        for op, start in zip(order, starts, strict=True):
            cells += [""] * (round(start / share) - len(cells))
            cells.append(f"{op.stage}{op.kind}{op.micro_batch}")
        rows.append(cells)
    length = max(map(len, rows))
    return "".join(",".join(cells + [""] * (length - len(cells))) + "\r\n" for cells in rows)


def _one_step(op: Op) -> Op:
    return op._replace(kind=BACKWARD_INPUT) if op.kind == BACKWARD else op


@dataclass(frozen=True)
class _Place:
    """Where in the text something stands, both counted from 1."""

    line: int
    column: int
    source: str

    def error(self, sentence: str) -> ScheduleError:
        return ScheduleError(f"{self.source}, line {self.line}, column {self.column}: {sentence}")


def loads(text: str, name: str = "timetable", source: str = "timetable") -> Timetable:
    """The timetable that ``text`` describes; whether it can run is for :func:`.check.program.check` to say.

    Args:
        name: what the schedule is called if the text does not say.
        source: where the text is from, for errors.

    Raises:
        ScheduleError: with line and column, what was found and what was expected.
    """
    header: dict[str, str] = {}
    ranks: list[tuple[Op, ...]] = []
    places: list[list[_Place]] = []
    header_at = _Place(1, 1, source)
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        if line.split()[:2] == _HEADER.split():
            header_at = _Place(number, 1, source)
            header = _read_header(line, header_at)
        elif line.strip() and not line.lstrip().startswith("#"):
            cells = list(_read_cells(line, number, source))
            ranks.append(tuple(op for op, _ in cells))
            places.append([place for _, place in cells])
    if not any(ranks):
        raise header_at.error(
            "there is no computation; expected a line a rank with cells such as F3@1 or 1F3."
        )
    if "forward" in header and "pipes" not in header:
        raise header_at.error("forward=... needs pipes=...: the devices that go backward.")
    placement = (
        _read_pipes(header["pipes"], len(ranks), header_at, _read_forward(header.get("forward"), header_at))
        if "pipes" in header
        else _infer_placement(ranks, places)
    )
    found = 1 + max(op.micro_batch for order in ranks for op in order)
    micro_batches = _read_count(header["micro_batches"], header_at) if "micro_batches" in header else found
    if max(found, micro_batches) > _MOST_MICRO_BATCHES:
        raise header_at.error(
            f"there are {max(found, micro_batches)} micro-batches, from 0; expected at most {_MOST_MICRO_BATCHES}."
        )
    schedule = header.get("schedule", name)
    check_size(schedule, placement, micro_batches)
    return Timetable(schedule, placement, micro_batches, tuple(ranks))


def _read_header(line: str, place: _Place) -> dict[str, str]:
    try:
        words = shlex.split(line)[2:]
    except ValueError as error:
        raise place.error(f"the header cannot be read: {str(error).lower()}.") from None
    header: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in _KEYS or not equals or key in header:
            known = ", ".join(f"{key}=..." for key in _KEYS)
            raise place.error(f"the header has {word!r}; expected {known}, each at most once.")
        header[key] = value
    return header


def _read_count(value: str, place: _Place) -> int:
    if not re.fullmatch(r"\d{1,9}", value) or int(value) < 1:
        raise place.error(f"micro_batches={value}: expected a number of at least 1.")
    return int(value)


def _read_forward(value: str | None, place: _Place) -> ForwardPipe | None:
    """``0,2:1:1.0``: the forward device of every stage, ranks merged into one, and how much slower it is."""
    if value is None:
        return None
    found = re.fullmatch(
        r"(\d{1,9}(?:,\d{1,9})*):(\d{1,9}):(\d{1,9}(?:\.\d{1,17})?(?:e[-+]?\d{1,3})?)", value
    )
    if found is None or int(found[2]) < 1 or not 0 <= float(found[3]) < math.inf:
        raise place.error(
            f"forward={value}: expected devices, ranks merged into one and a factor of time, such as 0,2:1:1.0."
        )
    return ForwardPipe(tuple(map(int, found[1].split(","))), int(found[2]), float(found[3]))


def _read_pipes(value: str, ranks: int, place: _Place, forward: ForwardPipe | None) -> Placement:
    """``0,1,1,0;1,0,0,1``: a pipe a group, the device of every stage in it."""
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*(;\d{1,9}(,\d{1,9})*)*", value):
        raise place.error(
            f"pipes={value}: expected devices such as 0,1,1,0;1,0,0,1 for stages 0.. of two pipes."
        )
    placement = Placement(tuple(tuple(map(int, pipe.split(","))) for pipe in value.split(";")), forward)
    lengths = sorted({len(pipe) for pipe in (*placement.pipes, placement.forward_devices) if pipe})
    if len(lengths) > 1:
        raise place.error(
            f"pipes={value}: every pipe has all stages; got {lengths[0]} and {lengths[-1]} of them."
        )
    if placement.num_devices != ranks:
        raise place.error(
            f"pipes={value} is about {placement.num_devices} devices, and the text has {ranks} lines for ranks; "
            f"expected a line a rank ({_WAIT} for one that computes nothing)."
        )
    return placement


def _infer_placement(ranks: list[tuple[Op, ...]], places: list[list[_Place]]) -> Placement:
    """One pipe: a stage lives where it is computed."""
    device: dict[int, int] = {}
    for rank, (order, where) in enumerate(zip(ranks, places, strict=True)):
        for op, place in zip(order, where, strict=True):
            if device.setdefault(op.stage, rank) != rank:
                raise place.error(
                    f"{op} is on rank {rank}, and stage {op.stage} is already on rank {device[op.stage]}; expected "
                    f"each stage on one rank, or for several pipes a first line such as {_HEADER} pipes=0,1;1,0."
                )
    missing = next(stage for stage in range(len(device) + 1) if stage not in device)
    if missing < len(device):
        place = next(w for order, where in zip(ranks, places, strict=True)
                     for op, w in zip(order, where, strict=True) if op.stage > missing)  # fmt: skip
        raise place.error(f"there is no computation of stage {missing}; expected all stages from 0.")
    return Placement((tuple(device[stage] for stage in range(len(device))),))


def _read_cells(line: str, number: int, source: str) -> Iterator[tuple[Op, _Place]]:
    for cell in _CELL.finditer(line):
        place = _Place(number, cell.start() + 1, source)
        for op in _read_cell(cell.group(), place):
            yield op, place


def _read_cell(cell: str, place: _Place) -> list[Op]:
    """The computations of one cell: usually one."""
    if own := _OWN.fullmatch(cell):
        return [Op(own[1], int(own[2]), int(own[3]))]
    if torch := _TORCH.fullmatch(cell):
        return [Op(torch[2], int(torch[3]), int(torch[1]))]
    if overlap := _OVERLAP.fullmatch(cell):
        return [op for part in overlap[1].split(";") for op in _read_cell(part.strip(), place)]
    if cell == _WAIT or _NOT_COMPUTED.fullmatch(cell):
        return []
    kinds = ", ".join((FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, RECOMPUTE))
    raise place.error(
        f"{cell!r} is not a computation; expected F3@1 or 1F3 (one of {kinds}; micro-batch 3, stage 1), "
        f"or an empty cell or {_WAIT} for a wait."
    )
