"""The solver proves bounds: no schedule is below its own, and the optimal schedules meet it."""

from __future__ import annotations

import re
import sys

import pytest

from ds_ext.__main__ import main
from ds_ext.errors import ConfigError, ScheduleError
from ds_ext.pipe_schedules import SCHEDULES, Op, Timetable, get_schedule
from ds_ext.pipe_schedules.checks.program import check
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.events import Workload
from ds_ext.pipe_schedules.list_scheduling.search import lower_bound
from ds_ext.pipe_schedules.lowering import lower
from ds_ext.pipe_schedules.placement import linear
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.planner.solver import optimise

ODD = Costs(1, 1.2, 0.8, 0.1)


@pytest.mark.parametrize("costs", [Costs(), ODD], ids=["equal", "odd"])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_no_schedule_is_below_the_bound(name: str, costs: Costs) -> None:
    given = get_schedule(name).timetable(2, 4, {}, costs)
    optimum = optimise(given, costs)
    assert optimum.given == simulate(given, costs).makespan
    assert optimum.proven
    assert optimum.makespan == simulate(optimum.timetable, costs).makespan <= optimum.given
    assert [sorted(order) for order in optimum.timetable.orders] == [sorted(order) for order in given.orders]
    check(lower(optimum.timetable))


@pytest.mark.parametrize(
    ("name", "devices", "micro_batches", "costs", "limit"),
    [
        ("bitpipe_zb", 4, 4, Costs(), 4),
        ("bitpipe_zb", 4, 3, Costs(), 4),
        ("bitpipe_zb", 4, 5, Costs(), 4),
        ("bitpipe_zb", 4, 4, Costs(1, 1.2, 0.8), 4),
        ("bitpipe_zb", 4, 4, Costs(comm=0.2), 6),
        ("zb_h1", 3, 5, Costs(), 3),
        ("zb_v", 3, 3, Costs(1, 1.2, 0.8), 3),
        ("1f1b", 4, 4, Costs(), None),
        ("bitpipe", 4, 4, Costs(), None),
    ],
)
def test_optimal_schedules(
    name: str, devices: int, micro_batches: int, costs: Costs, limit: float | None
) -> None:
    """The limit is the schedule's own number of live activations."""
    given = get_schedule(name).timetable(devices, micro_batches, {}, costs)
    optimum = optimise(given, costs, max_activations=limit)
    assert optimum.proven and optimum.makespan == pytest.approx(optimum.given, rel=1e-9)


def test_a_bad_order_improves() -> None:
    """GPipe with two live activations per device becomes as fast as 1F1B."""
    gpipe = get_schedule("gpipe").timetable(2, 4)
    optimum = optimise(gpipe, max_activations=2)
    assert optimum.proven and optimum.makespan == simulate(get_schedule("1f1b").timetable(2, 4)).makespan
    assert max(simulate(optimum.timetable).peak_activations) <= 2
    first_last = Timetable("odd", linear(2), 2, (
        (Op("F", 1, 0), Op("F", 0, 0), Op("B", 0, 0), Op("B", 1, 0)),
        (Op("F", 1, 1), Op("B", 1, 1), Op("F", 0, 1), Op("B", 0, 1)),
    ))  # fmt: skip
    assert optimise(first_last).makespan < simulate(first_last).makespan


def test_impossible_requests() -> None:
    with pytest.raises(ScheduleError, match=r"^1f1b: .*0\.5 activations .*infeasible"):
        optimise(get_schedule("1f1b").timetable(2, 2), max_activations=0.5)
    with pytest.raises(ScheduleError, match=r"^costs: .*got a duration of 0"):
        optimise(get_schedule("1f1b").timetable(2, 2), Costs(0, 0, 0))


def test_a_missing_solver_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ConfigError, match=r"pip install 'ds_ext\[solve\]'"):
        optimise(get_schedule("1f1b").timetable(2, 2))


def test_less_memory_costs_time(capsys: pytest.CaptureFixture[str]) -> None:
    """The bound of the placement is below the bound with the limit of activations."""
    given = get_schedule("bitpipe_zb").timetable(4, 4)
    least = lower_bound(Workload(given.placement, 4, Costs(), split=True))
    optimum = optimise(given, max_activations=2)
    assert (least, optimum.given, optimum.bound, optimum.makespan) == (12.5, 12.5, 15.5, 15.5)
    words = "bitpipe_zb --num-devices 4 --micro-batches 4 --max-activations 2"
    assert main(["optimise", *words.split()]) == 0
    out = capsys.readouterr().out
    printed = [float(number) for number in re.findall(r"^  \D+?([\d.]+)", out, re.MULTILINE)]
    assert printed == [12.5, 15.5, 15.5]
