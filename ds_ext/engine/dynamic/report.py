"""Measures what a dynamic schedule meets, and tells rank 0 from time to time who was slow."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from ...parallel.layout import ParallelLayout
from ...pipe_schedules import Op, Timetable
from ...pipe_schedules.dpp.report import Measured, Observer, Report, Sums
from ...pipe_schedules.methods.dpp import run
from ...pipe_schedules.registry import DynamicRules
from .messages import Arrival

logger = logging.getLogger(__name__)


class Reporter:
    """What this rank has measured since the last report.

    Args:
        rules: by what devices decide.
        plan: the order to compare with.
        every: steps between two reports; 0: none.

    Attributes:
        last: the last report, on rank 0.
    """

    def __init__(self, rules: DynamicRules, plan: Timetable, every: int) -> None:
        self.rules, self.every = rules, every
        self.last: Report | None = None
        self._observer = Observer(plan)
        self._steps = 0
        self._computed, self._waited = Sums(), Sums()

    def computed(self, op: Op, seconds: float) -> None:
        """A computation with its sends took that long."""
        if self.every:
            self._computed.add((op.kind, op.stage), seconds)

    def arrived(self, arrivals: Sequence[Arrival]) -> None:
        """Messages that this rank waited for; of others nobody knows when they came."""
        for arrival in arrivals if self.every else ():
            if arrival.seconds is not None:
                self._waited.add(arrival.device, arrival.seconds)

    def end_step(self, ran: Sequence[Op], layout: ParallelLayout) -> None:
        """A step is over; after every so many rank 0 logs a report. A collective call of all ranks then."""
        self._steps += 1
        if not self.every or self._steps % self.every:
            return
        mine = list(ran), self._computed, self._waited, platform.node()
        self._computed, self._waited = Sums(), Sums()
        everyone = [mine] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, everyone)
        if everyone is None:
            return
        # The first pipeline group speaks for all: the others have the same stages on other ranks.
        ranks = [layout.rank(device, 0, 0) for device in range(layout.placement.ranks)]
        orders, computed, waited, hosts = zip(*(everyone[rank] for rank in ranks), strict=True)
        self.last = self._report(Measured.of(computed, waited, hosts), orders, ranks)
        # Who has asked for reports gets them, also where nobody has set up logging; as a warning it says what it is.
        level = logging.INFO if logger.isEnabledFor(logging.INFO) else logging.WARNING
        first = self._steps - self.every + 1
        logger.log(level, "report of steps %d to %d, as asked for: %s", first, self._steps, self.last)

    def _report(self, now: Measured, orders: Sequence[Sequence[Op]], ranks: Sequence[int]) -> Report:
        plan = self._observer.plan
        ran = replace(plan, ranks=tuple(map(tuple, orders)))
        expected = replace(plan, ranks=run(self.rules, now.costs(plan.placement, usual=True)))
        return self._observer.report(now, ran, expected, ranks)
