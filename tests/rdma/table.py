"""Scenarios that run within one guest and between two guests."""

from __future__ import annotations

from collections.abc import Callable

from tests.rdma import faults, scenarios
from tests.rdma.peer import Context

ONE_GUEST: tuple[Callable[[Context], None], ...] = (
    scenarios.itself,
    scenarios.probed,
    scenarios.chosen,
    faults.damaged_greetings,
    scenarios.all_types,
    scenarios.no_credits,
    faults.aborted,
    faults.killed_receiver,
    faults.killed_sender,
    faults.late_peer,
    faults.wrong_version,
    faults.small_memlock,
    faults.memlock_later,
    scenarios.with_pyverbs,
    scenarios.forked_child,
    scenarios.many_links,
    scenarios.random_order,
)
TWO_GUESTS: tuple[Callable[[Context], None], ...] = (
    scenarios.chosen,
    scenarios.probed,
    scenarios.all_types,
    scenarios.slight_loss,
    faults.heavy_loss,
    faults.killed_receiver,
    faults.link_down,
)
