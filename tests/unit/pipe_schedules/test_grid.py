"""Grids as text."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ds_ext.pipe_schedules import Op, Timetable, get_schedule, timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.draw.grid import order_grid, time_grid
from ds_ext.pipe_schedules.placement import linear
from ds_ext.pipe_schedules.ports import Collective
from ds_ext.pipe_schedules.simulation import simulate


def test_labels_in_full() -> None:
    assert time_grid(simulate(timetable("1f1b", 2, 2)), labels="op").splitlines() == [
        "device 0  F0@0 F1@0 .    .    B0@0----- .    B1@0-----",
        "device 1  .    F0@1 B0@1----- F1@1 B1@1----- .    .",
    ]


def test_labels_of_slices() -> None:
    made = get_schedule("1f1b").timetable(2, 1, slices=2)
    assert time_grid(simulate(made)).splitlines() == [
        "device 0  0   0.1 .   .   .   0.1'--- 0'-----",
        "device 1  .   0   0.1 0.1'--- 0'----- .   .",
    ]
    assert "F0.1@1" in time_grid(simulate(made), labels="op")


def test_collectives_are_below_their_device() -> None:
    """The second gather starts at the end of the first one. A reduction at the same time is on another line."""
    gathers = (Collective("gather@0"), 0.0, 3.0), (Collective("gather@11"), 3.0, 3.1)
    rows = (*gathers, (Collective("reduce@0"), 1.0, 4.0)), ((Collective("reduce"), 9.0, 11.0),)
    simulation = replace(simulate(timetable("1f1b", 2, 2)), collectives=rows)
    assert time_grid(simulation).splitlines() == [
        "device 0  0 1 . . 0'- . 1'-",
        "          g0----g11",
        "            r0----",
        "device 1  . 0 0'- 1 1'- . .",
        "                            r---",
    ]


def test_columns_are_time() -> None:
    """Every label is at the start of its op, for any durations."""
    simulation = simulate(
        timetable("bitpipe", 4, 8), Costs(forward=1, backward_input=1.1, backward_weight=0.4, comm=0.05)
    )
    lines = time_grid(simulation, labels="op").splitlines()
    scale = max(len(line) for line in lines) - len("device 0  ")
    for line, spans in zip(lines, simulation.spans, strict=True):
        for op, start, _ in spans:
            column = line.index(str(op)) - len("device 0  ")
            assert abs(column / scale - start / simulation.makespan) < 0.04


def test_split_backwards_and_free_computations() -> None:
    order = ((Op("F", 0, 0), Op("I", 0, 0), Op("W", 0, 0)),)
    made = Timetable("split", linear(1), 1, order)
    assert time_grid(simulate(made)) == "device 0  0  0' 0\""
    assert time_grid(simulate(made, Costs(backward_weight=0))) == "device 0  0  0'"
    assert time_grid(simulate(made, Costs(0, 0, 0))) == order_grid(made)


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1e9])
def test_the_unit_of_time_does_not_matter(scale: float) -> None:
    made = timetable("bitpipe", 4, 8)
    scaled = Costs(scale, 1.2 * scale, 0.8 * scale, 0.1 * scale)
    assert time_grid(simulate(made, scaled)) == time_grid(simulate(made, Costs(1, 1.2, 0.8, 0.1)))


def test_colors_do_not_move_anything() -> None:
    simulation = simulate(timetable("bitpipe", 4, 4))
    painted = time_grid(simulation, color=True)
    codes = set(re.findall(r"\x1b\[([\d;]*)m", painted))
    assert codes == {"0", "36", "33", "36;7", "33;7"}  # one colour per pipe, reversed for backwards
    assert re.sub(r"\x1b\[[\d;]*m", "", painted) == time_grid(simulation)


def test_device_numbers_are_aligned() -> None:
    lines = time_grid(simulate(timetable("gpipe", 11, 1))).splitlines()
    assert lines[0].startswith("device  0  0") and lines[10].startswith("device 10  .")


def test_timetables_too_long_for_a_picture_are_drawn_step_by_step() -> None:
    made = timetable("1f1b", 2, 1024)
    assert time_grid(simulate(made)) == order_grid(made)


def test_the_window_around_an_op() -> None:
    made = timetable("gpipe", 2, 12)
    step = made.orders[1].index(Op("B", 3, 1))
    head, first, second, arrow, steps = order_grid(made, device=1, step=step).splitlines()
    assert head.split() == ["step", *map(str, range(step - 6, step + 7))]
    assert first.split() == ["device", "0", *map(str, made.orders[0][step - 6 : step + 7])]
    assert second.endswith("<-- ERROR HERE") and second[arrow.index("^") :].startswith("B3@1 ")
    assert steps.strip() == f"(steps {step - 6}..{step + 6} of 24)"
