"""Lower bounds from the messages of a port hold for every step."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ds_ext.errors import ScheduleError
from ds_ext.parallel.crossing import Traffic, rank_orders
from ds_ext.parallel.hosts import Hosts
from ds_ext.parallel.layout import ParallelLayout
from ds_ext.parallel.network import HOST_PORTS, RANK_PORTS, Link, Network
from ds_ext.pipe_schedules import SCHEDULES
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.planner.step_time import NetworkStep
from tests.selection import select


def random_step(numbers: random.Random) -> tuple[NetworkStep, ParallelLayout] | None:
    """Return a step without collectives; None for sizes that the schedule refuses."""
    name, devices = numbers.choice(sorted(SCHEDULES)), numbers.choice([2, 4, 8])
    divides_head = numbers.random() < 0.6
    schedule = SCHEDULES[name].dividing_head(divides_head)
    costs = Costs(head=0.3 * divides_head, jitter=numbers.choice([0.0, 0.0, 0.1]))
    slices = numbers.choice([1, 2]) if schedule.has_slices else 1
    try:
        placement = schedule.placement(devices, {})
        micro_batches = numbers.choice([1, 2, 4]) * devices
        timetable = schedule.timetable(devices, micro_batches, {}, costs.fit(placement), slices)
    except ScheduleError:
        return None
    if placement.forward_devices:
        return None
    layout = ParallelLayout(placement, numbers.choice([1, 2]), numbers.choice([1, 2]))
    layout = replace(layout, rank_order=numbers.choice(rank_orders(layout)))
    slots = numbers.choice([n for n in (1, 2, 4) if n <= layout.world_size])
    network = Network(
        Hosts((slots,) * (layout.world_size // slots)),
        Link(1e9, 1e-3 * numbers.random()),
        Link(10 ** numbers.uniform(0, 3), 1e-2 * numbers.random()),
        ports=numbers.choice([RANK_PORTS, HOST_PORTS]),
    )
    volumes = Traffic(100.0, (), (0.0,) * devices, stages=(0.0,) * placement.stages)
    reductions = tuple({} for _ in range(devices))
    return NetworkStep(timetable, costs, network, volumes, 1.0, reductions), layout


@pytest.mark.parametrize("seed", select([*range(12)], [*range(4)]))
def test_no_step_is_shorter_than_the_messages_of_its_busiest_port(seed: int) -> None:
    numbers, shares = random.Random(seed), list[float]()
    while len(shares) < 40:
        if (drawn := random_step(numbers)) is None:
            continue
        job, layout = drawn
        step, least = job.time(layout), job.messages.least_time(layout)
        assert least <= step.makespan_s * (1 + 1e-9)
        assert least <= job.messages.most_time * (1 + 1e-9)
        assert job.best([layout])[1].step_s == step.step_s
        shares.append(least / step.makespan_s)
    assert max(shares) > 0.8, "some steps are limited by a port"


@pytest.mark.parametrize("seed", range(4))
def test_the_best_rank_order_is_that_of_all_steps(seed: int) -> None:
    numbers, compared = random.Random(seed), 0
    while compared < 10:
        if (drawn := random_step(numbers)) is None:
            continue
        job, layout = drawn
        layouts = [replace(layout, rank_order=order) for order in rank_orders(layout)]
        steps = [float(f"{job.time(each).step_s:.7g}") for each in layouts]
        index, step = job.best(layouts)
        assert index == steps.index(min(steps))
        assert float(f"{step.step_s:.7g}") == min(steps)
        makespans = [job.time(each).makespan_s for each in layouts]
        assert job.least_makespan(layouts) == pytest.approx(min(makespans), rel=1e-9)
        compared += 1
