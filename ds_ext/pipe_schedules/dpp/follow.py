"""Following a plan while messages are on time, and going round what is late.

A device computes its next planned op if that can run. If its inputs are late, it takes the first of the following
``window`` ops that can run, and comes back to the late one as soon as it is free. In time the order is the plan's, bit
for bit; a plan is better than any rule that only looks at what is there, as long as it knows the costs.

**No deadlock**, whatever is late: take a valid run of the plan, and of the ops that are left the one that starts first
in it. What it needs started before, so it is done, and on its device no planned op is left before it: it is the next
one there, and runs as soon as its inputs have arrived. **Memory**: at most ``window`` forwards are ahead of the plan.
**Bit for bit**: gradients that are added up can be kept in the plan's order; the one that comes first is never held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import ScheduleError
from ..ops import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Op, Timetable
from ..placement import Placement
from ..simulate import peak_stages


@dataclass(frozen=True)
class FollowRules:
    """A plan, and how far a device may depart from it.

    Args:
        plan: a timetable whose backwards are all whole or all split.
        window: how many planned ops a device may look ahead, beside the next one.
        ordered: gradients of a stage are added in the plan's order, so that runs are equal bit for bit.

    Raises:
        ScheduleError: the plan splits some backwards and others not.
    """

    plan: Timetable
    window: int
    ordered: bool = False

    def __post_init__(self) -> None:
        split = len(self.plan.split_backwards)
        if split not in (0, self.placement.stages * self.micro_batches):
            raise ScheduleError(
                f"dpp: the plan {self.plan.schedule} splits {split} of its "
                f"{self.placement.stages * self.micro_batches} backwards; a plan to follow splits all or none."
            )

    @property
    def placement(self) -> Placement:
        """The plan's."""
        return self.plan.placement

    @property
    def micro_batches(self) -> int:
        """The plan's."""
        return self.plan.micro_batches

    @property
    def split(self) -> bool:
        """Whether backwards are split into input and weight gradient."""
        return bool(self.plan.split_backwards)

    def device(self, device: int) -> Follower:
        """The policy object of a device for one step."""
        return Follower(self.plan.ranks[device], self.window, self._turns(device) if self.ordered else {})

    def _turns(self, device: int) -> dict[Op, tuple[str, int]]:
        """Gradient -> what it takes turns in: the like of its stage. The last one may share weights with the first."""
        last = self.placement.stages - 1
        gradients = (op for op in self.plan.ranks[device] if op.kind != FORWARD)
        return {op: (op.kind, 0 if op.stage == last else op.stage) for op in gradients}

    def entering(self, device: int) -> list[Op]:
        """The first forwards of the micro-batches that enter at ``device``."""
        return [op for op in self.plan.ranks[device] if op.kind == FORWARD and op.stage == 0]

    def count(self, device: int) -> int:
        """How many ops ``device`` computes in a step."""
        return len(self.plan.ranks[device])

    def room(self, device: int) -> int:
        """Stages of micro-batches whose activations ``device`` keeps at most."""
        order = self.plan.ranks[device]
        return min(peak_stages(order) + self.window, sum(op.kind == FORWARD for op in order))


class Follower:
    """One device in one step: the next planned op that can run, of the first ``window`` and one that are left.

    Ops with the same of ``turns`` do not overtake each other.
    """

    def __init__(self, order: Sequence[Op], window: int, turns: Mapping[Op, object]) -> None:
        self.window, self._turns = window, turns
        self.left = list(order)
        self.ready: set[Op] = set()
        self.pulled = 0

    def arrive(self, op: Op) -> None:
        """The inputs of ``op`` are here."""
        self.ready.add(op)

    def choose(self) -> Op | None:
        """The op to compute now; None to wait for an arrival."""
        late: set[object] = set()
        for place, op in enumerate(self.left[: self.window + 1]):
            turn = self._turns.get(op)
            if op in self.ready and turn not in late:
                self.pulled += place > 0
                self.ready.remove(op)
                return self.left.pop(place)
            if turn is not None:
                late.add(turn)
        return None

    def done(self, op: Op) -> None:
        """``op`` has been computed; its weight gradient can be."""
        if op.kind == BACKWARD_INPUT:
            self.ready.add(Op(BACKWARD_WEIGHT, op.stage, op.micro_batch))
