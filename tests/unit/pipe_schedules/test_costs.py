"""Costs: from text and files, factors of stages, times of links, jitter."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import Op, get_schedule
from ds_ext.pipe_schedules.costs import Costs, load_costs, parse_costs
from ds_ext.pipe_schedules.events import Workload
from ds_ext.pipe_schedules.list_scheduling.search import lower_bound
from ds_ext.pipe_schedules.ops import FORWARD
from ds_ext.pipe_schedules.placement import linear, looped, v
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.planner.text import costs_text


def test_costs_from_text() -> None:
    assert parse_costs("f=1.5, w=0,comm=.25") == Costs(
        forward=1.5, backward_input=1, backward_weight=0, comm=0.25
    )
    assert parse_costs("jitter=0.1,seed=7") == Costs(jitter=0.1, seed=7)
    assert parse_costs("") == Costs()


@pytest.mark.parametrize(
    "text",
    [
        *(
            "f",
            "f=x",
            "g=1",
            "f=-1",
            "f=nan",
            "comm=inf",
            "stages=1x0",
            "stages=1/x",
            "stages=1x999999",
            "links=1",
            "jitter=2",
            "jitter=-0.1",
            "seed=1.5",
        ),
        *("f=1e308", "b=1e-300", "f=1,f=2", "w=1, w =1"),
    ],
)
def test_costs_that_make_no_sense(text: str) -> None:
    with pytest.raises(ScheduleError, match="costs"):
        parse_costs(text)


def test_a_stage_costs_its_share_and_its_factor() -> None:
    assert Costs(forward=2, backward_input=3, backward_weight=1).durations(v(2)) == {
        "F": (1, 1, 1, 1),
        "B": (2, 2, 2, 2),
        "I": (1.5, 1.5, 1.5, 1.5),
        "W": (0.5, 0.5, 0.5, 0.5),
    }
    assert Costs(forward=2, stages=(1, 1, 2)).durations(linear(3))["F"] == (2, 2, 4)
    assert Costs(stages=(1, 2, 3, 4)).durations(looped(2, 2))["B"] == (1, 2, 3, 4)
    with pytest.raises(ScheduleError, match=r"stages .*4 .*\(got 3\)"):
        Costs(stages=(1, 1, 2)).durations(v(2))


def test_links() -> None:
    costs = Costs(comm=0.5, links={(0, 1): 3})
    assert [costs.delay(*ends) for ends in ((0, 1), (1, 0), (1, 2), (1, 1))] == [3, 0.5, 0.5, 0]


def test_costs_of_another_placement() -> None:
    for ends in ((0, 4), (7, 1), (-1, 0), (2, 2)):
        with pytest.raises(ScheduleError, match=rf"0 to 3 \(got {ends[0]}>{ends[1]}\)"):
            Costs(links={(0, 1): 1, ends: 1}).durations(linear(4))
    Costs(links={(0, 3): 1}).fit(v(4))


def test_three_factors_and_overhead() -> None:
    costs = Costs(2, 3, 1, stages=(1, (1.5, 2, 0.5)), overhead=0.25)
    assert costs.durations(linear(2)) == {
        "F": (2.25, 3.25),
        "B": (4.25, 6.75),
        "I": (3.25, 6.25),
        "W": (1.25, 0.75),
    }
    assert (
        costs == parse_costs("f=2,b=3,w=1,stages=1/1.5:2:0.5,overhead=0.25") == parse_costs(costs_text(costs))
    )
    repeated = costs.with_recompute(0.5)
    assert repeated.durations(linear(2))["I"] == pytest.approx((4.25, 7.75))
    assert repeated.durations(linear(2))["F"] == (2.25, 3.25)


MEASURED = Costs(4, 6, 2, 0.5, ((1, 1, 1), (2, 1, 1), (0.5, 1, 1), (0.5, 1, 1)), measured={"devices": 2})


def test_measured_costs_carry_over_to_joined_stages_and_other_devices() -> None:
    assert MEASURED.durations(looped(2, 2))["F"] == (2, 4, 1, 1)
    assert MEASURED.durations(linear(2))["F"] == (6, 2)
    assert MEASURED.durations(linear(2))["B"] == (8, 8)
    assert MEASURED.durations(linear(4))["F"] == (2, 4, 1, 1)
    assert MEASURED.durations(linear(1))["F"] == (8,)
    assert MEASURED.fit(linear(4)).fit(linear(4)) == MEASURED.fit(linear(4))
    for placement in (linear(3), v(4)):
        with pytest.raises(ScheduleError, match=rf"4 .* {placement.stages} "):
            MEASURED.durations(placement)
    with pytest.raises(ScheduleError, match=r"2 devices \(got 4\)"):
        replace(MEASURED, links={(0, 1): 1}).durations(linear(4))


def test_ratios_of_measured_costs() -> None:
    assert MEASURED.ratios() == Costs(4, 6, 2)
    assert Costs(comm=1).ratios() == Costs(comm=1)
    for values, words in (
        ({"tensor_parallel_size": 2}, r" 1 \(got .* 2\)"),
        ({"recomputes": True}, "recomputes"),
    ):
        with pytest.raises(ScheduleError, match=words):
            replace(MEASURED, measured={"devices": 2, **values}).ratios()


@pytest.mark.parametrize(
    ("sizes", "numbers"),
    [
        ({"micro_batch_size": 4, "tensor_parallel_size": 1, "recomputes": False}, None),
        ({"micro_batch_size": 2, "stage_layers": [8, 8]}, ["2", "4"]),
        ({"stage_layers": [6, 10]}, ["6,10", "8,8"]),
        ({"tensor_parallel_size": 2, "recomputes": True}, ["2", "true", "1", "false"]),
    ],
)
def test_measured_costs_do_not_carry_over_to_other_sizes(
    sizes: dict[str, Any], numbers: list[str] | None
) -> None:
    """The measured stages of 3, 5, 4 and 4 layers are joined to two."""
    measured = {"devices": 2, "micro_batch_size": 4, "stage_layers": [3, 5, 4, 4]}
    costs = replace(MEASURED, measured=measured).fit(linear(2))
    assert costs.measured["stage_layers"] == [8, 8]
    if numbers is None:
        costs.check_measured(sizes)
        return
    with pytest.raises(ScheduleError) as error:
        costs.check_measured(sizes)
    assert re.findall(r"\d[\d,]*\d|\d|true|false", str(error.value)) == numbers
    costs.with_recompute(1.0).check_measured({"recomputes": True})
    MEASURED.check_measured({"micro_batch_size": 2, "stage_layers": [1, 2]})  # unknown in these costs


def test_costs_are_values() -> None:
    links = {(0, 1): 3.0}
    costs = Costs(stages=(1, 2), links=links)
    links[0, 1] = 4
    assert costs.links == {(0, 1): 3}
    assert costs == Costs(stages=(1, 2), links={(0, 1): 3.0}) != Costs(stages=(1, 2))
    assert hash(costs) == hash(Costs(stages=(1, 2), links={(0, 1): 3.0}))
    assert pickle.loads(pickle.dumps(costs)) == copy.deepcopy(costs) == costs


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"forward": -1}, r"f .*got -1"),
        ({"backward_weight": "x"}, "w .*got 'x'"),
        ({"stages": (1, math.nan)}, r"stages\[1\] .*got nan"),
        ({"links": {(0, 1): -2}}, "links 0>1 .*got -2"),
        ({"jitter": 1.5}, "jitter .*0 and 1 .*got 1.5"),
        ({"seed": 0.5}, "seed .*got 0.5"),
        ({"seed": True}, "seed .*got True"),
        ({"stages": (1, (1, 2))}, r"stages\[1\] .*got \(1, 2\)"),
        ({"head": (1, 2)}, r"head .*got \(1, 2\)"),
        ({"stages": (1, (1, -2, 1))}, r"stages\[1\]\[1\] .*got -2"),
        ({"measured": {"devices": 0}}, "measured .*got {'devices': 0}"),
        ({"forward": 1e308}, r"f .*1e-15 and 1e\+15 \(got 1e\+308\)"),
        ({"forward": True}, "f .*got True"),
        ({"backward_input": 10**6000}, "b .*thousands of digits"),
    ],
)
def test_values_out_of_range(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ScheduleError, match=sentence):
        Costs(**arguments)


def test_jitter_is_even_and_depends_on_seed_and_op_alone() -> None:
    ops = [Op(kind, m, stage) for kind in "FBIW" for stage in range(16) for m in range(64)]
    costs = Costs(jitter=0.25, seed=3)
    factors = [costs.jitter_factor(op) for op in ops]
    assert factors == [Costs(jitter=0.25, seed=3).jitter_factor(op) for op in ops]
    assert all(0.75 <= factor <= 1.25 for factor in factors) and len(set(factors)) == len(ops)
    # Mean and variance of 4096 uniform numbers in [-1, 1], within five standard errors.
    u = [(factor - 1) / 0.25 for factor in factors]
    assert abs(statistics.fmean(u)) < 5 * math.sqrt(1 / 3 / 4096)
    assert abs(statistics.pvariance(u) - 1 / 3) < 5 * math.sqrt(4 / 45 / 4096)
    for others in (
        [Costs(jitter=0.25, seed=4).jitter_factor(op) for op in ops],
        [costs.jitter_factor(op, message=True) for op in ops],
        [*factors[1:], factors[0]],
        [*factors[64:], *factors[:64]],
    ):
        assert abs(statistics.correlation(factors, others)) < 5 / math.sqrt(4096)
    assert Costs(seed=3).jitter_factor(ops[0]) == 1
    assert Costs(jitter=1, seed=-5).jitter_factor(ops[0]) == Costs(jitter=1, seed=-5).jitter_factor(ops[0])


def test_costs_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    whole = {
        "f": 1,
        "b": 1.5,
        "w": 0.5,
        "comm": 0.1,
        "stages": [1, 1.25],
        "links": {"0>1": 0.3},
        "jitter": 0.2,
        "seed": 9,
    }
    path.write_text(json.dumps(whole))
    assert load_costs(str(path)) == Costs(1, 1.5, 0.5, 0.1, (1, 1.25), {(0, 1): 0.3}, 0.2, 9)
    path.write_text('{"stages": null}')
    assert load_costs(str(path)) == Costs()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "not JSON"),
        (
            "[1]",
            r"f, b, w, comm, overhead, stages, links, jitter, seed, measured, slices, head .*got \[1\]",
        ),
        ('{"g": 1}', "got g"),
        ('{"stages": 2}', "stages .*got 2"),
        ('{"stages": ["x"]}', r"stages\[0\] .*got 'x'"),
        ('{"links": {"0-1": 1}}', "link .*got '0-1'"),
        ('{"links": [1]}', r"link .*got \[1\]"),
        ('{"links": {"0>1": null}}', "links 0>1 .*got None"),
        ('{"f": NaN}', "f .*got nan"),
        ('{"f": 1, "f": 2}', "'f'"),
        ('{"links": {"0>1": 1, " 0 > 1": 2}}', "link 0>1"),
        ('{"links": "0>1"}', "link .*got '0>1'"),
        ('{"links": {"9999999999>1": 1}}', "link .*9999999999"),
        ('{"seed": true}', "seed .*got True"),
        ("[" * 200_000, "nested too deeply"),
        ('{"f": ' + "[" * 5_000 + "]" * 5_000 + "}", "costs"),
    ],
)
def test_files_that_make_no_sense(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=sentence):
        load_costs(str(path))


def test_times_of_slices() -> None:
    costs = parse_costs("slices=1/3/5/7")
    times = 0.25, 0.75, 1.25, 1.75
    assert costs.slices == times == parse_costs(costs_text(costs)).slices
    timetable = get_schedule("1f1b").timetable(1, 2, slices=4)
    spans = simulate(timetable, costs).spans[0]
    assert {op.slice: end - start for op, start, end in spans if op.kind == FORWARD} == pytest.approx(
        {j: time / 4 for j, time in enumerate(times)}
    )
    assert simulate(timetable, costs).makespan == pytest.approx(6)
    for text, wrong in (
        ("slices=1/2", "slices .*4 .*got 2"),
        ("slices=0/0", "slices"),
        ("slices=-1/1", r"slices\[0\]"),
    ):
        with pytest.raises(ScheduleError, match=wrong):
            simulate(timetable, parse_costs(text))


@pytest.mark.parametrize("name", ["zb_v", "bitpipe_zb", "1f1b", "zb_h1"])
def test_no_order_is_shorter_than_the_bound_of_slices(name: str) -> None:
    costs = Costs(comm=0.1, slices=(1, 3, 5, 7))
    timetable = get_schedule(name).timetable(4, 4, costs=costs, slices=4)
    workload = Workload(timetable.placement, 4, costs, split=timetable.dependencies.split, slices=4)
    assert lower_bound(workload) <= simulate(timetable, costs).makespan


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"none\.json: No such file"):
        load_costs(str(tmp_path / "none.json"))
