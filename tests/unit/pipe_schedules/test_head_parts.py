"""Vocabulary-parallel head: every device computes a part of it between its other ops."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ds_ext.config.job import load_config
from ds_ext.errors import ConfigError, ScheduleError
from ds_ext.pipe_schedules import SCHEDULES, Op, Timetable, get_schedule
from ds_ext.pipe_schedules.checks.collectives import check_gathers
from ds_ext.pipe_schedules.checks.program import check
from ds_ext.pipe_schedules.costs import TYPICAL_HEAD, Costs, dump_costs, load_costs, parse_costs
from ds_ext.pipe_schedules.files import dump, read_dump, schedule_of_file
from ds_ext.pipe_schedules.gathers import with_gathers
from ds_ext.pipe_schedules.inference import forward_timetable
from ds_ext.pipe_schedules.list_scheduling import head_parts
from ds_ext.pipe_schedules.lowering import lower
from ds_ext.pipe_schedules.reductions import eager_reductions, with_reductions
from ds_ext.pipe_schedules.simulation import peak_stages, simulate
from ds_ext.pipe_schedules.text import dumps, loads, torch_csv
from ds_ext.planner.job_plan import make_job_plan
from tests.selection import EVERYTHING
from tests.unit.pipe_schedules.test_properties import WITH_SLICES, run

REFUSED = {"fbd", "dpp"}
SCHEDULED = sorted(set(SCHEDULES) - REFUSED)
SIZES = [(d, n) for d in ((2, 3, 4, 6, 8) if EVERYTHING else (2, 3, 4)) for n in (1, 2, d, 2 * d, 3 * d)]
LAYERS = 4  # per device


def made(name: str, devices: int, micro_batches: int, head: float = 0.5, slices: int = 1) -> Timetable:
    """Return a timetable with head parts, planned for a head of this cost factor."""
    options = {"mode": "greedy"} if name == "bitpipe" and slices > 1 else {}
    schedule = get_schedule(name).dividing_head()
    return schedule.timetable(devices, micro_batches, options, Costs(head=head), slices)


@pytest.mark.parametrize(
    ("name", "slices"), [(name, 1) for name in SCHEDULED] + [(name, 3) for name in WITH_SLICES]
)
def test_every_size_is_complete_and_runs(name: str, slices: int) -> None:
    sizes = 0
    for devices, micro_batches in SIZES:
        try:
            get_schedule(name).timetable(devices, micro_batches)
        except ScheduleError:
            continue
        sizes += 1
        timetable = made(name, devices, micro_batches, slices=slices)
        placement = timetable.placement
        assert (placement.head_parts, timetable.slices) == (devices, slices)
        for trained in (timetable, forward_timetable(placement, micro_batches, slices=slices)):
            program = lower(trained)
            report = check(program)
            assert report.messages == simulate(trained).messages
            run(program)
            assert loads(dumps(trained)) == trained
            assert read_dump(json.dumps(dump(program)), "dump") == trained
            counts = {kind: 0 for kind in "FW"}
            for op in (op for order in trained.orders for op in order if op.stage >= placement.stages):
                counts[op.kind] += 1
            items = micro_batches * slices
            assert counts == {"F": items * (devices + 1), "W": items * devices * trained.trains}
        simulation = simulate(timetable)
        reduced = with_reductions(lower(timetable), eager_reductions(simulation))
        check_gathers(gathered := with_gathers(reduced, simulation))
        check(gathered)
        assert set(report.loss_devices) == {pipe[-1] for pipe in placement.pipes}
    assert sizes


def test_the_parts_of_a_device_are_those_of_its_replica() -> None:
    timetable = made("bitpipe_zb", 4, 4)
    placement = timetable.placement
    assert placement.head_devices == ((0, 1, 2, 3), (3, 2, 1, 0))
    assert placement.replica_groups == get_schedule("bitpipe_zb").placement(4).replica_groups
    assert placement.stages_of(1) == placement.stages_of(2) == (1, 2, 5, 6, 9, 10)
    assert [chunk[:2] for chunk in placement.chunks[1][-2:]] == [(9, 0), (10, 1)]
    assert (placement.stages, placement.op_stages, placement.loss_stage) == (8, 13, 12)


def test_the_last_backward_waits_for_the_loss_and_the_loss_for_all_parts() -> None:
    needs = made("zb_v", 2, 2).dependencies.needs
    assert needs(Op("F", 1, 4)) == [(Op("F", 1, 3), 0)]
    assert needs(Op("F", 1, 6)) == [(Op("F", 1, 4), 0), (Op("F", 1, 5), 1)]
    assert needs(Op("I", 1, 3)) == [(Op("F", 1, 3), 0), (Op("F", 1, 6), 0)]
    assert needs(Op("W", 1, 5)) == [(Op("F", 1, 5), 1), (Op("F", 1, 6), 0)]


def test_messages_name_the_stage_at_their_other_end() -> None:
    instructions = lower(made("1f1b", 2, 1)).instructions
    moves = {
        (i.name, i.stage, i.other_stage)
        for row in instructions
        for i in row
        if i.name[:4] in ("Send", "Recv", "Copy")
    }
    assert moves == {
        ("SendActivation", 0, 1),
        ("RecvActivation", 1, 0),
        ("SendActivation", 1, 2),
        ("RecvActivation", 2, 1),
        ("CopyActivation", 1, 3),
        ("SendActivation", 2, 4),
        ("RecvActivation", 4, 2),
        ("CopyActivation", 3, 4),
        ("CopyGrad", 4, 1),
        ("CopyGrad", 4, 3),
        ("SendGrad", 4, 2),
        ("RecvGrad", 2, 4),
        ("SendGrad", 1, 0),
        ("RecvGrad", 0, 1),
    }


@pytest.mark.parametrize("missing", [Op("F", 0, 2), Op("W", 0, 3), Op("F", 0, 4)], ids=str)
def test_a_missing_op_of_the_head_is_an_error(missing: Op) -> None:
    timetable = made("1f1b", 2, 2)
    orders = tuple(tuple(op for op in order if op != missing) for order in timetable.orders)
    broken = Timetable("1f1b", timetable.placement, 2, orders)
    with pytest.raises(ScheduleError, match=rf"micro-batch 0 at stage {missing.stage} "):
        lower(broken)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_forward_devices_and_orders_of_run_time_have_no_parts(name: str) -> None:
    with pytest.raises(ScheduleError, match=rf"{name}: vocabulary_parallel_head "):
        get_schedule(name).dividing_head().timetable(4, 8)
    section = {"schedule": name, "pipeline_parallel_size": 4, "vocabulary_parallel_head": True}
    with pytest.raises(ConfigError, match="vocabulary_parallel_head"):
        make_job_plan(load_config({"train_batch_size": 8, "ds_ext": section}))


@pytest.mark.parametrize("name", WITH_SLICES)
def test_slices_shorten_the_way_to_the_head_and_back(name: str) -> None:
    whole, sliced = (simulate(made(name, 4, 8, 2.0, slices), Costs(head=2.0)) for slices in (1, 4))
    assert sliced.makespan < whole.makespan * (1.0 if "bitpipe" in name else 0.98)
    assert max(sliced.peak_activations) < max(whole.peak_activations) or name == "gpipe"
    # All work: layers, forwards of the parts with input gradients, and their weight gradients.
    assert sliced.ideal == pytest.approx(whole.ideal) == pytest.approx(24 + 12)


def test_a_file_with_parts_needs_the_key(tmp_path: Path) -> None:
    timetable = made("zb_v", 2, 4)
    path = tmp_path / "head.txt"
    path.write_text(dumps(timetable))
    schedule = schedule_of_file(path)
    assert schedule.dividing_head().timetable(2, 4) == timetable
    with pytest.raises(ScheduleError, match="vocabulary_parallel_head"):
        schedule.timetable(2, 4)
    with pytest.raises(ScheduleError, match="2"):
        torch_csv(timetable)


def test_a_job_has_the_timetable(tmp_path: Path) -> None:
    section = {"schedule": "zb_v", "pipeline_parallel_size": 4, "vocabulary_parallel_head": True}
    plan = make_job_plan(load_config({"train_batch_size": 8, "ds_ext": section}))
    assert plan.layout.placement == plan.timetable.placement
    assert plan.timetable.placement.head_parts == 4
    assert plan.report.loss_devices == (0,)


def test_the_costs_of_the_head(tmp_path: Path) -> None:
    costs = parse_costs("f=1,b=2,w=4,head=0.5")
    durations = costs.durations(made("1f1b", 2, 2).placement)
    assert durations["F"] == (1, 1, 0.75, 0.75, 0) and durations["W"][2:4] == (1, 1)
    costs = parse_costs("head=0.5:1:2,overhead=3")
    durations = costs.durations(made("1f1b", 2, 2).placement)
    assert durations["F"][2:] == (3.75, 3.75, 0) and durations["W"][2:4] == (4, 4)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(dump_costs(costs)))
    assert load_costs(str(path)) == costs
    assert "head" not in dump_costs(Costs())
    for text in ("head=-1", "head=1/2", "head=1:2", "head=a"):
        with pytest.raises(ScheduleError, match="head"):
            parse_costs(text)


@pytest.mark.parametrize(("devices", "micro_batches"), [(4, 8), (8, 16)])
@pytest.mark.parametrize("head_layers", [1, 2, 4])
@pytest.mark.parametrize("name", ["1f1b", "zb_v", "bitpipe_zb"])
def test_no_slower_than_an_even_split(name: str, head_layers: int, devices: int, micro_batches: int) -> None:
    """The reference is the schedule with the head's time divided evenly over the stages, which no cut has."""
    head = head_layers / LAYERS
    even = simulate(get_schedule(name).timetable(devices, micro_batches))
    parts = simulate(made(name, devices, micro_batches, head), Costs(head=head))
    assert parts.makespan <= even.makespan * (1 + head / devices) * (1.01 if name != "1f1b" else 1)
    assert parts.ideal == pytest.approx(even.ideal * (1 + head / devices))
    assert max(parts.peak_activations) <= max(even.peak_activations) + (1 if name == "1f1b" else 0)


def test_weight_gradients_of_parts_do_not_pile_up() -> None:
    timetable = made("1f1b", 4, 16, 1.0)
    for order in timetable.orders:
        waiting = [0]
        for op in order:
            if op.stage >= 4 and op.stage < 8:
                waiting.append(waiting[-1] + (1 if op.kind == "F" else -1))
        assert max(waiting) <= 6 and waiting[-1] == 0
        assert all(abs(a - b) == 1 for a, b in pairwise(waiting))


def test_measured_costs_carry_over_to_other_devices() -> None:
    measured = Costs(2.0, 2.0, 2.0, stages=(1.0,) * 8, head=0.5, measured={"devices": 4})
    four, two = made("1f1b", 4, 2).placement, made("1f1b", 2, 2).placement
    wide, narrow = measured.durations(four), measured.durations(two)
    assert (narrow["F"][0], wide["F"][0]) == (4, 2)  # of half and of a quarter of the model
    assert (2 * narrow["F"][2], 4 * wide["F"][4]) == (2, 2)  # of the whole head
    plain = Costs(stages=(1.0,) * 4, measured={"devices": 4})
    for costs, placement in ((plain, four), (measured, get_schedule("1f1b").placement(4))):
        with pytest.raises(ScheduleError, match=r"vocabulary_parallel_head .* 4 devices"):
            costs.durations(placement)


def test_parts_of_the_head_are_no_activations() -> None:
    timetable = made("1f1b", 4, 8)
    peaks = [peak_stages(order, stages=4) for order in timetable.orders]
    assert peaks == [*simulate(timetable).peak_activations] == [5, 4, 3, 2]


@pytest.mark.parametrize("name", ["1f1b", "bitpipe_zb"])
def test_a_wrong_stage_at_the_other_end_is_found(name: str) -> None:
    program = lower(made(name, 2, 2))
    stages = program.timetable.placement.op_stages
    changed = 0
    for device, instructions in enumerate(program.instructions):
        for at, instruction in enumerate(instructions):
            if instruction.other_stage is None:
                continue
            for other in (None, (instruction.other_stage + 1) % stages, stages):
                wrong = (*instructions[:at], instruction._replace(other_stage=other), *instructions[at + 1 :])
                rows = (*program.instructions[:device], wrong, *program.instructions[device + 1 :])
                with pytest.raises(ScheduleError, match=name):
                    check(dataclasses.replace(program, instructions=rows))
                changed += 1
    assert changed > 30


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved", "bitpipe_zb"])
@pytest.mark.parametrize("head", [0.5, (1.0, 2.0, 3.0)])
def test_a_head_without_parts_has_the_stages_of_the_error(name: str, head: Any) -> None:
    placement = get_schedule(name).placement(4)
    with pytest.raises(ScheduleError, match="vocabulary_parallel_head") as error:
        Costs(head=head).durations(placement)
    text = str(error.value).rpartition(" ")[2].rstrip(".")
    plain, last = Costs().durations(placement), parse_costs(text).durations(placement)
    factors = head if isinstance(head, tuple) else (head,) * 3
    for kind, factor in zip("FIW", factors, strict=True):
        assert (
            last[kind][-1] == pytest.approx(plain[kind][-1] + factor) and last[kind][:-1] == plain[kind][:-1]
        )


def test_a_head_has_a_time_without_costs() -> None:
    placement = made("1f1b", 4, 4).placement
    assert Costs().durations(placement) == Costs(head=TYPICAL_HEAD).durations(placement)


@pytest.mark.parametrize(("name", "peak"), [("1f1b", 4), ("zb_h1", 4), ("interleaved", 5.5)])
def test_a_limit_prevents_a_further_activation(name: str, peak: float) -> None:
    schedule, costs = get_schedule(name), Costs(head=0.5)
    free, limited = (
        simulate(schedule.dividing_head().timetable(4, 8, options, costs), costs)
        for options in ({}, {"max_activations": peak})
    )
    assert (max(free.peak_activations), max(limited.peak_activations)) == (peak + 1, peak)
    with pytest.raises(ScheduleError, match=rf"max_activations .*{peak:g} \(got 3\)"):
        schedule.dividing_head().timetable(4, 8, {"max_activations": 3}, costs)
    with pytest.raises(ScheduleError, match="max_activations"):
        schedule.timetable(4, 8, {"max_activations": peak})
    section = {"schedule": name, "pipeline_parallel_size": 4, "vocabulary_parallel_head": True}
    section["schedule_options"] = {"max_activations": peak}
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}
    plan = make_job_plan(load_config({**batch, "ds_ext": section}))
    assert max(plan.simulation.peak_activations) == peak


def test_steps_of_many_ops_try_a_further_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_parts, "_MAX_OPS", 1)
    simulation = simulate(made("1f1b", 4, 16, 1.0), Costs(head=1.0))
    assert simulation.makespan <= simulate(get_schedule("1f1b").timetable(4, 16)).makespan * 1.25
    assert simulation.peak_activations == (5, 4, 3, 2)
