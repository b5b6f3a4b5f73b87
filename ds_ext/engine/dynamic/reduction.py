"""Eager gradient synchronization where nobody knows beforehand which backward of a stage is the last."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ...pipe_schedules.ops import BACKWARD, BACKWARD_WEIGHT
from ..grad_sync import EagerReduction


class DynamicReduction(EagerReduction):
    """Starts a stage's reduction when the device has counted all its backwards, and not before those agreed on earlier.

    All ranks of a collective start their reductions in one order: that of a run under the costs of the JSON, which they
    all know.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        ops = engine.plan.timetable.ranks[engine.module.device_index]
        self._backwards = Counter(op.stage for op in ops if op.kind in (BACKWARD, BACKWARD_WEIGHT))
        self._order = [stage for stages in self._starts.values() for stage in stages]
        self._left, self._waiting = Counter(self._backwards), list(self._order)

    def after(self, stage: int, micro_batch: int) -> None:
        """A backward of ``stage`` is done: start what is complete now."""
        self._left[stage] -= 1
        while self._waiting and not self._left[self._waiting[0]]:
            self._start(self._waiting.pop(0))

    def finish(self) -> None:
        """Wait for all reductions, and hand the averages to DeepSpeed's optimizer."""
        assert not self._waiting, "every backward of the step has been counted"
        super().finish()
        self._left, self._waiting = Counter(self._backwards), list(self._order)
