"""The device x step grid, which errors carry and which stands in for a grid over time that would be too long."""

from __future__ import annotations

from ..timetables import Timetable


def order_grid(
    timetable: Timetable, *, rank: int | None = None, step: int | None = None, around: int = 6
) -> str:
    """The rank x step grid, with ``rank`` and ``step`` a window around that op with an arrow at it.

    Args:
        rank, step: the op to point at, ``timetable.orders[rank][step]``; a rank alone gets the arrow at its end.
        around: how many steps to show on each side of it.
    """
    length = max((len(order) for order in timetable.orders), default=0)
    first, last = 0, length
    if step is not None:
        first, last = max(step - around, 0), min(step + around + 1, length)
    cell = 2 + max((len(str(op)) for order in timetable.orders for op in order[first:last]), default=4)
    margin = len(f"rank {len(timetable.orders) - 1}  ")
    head = "step".ljust(margin) + "".join(str(i).ljust(cell) for i in range(first, last))
    lines = [head.rstrip()]
    for r, order in enumerate(timetable.orders):
        row = f"rank {r}".ljust(margin) + "".join(str(op).ljust(cell) for op in order[first:last])
        if r != rank:
            lines.append(row.rstrip())
            continue
        lines.append(row.ljust(len(head)).rstrip() + "   <-- ERROR HERE")
        if step is not None:
            lines.append(" " * (margin + (step - first) * cell) + "^" * len(str(order[step])))
    if first > 0 or last < length:
        lines.append(" " * margin + f"(steps {first}..{last - 1} of {length})")
    return "\n".join(lines)
