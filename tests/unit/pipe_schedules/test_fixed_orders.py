"""The loop of fixed orders gives the run of the event loop, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import SCHEDULES, Timetable, get_schedule
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.events import Workload
from ds_ext.pipe_schedules.ports import Ports
from ds_ext.pipe_schedules.simulation import run_orders, simulate
from tests.selection import select

SIZES = [(2, 4), (4, 8), (4, 16), (8, 16)]
STATIC = sorted(set(SCHEDULES) - {"dpp", "fbd"})


def timetable_of(name: str, devices: int, micro_batches: int, slices: int, head: bool) -> Timetable | None:
    schedule = get_schedule(name).dividing_head(head)
    try:
        return schedule.timetable(devices, micro_batches, {}, Costs(head=0.1 if head else 0.0), slices)
    except ScheduleError:
        return None  # these sizes are refused


def costs_of(timetable: Timetable, random: Random, ties: bool) -> Costs:
    """Return random times; with ``ties``, many ops and messages end at the same time, or take none."""

    def draw() -> float:
        return random.randint(0, 2) / 4 if ties else random.random()

    devices = range(timetable.placement.num_devices)
    links = {(a, b): draw() for a in devices for b in devices if a != b}
    stages = tuple(1 + draw() for _ in range(timetable.placement.stages))
    slices = tuple(1 + draw() for _ in range(timetable.slices)) if timetable.slices > 1 else None
    head: Any = 0.1 if timetable.placement.head_parts else 0.0
    return Costs(
        random.choice((0.0, 1.0)) if ties else 1.0,
        random.choice((0.0, 1.0, 2.0)),
        random.choice((0.0, 1.0)),
        stages=stages,
        links=links,
        slices=slices,
        head=head,
    )


def ports_of(timetable: Timetable, random: Random) -> Ports:
    """Return the ports of hosts of two devices, which collectives use too."""
    devices = range(timetable.placement.num_devices)
    links = {
        (a, b): (0.01, (a // 2, ~(b // 2)), random.choice((1, 2)))
        for a in devices
        for b in devices
        if a // 2 != b // 2
    }
    return Ports(links, {0: [(2.0, 3.5)], ~1: [(1.0, 4.0), (6.0, 9.0)]})


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize(("slices", "head"), [(1, False), (2, False), (1, True), (2, True)])
def test_run_of_the_event_loop(name: str, slices: int, head: bool) -> None:
    random, compared = Random(f"{name} {slices} {head}"), 0
    for devices, micro_batches in select(SIZES, SIZES[:3]):
        timetable = timetable_of(name, devices, micro_batches, slices, head)
        for ties in (False, True, True, True) if timetable is not None else ():
            assert timetable is not None
            costs, dependencies = costs_of(timetable, random, ties), timetable.dependencies
            workload = Workload(
                timetable.placement,
                micro_batches,
                costs,
                dependencies.split,
                trains=dependencies.trains,
                slices=slices,
            )
            first, last = timetable.orders[0][0], timetable.orders[-1][0]
            for releases in ({}, {first: 3.0, last: 5.25}):
                for ports in (None, ports_of(timetable, random)):
                    expected = run_orders(workload, timetable.orders, releases, ports)
                    assert timetable.fixed_orders.run(workload, releases, ports) == expected
                    compared += 1
    assert compared or slices > 1


def test_jittered_times_are_those_of_the_event_loop() -> None:
    timetable = get_schedule("zb_v").timetable(4, 8)
    costs = Costs(comm=0.1, jitter=0.3, seed=2)
    workload = Workload(timetable.placement, 8, costs, True, jittered=True)
    assert simulate(timetable, costs).spans == run_orders(workload, timetable.orders).spans


def test_a_deadlock_has_no_run() -> None:
    timetable = get_schedule("1f1b").timetable(2, 4)
    first, second, *others = timetable.orders[1]
    wrong = replace(timetable, orders=(timetable.orders[0], (second, first, *others)))
    assert wrong.fixed_orders.run(Workload(wrong.placement, 4, Costs(), False), {}, None) is None
    with pytest.raises(ScheduleError, match="waits for"):
        simulate(wrong)
