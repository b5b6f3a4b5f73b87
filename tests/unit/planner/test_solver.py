"""The solver as an oracle: no generator beats it, and those that claim to be the best are."""

from __future__ import annotations

import re
import sys

import pytest

from ds_ext.__main__ import main
from ds_ext.errors import ConfigError, ScheduleError
from ds_ext.pipe_schedules import SCHEDULES, Op, Timetable, get_schedule
from ds_ext.pipe_schedules.check.program import check
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.events import Work
from ds_ext.pipe_schedules.list_scheduling.search import lower_bound
from ds_ext.pipe_schedules.lower import lower
from ds_ext.pipe_schedules.placement import linear
from ds_ext.pipe_schedules.simulate import simulate
from ds_ext.planner.solver import optimise

ODD = Costs(1, 1.2, 0.8, 0.1)


@pytest.mark.parametrize("costs", [Costs(), ODD], ids=["equal", "odd"])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_no_generator_beats_the_bound_and_what_is_found_runs(name: str, costs: Costs) -> None:
    made = get_schedule(name).timetable(2, 4, {}, costs)
    optimum = optimise(made, costs, time_limit_s=60)
    assert optimum.given == simulate(made, costs).makespan
    assert optimum.proven
    assert optimum.makespan == simulate(optimum.timetable, costs).makespan <= optimum.given
    assert [sorted(order) for order in optimum.timetable.orders] == [sorted(order) for order in made.orders]
    check(lower(optimum.timetable))


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "costs", "room"),
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
def test_these_are_the_best_orders_there_are(
    name: str, ranks: int, micro_batches: int, costs: Costs, room: float | None
) -> None:
    """With as many activations as they keep themselves."""
    made = get_schedule(name).timetable(ranks, micro_batches, {}, costs)
    optimum = optimise(made, costs, max_activations=room, time_limit_s=60)
    assert optimum.proven and optimum.makespan == pytest.approx(optimum.given, rel=1e-9)


def test_a_bad_order_is_mended() -> None:
    """GPipe's order with room for two activations on a device is as good as it can be made: 1F1B's time, or near."""
    gpipe = get_schedule("gpipe").timetable(2, 4)
    optimum = optimise(gpipe, max_activations=2)
    assert optimum.proven and optimum.makespan == simulate(get_schedule("1f1b").timetable(2, 4)).makespan
    assert max(simulate(optimum.timetable).peak_activations) <= 2
    first_last = Timetable("odd", linear(2), 2, (
        (Op("F", 1, 0), Op("F", 0, 0), Op("B", 0, 0), Op("B", 1, 0)),
        (Op("F", 1, 1), Op("B", 1, 1), Op("F", 0, 1), Op("B", 0, 1)),
    ))  # fmt: skip
    assert optimise(first_last).makespan < simulate(first_last).makespan


def test_what_cannot_be_done_is_said() -> None:
    with pytest.raises(
        ScheduleError,
        match=r"there is no order that keeps at most 0\.5 activations a device \(infeasible: more time cannot help\)",
    ):
        optimise(get_schedule("1f1b").timetable(2, 2), max_activations=0.5)
    with pytest.raises(ScheduleError, match="nothing to optimise"):
        optimise(get_schedule("1f1b").timetable(2, 2), Costs(0, 0, 0))


def test_without_the_solver_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ConfigError, match=r"optimise needs OR-tools.*pip install 'ds_ext\[solve\]'"):
        optimise(get_schedule("1f1b").timetable(2, 2))


def test_less_memory_than_the_schedule_keeps_costs_time(capsys: pytest.CaptureFixture[str]) -> None:
    """The bound of the placement alone is below that of the limit; the optimum is proven long before the time limit."""
    made = get_schedule("bitpipe_zb").timetable(4, 4)
    least = lower_bound(Work(made.placement, 4, Costs(), split=True))
    optimum = optimise(made, max_activations=2)
    assert (least, optimum.given, optimum.bound, optimum.makespan) == (12.5, 12.5, 15.5, 15.5)
    words = "bitpipe_zb --stages 4 --micro-batches 4 --max-activations 2"
    assert main(["optimise", *words.split()]) == 0
    out = capsys.readouterr().out
    printed = [float(number) for number in re.findall(r"^  \D+?([\d.]+)", out, re.MULTILINE)]
    assert printed == [12.5, 15.5, 15.5]
