"""What computations and messages cost: the numbers that generators, the simulator and the planner share."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ..errors import ScheduleError
from .ops import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from .placement import Placement


@dataclass(frozen=True)
class Costs:
    """Times of one D-th of the model: forward, input gradient, weight gradient; and of one message."""

    f: float = 1.0
    b: float = 1.0
    w: float = 1.0
    comm: float = 0.0

    def of(self, kind: str) -> float:
        """Cost of one computation of that kind on one D-th of the model."""
        whole = {FORWARD: self.f, BACKWARD: self.b + self.w, BACKWARD_INPUT: self.b, BACKWARD_WEIGHT: self.w}
        return whole[kind]

    def durations(self, placement: Placement) -> dict[str, tuple[float, ...]]:
        """Kind of op -> its time at every stage; a stage costs its share of the model."""
        share = placement.ranks / placement.stages
        return {
            kind: (self.of(kind) * share,) * placement.stages
            for kind in (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
        }

    def delay(self, sender: int, receiver: int) -> float:
        """Time of a message between two devices; 0 on one device."""
        return 0.0 if sender == receiver else self.comm


def parse_costs(text: str) -> Costs:
    """``"f=1,b=1,w=1,comm=0"`` -> Costs. Raises ScheduleError."""
    values: dict[str, float] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, _, value = part.partition("=")
        try:
            values[key.strip()] = float(value)
        except ValueError:
            raise ScheduleError(f"costs: {part!r} is not of the form f=1.5.") from None
    known = [field.name for field in fields(Costs)]
    if not set(values) <= set(known) or not all(math.isfinite(v) and v >= 0 for v in values.values()):
        raise ScheduleError(
            f"costs are finite and not negative: {', '.join(known)} (times for one D-th of the model); got {text!r}."
        )
    return Costs(**values)
