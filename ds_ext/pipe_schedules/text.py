"""Text format of timetables: one line per device, one cell per op.

A cell is ``F3@1``, or ``1F3`` as in ``torch.distributed.pipelining``: forward of micro-batch 3 at stage 1. ``F3.2@1``
is slice 2 of its sequence; ``slices=4`` in the header has their number. Cells are separated by commas or spaces. An
empty cell or ``.`` is a wait and does not affect the order. A header such as ::

    # timetable schedule=bitpipe micro_batches=4 pipes=0,1,1,0;1,0,0,1

contains the device of every stage of every pipe. Without it there is one pipe, and a stage is on the device that
computes its ops. ``forward=0,2:1:1.0`` in the header lists the forward devices of ``fbd``, the tensor-parallel ranks
that one forward rank replaces, and the slowdown. With ``head=true``, every device holds a part of the model's head.
Other lines that start with ``#`` are comments.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import ScheduleError
from .costs import Costs
from .definition import check_size
from .events import Workload
from .ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE, Op
from .placement import ForwardPipe, Placement
from .simulation import run_orders, simulate
from .stage_kinds import BODY, HEAD_LOSS, HEAD_PART
from .timetables import Timetable

_HEADER = "# timetable"
_WAIT = "."
_MAX_MICRO_BATCHES = 1_000_000
_KEYS = ("schedule", "micro_batches", "slices", "pipes", "forward", "head")

# Spaces are allowed between parentheses: torch writes two overlapped ops as (0F1;1B0)OVERLAP_F_B.
_CELL = re.compile(r'\([^)]*\)[^\s,"]*|[^\s,"]+')
_DS_EXT_CELL = re.compile(r"([FBIWR])(\d{1,9})(?:\.(\d{1,6}))?@(\d{1,9})")
_TORCH_CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_OVERLAP = re.compile(r"\(([^)]*)\)OVERLAP_F_B")
# Instructions that torch inserts between the ops; lowering inserts its own.
_IGNORED = re.compile(r"\d{1,9}(UNSHARD|RESHARD|(WAIT_)?(REDUCE_GRAD|SEND_[FB])|RECV_[FB])\d{0,9}")


def dumps(timetable: Timetable) -> str:
    """Return the timetable as text, the inverse of :func:`loads`."""
    require_written_kinds(timetable)
    name = timetable.schedule
    if not name.isprintable():
        raise ScheduleError(f"timetable: the name of the schedule must be printable (got {name!r}).")
    pipes = ";".join(",".join(map(str, pipe)) for pipe in timetable.placement.pipes)
    has_slices = timetable.slices > 1 or any(op.slice for order in timetable.orders for op in order)
    parts = f" slices={timetable.slices}" if has_slices else ""
    sizes = f"micro_batches={timetable.micro_batches}{parts} pipes={pipes}"
    header = f"{_HEADER} schedule={shlex.quote(name)} {sizes}"
    forward = timetable.placement.forward
    if forward is not None:
        header += f" forward={','.join(map(str, forward.devices))}:{forward.merged}:{forward.slowdown!r}"
    if HEAD_PART in timetable.placement.stage_kinds:
        header += " head=true"
    orders = (", ".join(map(str, order)) or _WAIT for order in timetable.orders)
    return "\n".join((header, *orders)) + "\n"


def require_written_kinds(timetable: Timetable) -> None:
    """Raise ScheduleError for stages of kinds that files do not contain."""
    unknown = timetable.placement.stage_kinds - {BODY, HEAD_PART, HEAD_LOSS}
    if unknown:
        names = ", ".join(sorted(kind.name for kind in unknown))
        raise ScheduleError(
            f"{timetable.schedule}: files have stages of layers and parts of a head only (got {names}). Keep the "
            f"timetable as a Python object."
        )


def torch_csv(timetable: Timetable) -> str:
    """Return the compute-only CSV of ``torch.distributed.pipelining``, with cells such as ``2F0`` and ``2B0``.

    Each op takes one step. An empty cell is a step in which the device waits.
    """
    if timetable.slices > 1:
        raise ScheduleError(
            f"{timetable.schedule}: torch's CSV has no slices of sequences (got {timetable.slices}). Write a timetable "
            f"file instead (-o FILE.txt)."
        )
    if parts := timetable.placement.stages_of_kind(HEAD_PART):
        raise ScheduleError(
            f"{timetable.schedule}: torch's CSV has no parts of the head (got {len(parts)}). Write a timetable file "
            f"instead (-o FILE.txt)."
        )
    if timetable.placement.replicas > 1 or timetable.placement.forward_devices:
        raise ScheduleError(
            f"{timetable.schedule}: torch's CSV has one device per stage (got {timetable.placement.copies} copies of "
            f"every stage). Write a timetable file instead (-o FILE.txt)."
        )
    simulate(timetable)
    # Input gradients instead of whole backwards, so that every op takes one step.
    orders = tuple(tuple(map(_one_step, order)) for order in timetable.orders)
    steps = run_orders(Workload(timetable.placement, timetable.micro_batches, Costs(), split=True), orders)
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
class _Position:
    """Line and column in the text, from 1."""

    line: int
    column: int
    source: str

    def error(self, sentence: str) -> ScheduleError:
        return ScheduleError(f"{self.source}, line {self.line}, column {self.column}: {sentence}")


def loads(text: str, name: str = "timetable", source: str = "timetable") -> Timetable:
    """Return the timetable of ``text``, without checking that it can run.

    ``name`` is that of the schedule if the header has none; ``source`` is the origin of the text, for errors.
    """
    header: dict[str, str] = {}
    orders: list[tuple[Op, ...]] = []
    positions: list[list[_Position]] = []
    header_position = _Position(1, 1, source)
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        if line.split()[:2] == _HEADER.split():
            header_position = _Position(number, 1, source)
            header = _read_header(line, header_position)
        elif line.strip() and not line.lstrip().startswith("#"):
            cells = list(_read_cells(line, number, source))
            orders.append(tuple(op for op, _ in cells))
            positions.append([position for _, position in cells])
    if not any(orders):
        raise header_position.error("no ops. Write one line per device with cells such as F3@1 or 1F3.")
    for key in ("forward", "head"):
        if key in header and "pipes" not in header:
            raise header_position.error(f"{key}=... also needs pipes=..., the devices of the stages.")
    if "pipes" in header:
        forward = _read_forward(header.get("forward"), header_position)
        placement = _read_pipes(header["pipes"], len(orders), header_position, forward)
    else:
        placement = _infer_placement(orders, positions)
    schedule = header.get("schedule", name)
    if "head" in header:
        if header["head"] != "true":
            raise header_position.error(f"head must be true (got {header['head']}).")
        placement = placement.with_head_parts(schedule)
    highest = 1 + max(op.micro_batch for order in orders for op in order)
    micro_batches = highest
    if "micro_batches" in header:
        micro_batches = _read_count("micro_batches", header["micro_batches"], header_position)
    slices = 1 + max(op.slice for order in orders for op in order)
    if "slices" in header:
        slices = _read_count("slices", header["slices"], header_position)
    if max(highest, micro_batches) > _MAX_MICRO_BATCHES:
        raise header_position.error(
            f"too many micro-batches (got {max(highest, micro_batches)}). Use at most {_MAX_MICRO_BATCHES}."
        )
    check_size(schedule, placement, micro_batches, slices)
    return Timetable(schedule, placement, micro_batches, tuple(orders), slices)


def _read_header(line: str, position: _Position) -> dict[str, str]:
    try:
        words = shlex.split(line)[2:]
    except ValueError as error:
        raise position.error(f"invalid header: {str(error).lower()}.") from None
    header: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in _KEYS or not equals or key in header:
            known = ", ".join(f"{key}=..." for key in _KEYS)
            raise position.error(f"invalid header (got {word!r}). Use {known}, each at most once.")
        header[key] = value
    return header


def _read_count(key: str, value: str, position: _Position) -> int:
    if not re.fullmatch(r"\d{1,9}", value) or int(value) < 1:
        raise position.error(f"{key} must be at least 1 (got {value}).")
    return int(value)


def _read_forward(value: str | None, position: _Position) -> ForwardPipe | None:
    """Return the forward devices described by ``0,2:1:1.0``: device of every stage, merged ranks, slowdown."""
    if value is None:
        return None
    match = re.fullmatch(
        r"(\d{1,9}(?:,\d{1,9})*):(\d{1,9}):(\d{1,9}(?:\.\d{1,17})?(?:e[-+]?\d{1,3})?)", value
    )
    if match is None or int(match[2]) < 1 or not 0 <= float(match[3]) < math.inf:
        raise position.error(
            f"forward must be devices, merged ranks and slowdown (got {value}). Example: 0,2:1:1.0."
        )
    return ForwardPipe(tuple(map(int, match[1].split(","))), int(match[2]), float(match[3]))


def _read_pipes(value: str, lines: int, position: _Position, forward: ForwardPipe | None) -> Placement:
    """Return the placement described by ``0,1,1,0;1,0,0,1``: the device of every stage, pipe by pipe."""
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*(;\d{1,9}(,\d{1,9})*)*", value):
        raise position.error(
            f"pipes must list the device of every stage, pipe by pipe (got {value}). Example: 0,1,1,0;1,0,0,1."
        )
    placement = Placement(tuple(tuple(map(int, pipe.split(","))) for pipe in value.split(";")), forward)
    lengths = sorted({len(pipe) for pipe in (*placement.pipes, placement.forward_devices) if pipe})
    if len(lengths) > 1:
        raise position.error(
            f"pipes={value}: all pipes need the same number of stages (got {lengths[0]} and {lengths[-1]})."
        )
    if placement.num_devices != lines:
        raise position.error(
            f"pipes={value} has {placement.num_devices} devices (got {lines} lines of ops). Write one line per device, "
            f"with {_WAIT} for a device without ops."
        )
    return placement


def _infer_placement(orders: list[tuple[Op, ...]], positions: list[list[_Position]]) -> Placement:
    owners: dict[int, int] = {}
    cells = [list(zip(*row, strict=True)) for row in zip(orders, positions, strict=True)]
    for device, row in enumerate(cells):
        for op, position in row:
            if owners.setdefault(op.stage, device) != device:
                raise position.error(
                    f"{op} is on device {device}, but stage {op.stage} is on device {owners[op.stage]}. Put each "
                    f"stage on one device, or add a header such as {_HEADER} pipes=0,1;1,0."
                )
    missing = next(stage for stage in range(len(owners) + 1) if stage not in owners)
    if missing < len(owners):
        position = next(position for row in cells for op, position in row if op.stage > missing)
        raise position.error(f"no ops for stage {missing}. Stages are numbered from 0 without gaps.")
    return Placement((tuple(owners[stage] for stage in range(len(owners))),))


def _read_cells(line: str, number: int, source: str) -> Iterator[tuple[Op, _Position]]:
    for cell in _CELL.finditer(line):
        position = _Position(number, cell.start() + 1, source)
        for op in _read_cell(cell.group(), position):
            yield op, position


def _read_cell(cell: str, position: _Position) -> list[Op]:
    """Return the ops of a cell. Only OVERLAP_F_B has several."""
    if match := _DS_EXT_CELL.fullmatch(cell):
        return [Op(match[1], int(match[2]), int(match[4]), int(match[3] or 0))]
    if match := _TORCH_CELL.fullmatch(cell):
        return [Op(match[2], int(match[3]), int(match[1]))]
    if match := _OVERLAP.fullmatch(cell):
        return [op for part in match[1].split(";") for op in _read_cell(part.strip(), position)]
    if cell == _WAIT or _IGNORED.fullmatch(cell):
        return []
    kinds = ", ".join((FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, RECOMPUTE))
    raise position.error(
        f"not an op (got {cell!r}). Use F3@1 or 1F3 (kinds {kinds}; micro-batch 3, stage 1), or {_WAIT} for a wait."
    )
