"""Timetables read from dumps, valid and damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import Op, Placement, Timetable, get_schedule, timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.files import dump, read_timetable, schedule_of_file
from ds_ext.pipe_schedules.lowering import lower

PLACEMENTS = ["linear", "interleaved", "v", "bidirectional_v"]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_dump_is_a_timetable_file(placement: str, tmp_path: Path) -> None:
    made = get_schedule("dpp").timetable(4, 8, {"placement": placement, "backward": "split"}, Costs(comm=0.7))
    path = tmp_path / "order.json"
    path.write_text(json.dumps(dump(lower(made))))
    assert read_timetable(path) == made
    assert schedule_of_file(path).make_dynamic_rules(4, 8) is None
    with pytest.raises(ScheduleError, match=r"options .*policy"):
        schedule_of_file(path).timetable(4, 8, {"policy": "depth"})


@pytest.mark.parametrize("divides_head", [False, True])
def test_a_dump_of_version_1_is_read(divides_head: bool, tmp_path: Path) -> None:
    """It has no version, and ``other_stage`` only in messages and copies to and from parts of a head."""
    made = get_schedule("zb_v").dividing_head(divides_head).timetable(2, 4)
    old: Any = dump(lower(made))
    assert old.pop("version") == 2
    for instruction in (instruction for row in old["ranks"] for instruction in row):
        ends = instruction.get("stage", 0), instruction.get("other_stage", 0)
        if max(ends) < made.placement.stages:
            instruction.pop("other_stage", None)
    path = tmp_path / "order.json"
    path.write_text(json.dumps(old))
    assert read_timetable(path) == made


def test_a_device_of_a_dump_may_have_no_chunk(tmp_path: Path) -> None:
    rows = [(Op("F", 0, 0), Op("B", 0, 0)), (), (Op("F", 0, 1), Op("B", 0, 1))]
    idle = Timetable("mine", Placement(((0, 2),)), 1, tuple(rows))
    path = tmp_path / "order.json"
    path.write_text(json.dumps(dump(lower(idle))))
    assert read_timetable(path) == idle


def test_a_dump_numbers_its_devices() -> None:
    dumped: Any = dump(lower(timetable("fbd", 4, 8)))
    assert (dumped["stages"], dumped["devices"]) == (4, 8)
    assert [chunk["device"] for chunk in dumped["chunks"]] == [chunk["rank"] for chunk in dumped["chunks"]]
    assert {chunk["device"] for chunk in dumped["chunks"]} == set(range(8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("chunks"), "'chunks'"),
        (lambda d: d.update(micro_batches="4"), "micro_batches '4'"),
        (lambda d: d["chunks"].pop(), r"chunks .* 0\.\.0, stages is 2"),
        (lambda d: d.update(version=3), "version 3"),
        (lambda d: d["ranks"].pop(), "ranks .*2 .*got 1"),
        (lambda d: d["chunks"][0].update(rank=7), r"chunks .* 1\.\.7, stages is 2"),
        (lambda d: d["chunks"][0].update(rank=-1), r"chunks .* -1\.\.1, stages is 2"),
        (lambda d: d["chunks"][0].update(rank=0.9), "float"),
        (lambda d: d["chunks"][0].update(stage=2), "2 chunks .* 1 pipes of 3 stages"),
        (lambda d: d.update(stages=8), r"chunks .* 0\.\.1, stages is 8"),
        (lambda d: d["ranks"][0][1].update(stage=0.5), "float"),
        (lambda d: d["ranks"][0][1].pop("stage"), "'stage'"),
    ],
)
def test_a_dump_that_is_damaged(change: Any, message: str, tmp_path: Path) -> None:
    damaged = dump(lower(timetable("dpp", 2, 4)))
    change(damaged)
    path = tmp_path / "order.json"
    path.write_text(json.dumps(damaged))
    with pytest.raises(ScheduleError, match=message):
        read_timetable(path)
    path.write_text("{")
    with pytest.raises(ScheduleError, match="5 keys"):
        read_timetable(path)
