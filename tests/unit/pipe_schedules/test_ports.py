"""Messages that share network ports with other messages and with collectives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ext.pipe_schedules import get_schedule
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.ports import Ports
from ds_ext.pipe_schedules.simulation import simulate

LATENCY = 1.0
LINKS = {
    (0, 1): (LATENCY, (0, ~1), 1),
    (0, 2): (LATENCY, (0, ~2), 1),
    (1, 0): (LATENCY, (1, ~0), 1),
    (2, 1): (LATENCY, (2, ~1), 1),
}


@pytest.mark.parametrize(
    ("second", "arrival"),
    [
        ((0, 2), 5.0),  # the same sender
        ((2, 1), 5.0),  # the same receiver
        ((1, 0), 3.0),  # ports send and receive at the same time
        ((2, 0), 3.0),  # inside a host
    ],
)
def test_a_message_waits_for_earlier_ones_of_its_ports(second: tuple[int, int], arrival: float) -> None:
    ports, free = Ports(LINKS, {}), {}
    assert ports.arrival(0.0, (0, 1), 3.0, free) == 3.0
    assert ports.arrival(0.0, second, 3.0, free) == arrival


def test_pipelines_take_turns_on_a_port() -> None:
    """The messages of two others follow each message."""
    ports, free = Ports({(0, 1): (LATENCY, (0, ~1), 3)}, {}), {}
    assert [ports.arrival(now, (0, 1), 3.0, free) for now in (0.0, 1.0, 20.0)] == [3.0, 9.0, 23.0]


@pytest.mark.parametrize(
    ("collectives", "arrival"),
    [
        ([(0.0, 4.0)], 5.0),
        ([(0.0, 9.0)], 5.0),
        ([(0.0, 1.0)], 3.5),
        ([(1.0, 2.0)], 3.5),
        ([(0.0, 1.0), (1.0, 2.0)], 4.0),
        ([(0.5, 1.0), (2.0, 2.5)], 3.5),
        ([(2.0, 3.0)], 3.0),
    ],
)
@pytest.mark.parametrize("port", [0, ~1])
def test_a_message_beside_a_collective_has_half_the_rate(
    collectives: list[tuple[float, float]], arrival: float, port: int
) -> None:
    """It takes 2 without its latency of 1."""
    assert Ports(LINKS, {port: collectives}).arrival(0.0, (0, 1), 3.0, {}) == pytest.approx(arrival)


TIMES = st.floats(0.0, 100.0)


@given(TIMES, TIMES, st.lists(st.tuples(TIMES, TIMES).map(sorted), max_size=5))
def test_a_message_takes_at_most_twice_as_long(now: float, transfer: float, spans: list[list[float]]) -> None:
    busy = {0: [(start, stop) for start, stop in spans]}
    arrival = Ports(LINKS, busy).arrival(now, (0, 1), LATENCY + transfer, {})
    assert now + LATENCY + transfer - 1e-9 <= arrival <= now + LATENCY + 2 * transfer + 1e-9


@pytest.mark.parametrize(("name", "delayed"), [("gpipe", False), ("1f1b", False), ("bitpipe", True)])
def test_messages_of_two_pipes_share_ports(name: str, delayed: bool) -> None:
    """gpipe and 1f1b send to one side at a time as long as a message takes less than its op."""
    timetable = get_schedule(name).timetable(4, 8)
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    costs = Costs(links=dict.fromkeys(pairs, 0.9))
    ports = Ports({(a, b): (0.0, (a, ~b), 1) for a, b in pairs}, {})
    alone, shared = simulate(timetable, costs), simulate(timetable, costs, ports=ports)
    assert (shared.makespan > alone.makespan + 0.5) == delayed
