"""Planned orders: makespan against the lower bound, live activations, and the check."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import Placement, Timetable, get_schedule
from ds_ext.pipe_schedules.checks.program import check
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.events import Workload
from ds_ext.pipe_schedules.list_scheduling import search as planning
from ds_ext.pipe_schedules.list_scheduling.dispatch import by_due_date
from ds_ext.pipe_schedules.list_scheduling.search import lower_bound, plan
from ds_ext.pipe_schedules.lowering import lower
from ds_ext.pipe_schedules.placement import bidirectional_v, linear, looped, v
from ds_ext.pipe_schedules.simulation import simulate
from tests.selection import EVERYTHING, select

RATIOS = [(1, 1.2, 0.8), (1, 0.8, 1.2), (1, 1.1, 0.9), (1, 1.5, 0.8), (1, 1, 1.5), (2, 1, 1)]


def greedy(ranks: int, micro_batches: int, costs: Costs | None = None, **options: object) -> Timetable:
    return get_schedule("bitpipe").timetable(
        ranks, micro_batches, {"mode": "greedy", **options}, costs or Costs()
    )


def zero_bubble(ranks: int, micro_batches: int, costs: Costs, **options: object) -> Timetable:
    return get_schedule("bitpipe_zb").timetable(ranks, micro_batches, options, costs)


@pytest.mark.parametrize(("micro_batches", "chunk_units"), [(8, 51), (16, 99), (6, 39), (5, 34)])
def test_greedy_bitpipe_on_four_devices(micro_batches: int, chunk_units: int) -> None:
    simulation = simulate(greedy(4, micro_batches))
    assert simulation.makespan * 2 == chunk_units
    assert max(simulation.peak_activations) <= 6


@pytest.mark.parametrize(
    ("ranks", "units"),
    select([(d, n) for d in (4, 6, 8, 12) for n in (2, 3, 4)], [(4, 2), (6, 3), (8, 2), (12, 2)]),
)
def test_greedy_bitpipe_meets_the_bound_of_whole_backwards(ranks: int, units: int) -> None:
    """Exactly for D up to 8."""
    made = greedy(ranks, units * ranks)
    bound = lower_bound(Workload(made.placement, made.micro_batches, Costs(), split=False))
    makespan = simulate(made).makespan
    assert makespan == bound if ranks <= 8 else bound <= makespan <= 1.01 * bound
    assert makespan < simulate(get_schedule("bitpipe").timetable(ranks, units * ranks)).makespan


@pytest.mark.parametrize("ratio", RATIOS, ids=str)
@pytest.mark.parametrize(
    ("ranks", "micro_batches"),
    select(
        [(4, 4), (4, 8), (8, 8), (8, 16), (8, 32), (12, 24), (16, 16), (16, 32)], [(4, 8), (8, 8), (8, 16)]
    ),
)
def test_zero_bubble_at_other_ratios(
    ratio: tuple[float, float, float], ranks: int, micro_batches: int
) -> None:
    """Within 1 % of the ideal plus (D-2)/4 times the slower of forward and input gradient."""
    costs = Costs(*ratio)
    simulation = simulate(zero_bubble(ranks, micro_batches, costs), costs)
    start_up = (ranks - 2) / 4 * max(costs.forward, costs.backward_input)
    assert simulation.makespan <= 1.01 * (simulation.ideal + start_up)
    assert max(simulation.peak_activations) <= ranks


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "bubble"), [(4, 8, 0.0362), (8, 16, 0.0477), (8, 32, 0.0244)]
)
def test_zero_bubble_hides_messages(ranks: int, micro_batches: int, bubble: float) -> None:
    costs = Costs(comm=0.2)
    simulation = simulate(zero_bubble(ranks, micro_batches, costs), costs)
    assert simulation.bubble <= bubble
    assert max(simulation.peak_activations) <= 1.5 * ranks
    less = simulate(zero_bubble(ranks, micro_batches, costs, max_activations=ranks), costs)
    assert max(less.peak_activations) <= ranks


@pytest.mark.parametrize("name", ["bitpipe", "bitpipe_zb", "zb_v"])
@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_any_number_of_micro_batches(name: str, ranks: int) -> None:
    options = {"mode": "greedy"} if name == "bitpipe" else {}
    sizes = range(1, 3 * ranks + 2) if EVERYTHING else [1, ranks - 1, ranks + 1, 2 * ranks]
    for n in sizes:
        made = get_schedule(name).timetable(ranks, n, options)
        report = check(lower(made))
        assert report.link_credits <= 3
        assert (
            simulate(made).makespan
            >= lower_bound(Workload(made.placement, n, Costs(), bool(made.split_backwards))) - 1e-9
        )


@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_split_backward_meets_the_bound_for_any_number(ranks: int) -> None:
    for n in range(ranks, 4 * ranks + 1) if EVERYTHING else [ranks, ranks + 1, 2 * ranks - 1, 3 * ranks]:
        made = zero_bubble(ranks, n, Costs())
        bound = lower_bound(Workload(made.placement, n, Costs(), split=True))
        assert simulate(made).makespan == bound == 3 * n + (ranks - 2) / 4, n


TIMES = st.floats(0.1, 3)


@settings(max_examples=100 if EVERYTHING else 40)
@given(
    placement=st.sampled_from(
        [linear(3), looped(2, 3), v(3), bidirectional_v(2), bidirectional_v(4), bidirectional_v(4, 2)]
    ),
    micro_batches=st.integers(1, 9),
    costs=st.builds(Costs, TIMES, TIMES, TIMES, st.just(0.0) | TIMES),
    split=st.booleans(),
    limit=st.floats(0.25, 2),
    slices=st.sampled_from([1, 1, 3]),
)
def test_every_plan_is_valid_and_keeps_the_limit(
    placement: Placement, micro_batches: int, costs: Costs, split: bool, limit: float, slices: int
) -> None:
    ranks = placement.num_devices
    with patch.object(planning, "_MAX_OPS", 5_000):  # a shorter search, for more examples
        try:
            order = plan(
                "planned",
                placement,
                micro_batches,
                costs,
                split=split,
                max_activations=limit * ranks,
                slices=slices,
            )
        except ScheduleError:
            assert limit < 1  # a micro-batch of every pipe fits
            return
    made = Timetable("planned", placement, micro_batches, order, slices)
    assert check(lower(made)).num_buffers
    simulation = simulate(made, costs)
    assert max(simulation.peak_activations) <= limit * ranks + 1e-9
    workload = Workload(placement, micro_batches, costs, split, slices=slices)
    assert simulation.makespan >= lower_bound(workload) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("micro_batches", "costs", "best"),
    [
        (5, Costs(1, 1.2, 0.8), 15.6),
        (6, Costs(1, 1.2, 0.8), 18.6),
        (7, Costs(1, 1.2, 0.8), 21.6),
        (3, Costs(1, 1, 0.01), 9.005),
        (6, Costs(1, 1, 0.01), 13.025),
    ],
    ids=str,
)
def test_odd_numbers_at_odd_costs(micro_batches: int, costs: Costs, best: float) -> None:
    """The makespans are those that OR-tools proves optimal on four devices, in minutes."""
    made = zero_bubble(4, micro_batches, costs)
    assert simulate(made, costs).makespan == pytest.approx(best)
    assert max(simulate(made, costs).peak_activations) <= 4


def test_admission_beyond_the_capacity_may_deadlock() -> None:
    """With too many admitted micro-batches, devices full of forwards of early stages deadlock."""
    work = Workload(bidirectional_v(4), 8, Costs(), split=True)
    entries = [0.0] * 8
    assert by_due_date(work, entries, 8, 8) is not None
    assert by_due_date(work, entries, 4, 16) is None


def test_limits_that_cannot_be_kept() -> None:
    with pytest.raises(ScheduleError, match=r"max_activations .*0\.5.* 1 "):
        zero_bubble(4, 8, Costs(), max_activations=0.5)
    with pytest.raises(ScheduleError, match=r"max_activations .*greedy.* 6 .* 4"):
        get_schedule("bitpipe").timetable(4, 8, {"max_activations": 6})


def test_costs_in_the_options_of_a_job() -> None:
    slow = Costs(comm=0.5)
    planned = get_schedule("bitpipe_zb").timetable(4, 8, {"costs": "comm=0.5"})
    assert planned == zero_bubble(4, 8, slow) != zero_bubble(4, 8, Costs())
    assert simulate(planned, slow).makespan < simulate(zero_bubble(4, 8, Costs()), slow).makespan
    with pytest.raises(ScheduleError, match=r"option costs .*got 3"):
        get_schedule("bitpipe_zb").timetable(4, 8, {"costs": 3})
