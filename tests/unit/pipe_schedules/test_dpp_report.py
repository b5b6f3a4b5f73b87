"""Who was slow, and what it cost: the arithmetic of the report, without ranks."""

from __future__ import annotations

import pytest

from ds_ext.pipe_schedules import get_schedule, timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.dpp.report import Measured, Observer, Sums
from ds_ext.pipe_schedules.simulate import simulate


def measured(work: dict[int, float], ways: dict[tuple[int, int], float], hosts: str = "aaaa") -> Measured:
    """Four devices with a stage each: seconds of a forward (a backward takes twice as long), and of messages."""
    computed, waited = [Sums() for _ in hosts], [Sums() for _ in hosts]
    for stage, seconds in work.items():
        for kind, times in (("F", 1), ("B", 2)):
            computed[stage].add((kind, stage), 0.9 * times * seconds)
            computed[stage].add((kind, stage), 1.1 * times * seconds)
    for (sender, to), seconds in ways.items():
        waited[to].add(sender, seconds)
    return Measured.of(computed, waited, hosts)


ALIKE = dict.fromkeys(range(4), 0.1)
WAYS = {(a, b): 0.01 for a in range(4) for b in range(4) if abs(a - b) == 1}


def test_the_report_names_the_slow_stage_with_what_it_cost() -> None:
    """1F1B of 8 micro-batches in stages of 0.3 s each; stage 2 then takes twice as long, all the time."""
    plan = timetable("1f1b", 4, 8)
    observer, slow = Observer(plan), {**ALIKE, 2: 0.2}
    first = observer.report(measured(ALIKE, WAYS), plan, plan)
    assert first.slow == () and first.cost_s == first.regret_s == 0
    assert first.step_s == pytest.approx(simulate(plan, Costs(0.1, 0.1, 0.1, 0.01)).makespan)
    second = observer.report(measured(slow, WAYS), plan, plan)
    (found,) = second.slow
    assert (found.where, found.seconds, found.peers, found.past) == (2, *map(pytest.approx, (0.6, 0.3, 0.3)))
    costs = Costs(0.1, 0.1, 0.1, 0.01, stages=(1, 1, 2, 1))
    assert second.step_s == pytest.approx(simulate(plan, costs).makespan)
    assert second.cost_s == pytest.approx(second.step_s - first.step_s)
    # The regret is what deciding lost, or with a minus sign gained, at the same times.
    decided = get_schedule("dpp").timetable(4, 8, {}, costs)
    gained = simulate(decided, costs).makespan - simulate(plan, costs).makespan
    assert observer.report(measured(slow, WAYS), decided, plan).regret_s == pytest.approx(gained)


@pytest.mark.parametrize(("stage", "hinted"), [(3, True), (2, False)])
def test_a_slow_last_stage_is_told_what_to_do(stage: int, hinted: bool) -> None:
    """It has the head and the loss; slower than it was, and not than the others, is no matter of layers."""
    observer = Observer(timetable("1f1b", 4, 8))
    text = str(observer.report(measured({**ALIKE, stage: 0.2}, WAYS), observer.plan, observer.plan))
    assert text.startswith(f"stage {stage}: 600 ms a micro-batch, 2.00 x the others' 300 ms. That cost ")
    assert ("Stage 3 is the last one, which has the head" in text) == hinted == ("balanced" in text)
    observer.report(measured({**ALIKE, 3: 0.07}, WAYS), observer.plan, observer.plan)
    again = str(observer.report(measured({**ALIKE, 3: 0.1}, WAYS), observer.plan, observer.plan))
    assert "balanced" not in again


def test_a_slow_link_is_named_and_clocks_of_two_hosts_are_not() -> None:
    observer = Observer(timetable("1f1b", 4, 8))
    late = {**WAYS, (1, 2): 0.05}
    found = observer.report(measured(ALIKE, late), observer.plan, observer.plan)
    assert [slow.where for slow in found.slow] == [(1, 2)]
    assert str(found).startswith("link 1>2: 50 ms a micro-batch, ")
    assert str(found).endswith(" ms. (A link 0>1 is from device 0 of the pipeline to device 1.)")
    # With two tensor-parallel ranks a device.
    named = observer.report(measured(ALIKE, late), observer.plan, observer.plan, (0, 2, 4, 6))
    assert str(named).startswith("link 1>2 (ranks 2>4): 50 ms a micro-batch, ")
    # Devices 2 and 3 are on a host whose clock is an hour behind: their messages seem to take an hour less or more.
    skewed = {**WAYS, (1, 2): 0.01 - 3600, (2, 1): 0.01 + 3600}
    assert measured(ALIKE, skewed, "aabb").links == pytest.approx(WAYS)
    del skewed[1, 2]
    assert (2, 1) not in measured(ALIKE, skewed, "aabb").links


def test_what_slows_down_and_keeps_nobody_waiting_is_not_named_nor_are_all_that_are_slow() -> None:
    plan = timetable("1f1b", 4, 8)
    observer = Observer(plan)
    observer.report(measured({**ALIKE, 1: 0.02}, WAYS), plan, plan)
    assert observer.report(measured({**ALIKE, 1: 0.04}, WAYS), plan, plan).slow == ()
    everything = observer.report(measured(dict.fromkeys(range(4), 0.2), WAYS), plan, plan)
    assert len(everything.slow) == 4 and "; and 1 more. That cost" in str(everything)
