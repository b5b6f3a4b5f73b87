"""Device x step grid, for errors and for timetables that are too long for a grid over time."""

from __future__ import annotations

from ..timetables import Timetable

_AROUND = 6  # steps on each side of an arrow


def order_grid(timetable: Timetable, *, device: int | None = None, step: int | None = None) -> str:
    """Return the device x step grid; with ``step``, only a window around one op, marked with an arrow.

    The arrow is at ``timetable.orders[device][step]``; without ``step``, at the end of the row.
    """
    length = max((len(order) for order in timetable.orders), default=0)
    first, last = 0, length
    if step is not None:
        first, last = max(step - _AROUND, 0), min(step + _AROUND + 1, length)
    cell = 2 + max((len(str(op)) for order in timetable.orders for op in order[first:last]), default=4)
    margin = len(f"device {len(timetable.orders) - 1}  ")
    head = "step".ljust(margin) + "".join(str(i).ljust(cell) for i in range(first, last))
    lines = [head.rstrip()]
    for row_device, order in enumerate(timetable.orders):
        row = f"device {row_device}".ljust(margin) + "".join(str(op).ljust(cell) for op in order[first:last])
        if row_device != device:
            lines.append(row.rstrip())
            continue
        lines.append(row.ljust(len(head)).rstrip() + "   <-- ERROR HERE")
        if step is not None:
            lines.append(" " * (margin + (step - first) * cell) + "^" * len(str(order[step])))
    if first > 0 or last < length:
        lines.append(" " * margin + f"(steps {first}..{last - 1} of {length})")
    return "\n".join(lines)
