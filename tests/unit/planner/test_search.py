"""Choosing a schedule: the table against what the parts say themselves, and the best against an exhaustive look."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from ds_ext.config.batch_sizes import batch_sizes
from ds_ext.config.job import load_config
from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import SCHEDULES, Schedule, get_schedule
from ds_ext.pipe_schedules.costs import Costs, parse_costs
from ds_ext.pipe_schedules.list_scheduling import search as planning
from ds_ext.pipe_schedules.placement import linear
from ds_ext.pipe_schedules.simulate import simulate
from ds_ext.planner.candidates import (
    SAME,
    Choice,
    aligned,
    costs_text,
    describe_rows,
    format_bytes,
    parse_bytes,
)
from ds_ext.planner.job_plan import make_job_plan
from ds_ext.planner.memory import ModelSizes, memory
from ds_ext.planner.parallel_sizes import (
    Cluster,
    Cuts,
    forward_flops,
    job_section,
    join_reasons,
    message_bytes,
    parallel_sizes,
)
from ds_ext.planner.search import Request, choose
from tests.plans import placement_of

EVERYTHING = 10**9  # "cheap_ops" with which nothing is left out


@pytest.fixture(autouse=True)
def a_short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned is the same for the choice and for whom it is compared with, and the choice is of many."""
    monkeypatch.setattr(planning, "_MOST_OPS", 2_000)


MODEL = ModelSizes(layers=48, hidden=1024, heads=16, vocab=32000, seq=1024)
SIZES = [(4, 8, 0.0), (4, 8, 0.3), (4, 6, 0.1), (2, 4, 0.0), (3, 7, 0.05), (1, 4, 0.0), (8, 16, 0.1)]


def price(choice: Choice, request: Request) -> None:
    """Every row with a time must be what the schedule, the simulator and the memory model say."""
    for row in choice.table:
        if row.time is None:
            continue
        made = get_schedule(row.schedule).timetable(
            request.devices, request.micro_batches, row.options, row.costs
        )
        priced = simulate(made, row.costs)
        assert (row.time, row.bubble) == (priced.makespan, priced.bubble)
        if request.sizes is not None:
            sizes = replace(request.sizes, recompute=row.recompute, layers=row.layers)
            assert row.layers is not None and sum(row.layers) == request.sizes.layers
            assert row.memory_bytes == max(rank.total for rank in memory(made, sizes))


@pytest.mark.parametrize(("devices", "micro_batches", "comm"), SIZES)
def test_the_table_has_everything_and_the_best_is_the_best(
    devices: int, micro_batches: int, comm: float
) -> None:
    limit = parse_bytes("12GB")
    request = Request(devices, micro_batches, Costs(comm=comm), MODEL, limit)
    choice = choose(request)
    tried = [(row.schedule, dict(row.options), row.recompute) for row in choice.table]
    wanted = [
        (name, dict(options), recompute)
        for recompute in ("none", "full")
        for name, schedule in SCHEDULES.items()
        for options in schedule.variants(devices, micro_batches)
    ]
    assert sorted(map(str, tried)) == sorted(map(str, wanted))
    price(choice, request)
    fits = [r for r in choice.table if r.time is not None and (r.memory_bytes or 0) <= limit]
    best, least = choice.best, min(r.time or 0.0 for r in fits)
    assert best is not None and best.memory_bytes is not None and best.memory_bytes <= limit
    assert (best.time or 0.0) <= least * (1 + SAME)
    equals = [r for r in fits if (r.time or 0.0) <= least * (1 + SAME)]
    assert best.memory_bytes == min(r.memory_bytes or 0 for r in equals)
    assert all(bool(r.refusal) == (r not in choice.fitting) for r in choice.table)


def test_free_messages_and_room_for_two_models_mean_bitpipe_zb() -> None:
    choice = choose(Request(4, 8))
    assert choice.best is not None
    # docs/schedules.md: (D-2)f/(4w) beyond ideal.
    assert (choice.best.schedule, choice.best.options, choice.best.time) == (
        "bitpipe_zb",
        {"waves": 2},
        24.25,
    )
    assert choice.reason() == (
        "bitpipe_zb waves=2 takes the least time; the next schedule priced, zb_v, takes 5.2% longer."
    )
    assert {row.recompute for row in choice.table} == {"none"}


def test_less_memory_changes_the_choice_until_nothing_fits() -> None:
    found = {}
    for gigabytes in (40, 8, 5, 4, 1):
        choice = choose(Request(4, 16, Costs(comm=0.1), MODEL, gigabytes * 10**9))
        found[gigabytes] = choice
        if choice.best is not None:
            assert (choice.best.memory_bytes or 0) <= gigabytes * 10**9
    times = [c.best.time for c in found.values() if c.best is not None and c.best.time is not None]
    assert times == sorted(times) and len(set(times)) > 2
    nothing = found[1]
    assert nothing.best is None and nothing.nearest is not None
    least = min(row.memory_bytes for row in nothing.table if row.memory_bytes is not None)
    assert nothing.nearest.memory_bytes == least
    assert nothing.reason() == (
        f"no schedule fits 1.0 GB; the nearest, {nothing.nearest.label} with full recomputation, needs "
        f"{format_bytes(least)}, {format_bytes(least - 10**9)} too much."
    )


def test_recomputation_costs_forward_time() -> None:
    request = Request(4, 8, sizes=replace(MODEL, attention_scores=True))
    rows = {r.recompute: r for r in choose(request).table if r.label == "1f1b"}
    assert set(rows) == {"none", "selective", "full"}
    # The head is as much as V / (12h + 2s) = 2.23 layers, and not recomputed; the model is four D-ths of f = 1.
    head, again = 32000 / 14336, 1 / 7
    for (kind, extra), layers in zip(
        {"none": 0.0, "selective": again, "full": 1.0}.items(),
        [(12, 13, 13, 10), (12, 13, 13, 10), (12, 12, 13, 11)],
        strict=True,
    ):
        assert rows[kind].layers == layers
        times = rows[kind].costs.durations(linear(4))
        for stage, count in enumerate(layers):
            work = count * (3 + extra) + 3 * head * (stage == 3)
            assert times["B"][stage] + times["F"][stage] == pytest.approx(work * 4 / (48 + head))
    assert [rows[k].time for k in rows] == sorted(rows[k].time or 0.0 for k in rows)
    sizes = [rows[k].memory_bytes or 0 for k in rows]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3
    only = choose(replace(request, recompute=("full",)))
    assert {r.recompute for r in only.table} == {"full"}


def test_of_equals_the_simplest_is_chosen() -> None:
    """On one device all orders take the same time, and most of them the same memory."""
    choice = choose(Request(1, 4, Costs(comm=0.1), MODEL, cheap_ops=EVERYTHING))
    best = choice.best
    assert best is not None and (best.schedule, best.stages) == ("1f1b", 1)
    alike = {c.schedule for c in choice.fitting if (c.time, c.weight) == (best.time, best.weight)}
    assert {"1f1b", "interleaved"} <= alike
    nearest = choose(Request(1, 4, Costs(comm=0.1), MODEL, 10**9)).nearest
    assert nearest is not None and nearest.schedule == "1f1b"


def test_refusals_are_one_sentence_each() -> None:
    choice = choose(Request(3, 7, sizes=MODEL))
    reasons = {(r.label, r.recompute): r.refusal for r in choice.table}
    assert reasons["bitpipe mode=unit", "none"].startswith("bitpipe needs an even number of stages")
    assert reasons["interleaved chunks=2", "full"] == (
        "interleaved needs micro_batches to be a multiple of 3 (stages); got 7."
    )
    assert reasons["1f1b", "none"] == ""
    odd = {r.label: r.refusal for r in choose(Request(4, 7, sizes=MODEL)).table}
    assert odd["bitpipe_zb waves=1"] == "bitpipe_zb shares the micro-batches evenly between 2 pipes; got 7."
    layers = {r.label: r.refusal for r in choose(Request(4, 8, sizes=replace(MODEL, layers=8))).table}
    assert layers["bitpipe_zb waves=2"] == "8 layers are fewer than the 16 stages."
    for reason in [*reasons.values(), *odd.values(), *layers.values()]:
        assert not reason or (reason.endswith(".") and ". " not in reason)


@pytest.mark.parametrize("limit", [None, 30 * 10**9, 9 * 10**9, 2 * 10**9])
@pytest.mark.parametrize(("devices", "micro_batches", "comm"), SIZES)
def test_leaving_out_what_cannot_win_changes_nothing(
    devices: int, micro_batches: int, comm: float, limit: int | None
) -> None:
    request = Request(devices, micro_batches, Costs(comm=comm), MODEL, limit, cheap_ops=EVERYTHING)
    everything = choose(request)
    pruned = choose(replace(request, cheap_ops=0))
    assert pruned.best == everything.best
    if pruned.best is None:
        assert pruned.nearest == everything.nearest
    left_out = [row for row in pruned.table if row.refusal.startswith("Not planned: ")]
    by_key = {(r.label, r.recompute): r for r in everything.table}
    for row in left_out:
        whole, bound = by_key[row.label, row.recompute], row.refusal.split(" at least")[0].split()
        if "takes" in bound and whole.time is not None:
            assert whole.time >= float(bound[-1]) * (1 - 1e-3)
    if devices == 8 and limit is None:
        assert left_out


def test_many_devices_are_chosen_for_without_planning_what_cannot_win() -> None:
    choice = choose(Request(32, 64, Costs(comm=0.05)))
    assert choice.best is not None and choice.best.bubble is not None and choice.best.bubble < 0.05
    planned = [row for row in choice.table if row.planned and row.time is not None]
    assert 1 <= len(planned) <= 3 and len(choice.table) == len(choose(Request(4, 8)).table)


def test_a_job_plans_the_order_that_was_priced() -> None:
    choice = choose(Request(4, 8, Costs(backward_input=1.5, comm=0.25), MODEL, cheap_ops=EVERYTHING))
    for row in choice.fitting:
        schedule = get_schedule(row.schedule)
        assert simulate(schedule.timetable(4, 8, row.settings), row.costs).makespan == row.time
        assert ("costs" in row.settings) == schedule.planned
    text = {r.label: r.settings for r in choice.fitting if r.recompute == "full"}["zb_v"]
    assert text["costs"].startswith("f=1,b=2.5,w=1,comm=0.25,stages=0.9")


@pytest.mark.parametrize(
    ("request_of", "sentence"),
    [
        (lambda: Request(0, 8), "devices must be at least 1; got 0"),
        (lambda: Request(4, 0), "micro_batches must be at least 1; got 0"),
        (lambda: Request(4, 8, memory_bytes=10), "a memory limit needs the sizes of the model"),
        (lambda: Request(4, 8, recompute=("some",)), "recompute is of none, selective, full; got some"),
    ],
)
def test_wrong_requests(request_of: object, sentence: str) -> None:
    assert callable(request_of)
    with pytest.raises(ScheduleError, match=sentence):
        request_of()


def test_bytes_and_costs_as_text() -> None:
    assert [parse_bytes(t) for t in ("80GB", "1.5kb", "16 GiB", "2T", "7B")] == [
        80 * 10**9, 1500, 16 * 2**30, 2 * 10**12, 7
    ]  # fmt: skip
    assert [format_bytes(n) for n in (7, 1500, 2_340_000, 80e9, 1.2e12)] == [
        "7 B", "1.5 KB", "2.3 MB", "80.0 GB", "1.2 TB"
    ]  # fmt: skip
    for wrong in ("80", "", "GB", "-1GB", "0GB", "80XB"):
        with pytest.raises(ScheduleError, match="is written 80GB, 512MB or 16GiB"):
            parse_bytes(wrong)
    costs = Costs(forward=2.5, backward_weight=0.1, comm=1 / 3, jitter=0.1, seed=4)
    assert parse_costs(costs_text(costs)) == costs
    stages = Costs(stages=(0.1, 0.1, 0.1, 2.0, 1 / 3))
    assert (
        costs_text(stages).endswith(f",stages=0.1x3/2.0/{1 / 3!r}")
        and parse_costs(costs_text(stages)) == stages
    )
    with pytest.raises(ScheduleError, match="cannot be written as text"):
        costs_text(Costs(links={(0, 1): 0.5}))


def test_rows_are_aligned() -> None:
    assert aligned([["a", "", "bb"], ["ccc", "", "d"]], left=(0,)) == ["a    bb", "ccc   d"]
    head, first, *_ = describe_rows(choose(Request(4, 8)).table, unit=2)
    assert head.split() == ["schedule", "recompute", "time", "bubble", "memory"]
    assert first.split() == ["bitpipe_zb", "waves=2", "none", "48.5", "1.0%", "-"]


# --- sizes of a cluster ----------------------------------------------------------------------------------------------


CLUSTER = Cluster(devices=8, memory_bytes=20 * 10**9, batch=32, flops=100e12, bandwidth=10e9)


def cuts(**changes: object) -> Cuts:
    return parallel_sizes(replace(CLUSTER, **changes), MODEL)  # pyright: ignore[reportArgumentType]


def test_every_cut_uses_all_devices_and_fits_heads_layers_and_batch() -> None:
    found = cuts()
    sizes = {(c.tensor, c.pipeline, c.data) for c in found.found}
    everything = {(t, p, 8 // t // p) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) if 8 % (t * p) == 0}
    assert sizes == everything and not found.refused
    assert all(c.micro_batches * c.data == 32 for c in found.found)
    fits = [c.step_s or 0.0 for c in found.found if c.fits]
    assert fits == pytest.approx(sorted(fits), rel=1e-8) and len(fits) > 3


def test_what_does_not_divide_is_refused_with_its_numbers() -> None:
    found = parallel_sizes(replace(CLUSTER, devices=12, batch=30), replace(MODEL, layers=5))
    assert {c.tensor for c in found.found} == {1, 2, 4}
    assert {(c.pipeline, c.data) for c in found.found if c.tensor == 1} == {(2, 6), (3, 4), (4, 3)} - {(3, 4)}
    assert sorted(join_reasons(found.refused)) == [
        "16 heads do not divide by TP 3, 6",
        "30 samples in micro-batches of 1 do not divide by DP 4, 12",
        "5 layers are fewer than PP 6, 12",
    ]
    with pytest.raises(
        ScheduleError, match=r"plan: no way to cut 7 devices: .* layers are fewer than PP 7"
    ) as caught:
        parallel_sizes(replace(CLUSTER, devices=7), replace(MODEL, layers=5))
    assert str(caught.value).endswith(". Use --devices 6 or 8, or --global-batch-size 28 or 35.")
    assert parallel_sizes(replace(CLUSTER, devices=7, batch=28), replace(MODEL, layers=5)).found


def test_times_follow_from_operations_and_bandwidth() -> None:
    # Per layer 24 x 1024^3 + 4 x 1024^3 operations, and 2 x 1024 x 1024 x 32000 for the head.
    assert forward_flops(MODEL) == 48 * 28 * 2**30 + 2 * 2**20 * 32000
    assert message_bytes(MODEL) == 2 * 2**20
    [cut] = [c for c in cuts().found if (c.tensor, c.pipeline, c.data) == (2, 4, 1)]
    assert cut.forward_s == pytest.approx(forward_flops(MODEL) / 4 / 2 / 100e12)
    assert cut.row is not None
    assert cut.row.costs.comm * cut.forward_s == pytest.approx(message_bytes(MODEL) / 10e9, rel=1e-4)
    assert cut.step_s == pytest.approx((cut.row.time or 0.0) * cut.forward_s)


def test_the_head_is_on_the_last_stage_and_layers_make_room_for_it() -> None:
    """A head of 2.24 layers: no order beats the device with the most work, and the section cuts as was priced."""
    model = ModelSizes(layers=32, hidden=4096, heads=32, vocab=128256, seq=4096)
    found = parallel_sizes(Cluster(8, 80 * 10**9, 64, tensor_parallel=1), model)
    head, total = 128256 / (12 * 4096 + 2 * 4096), forward_flops(model)
    for cut in found.found:
        row = cut.row
        if row is None or row.layers is None or cut.step_s is None:
            continue
        assert sum(row.layers) == 32
        loads = [0.0] * cut.pipeline
        placement = get_schedule(row.schedule).placement(cut.pipeline, row.options)
        for pipe in placement.pipes:
            for stage, device in enumerate(pipe):
                loads[device] += row.layers[stage] + head * (stage == placement.stages - 1)
        share = max(loads) / placement.replicas / (32 + head)
        again = 4 / 3 if row.recompute == "full" else 1.0
        assert cut.step_s >= share * cut.micro_batches * 3 * total / 150e12 * (1 - 1e-6)
        even = (32 / cut.pipeline + head) / (32 + head) * cut.micro_batches * 3 * total / 150e12
        assert cut.pipeline == 1 or cut.step_s < even * again
        given = job_section(cut, model)["train"].get("stage_layers")
        assert given == (None if len(set(row.layers)) == 1 else ",".join(map(str, row.layers)))
    assert {cut.pipeline for cut in found.found} == {1, 2, 4, 8}


def test_with_a_margin_the_best_is_not_further_off() -> None:
    request = Request(4, 16, Costs(comm=0.02), MODEL, 30 * 10**9, cheap_ops=0)
    exact, near = choose(request), choose(replace(request, margin=0.01))
    assert exact.best is not None and near.best is not None
    assert (exact.best.time or 0.0) <= (near.best.time or 0.0) <= (exact.best.time or 0.0) * 1.0101
    left_out = [row for row in near.table if row.unpriced]
    assert len(left_out) > sum(row.unpriced for row in exact.table)
    assert all(
        "at least, not 1% less than another one" in row.refusal for row in left_out if row.recompute == "none"
    )


def test_what_is_the_only_one() -> None:
    request = Request(4, 8, Costs(comm=0.1), MODEL)
    rows = sorted((r for r in choose(request).table if r.memory_bytes), key=lambda r: r.memory_bytes or 0)
    limit = (rows[0].memory_bytes or 0) + 1
    assert choose(replace(request, memory_bytes=limit)).reason() == (
        f"{rows[0].label} is the only schedule that fits {format_bytes(limit)}."
    )


def test_one_schedule_that_fails_does_not_stop_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: int, num_devices: int, micro_batches: int) -> object:
        raise ZeroDivisionError("no\nreason")

    others = {**SCHEDULES, "broken": Schedule("broken", broken, linear)}
    monkeypatch.setattr("ds_ext.planner.search.SCHEDULES", others)
    table = {row.schedule: row.refusal for row in choose(Request(4, 8, cheap_ops=EVERYTHING)).table}
    assert re.fullmatch(
        r"broken: its code failed with ZeroDivisionError \(no reason\) in test_search.py, line \d+\.",
        table["broken"],
    )
    assert table["1f1b"] == ""
    with pytest.raises(ScheduleError) as caught:
        others["broken"].timetable(4, 8)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_one_size_of_tensor_parallelism() -> None:
    assert {c.tensor for c in cuts(tensor_parallel=2).found} == {2}
    with pytest.raises(ScheduleError, match="tensor parallel 3 does not divide 8 devices"):
        cuts(tensor_parallel=3)


def test_costs_are_ratios() -> None:
    one, other = (parallel_sizes(CLUSTER, MODEL, c) for c in (Costs(1, 1.5, 0.5), Costs(2, 3, 1)))
    assert one == other
    for wrong in (Costs(comm=1), Costs(links={(0, 1): 1.0}), Costs(stages=(1.0,)), Costs(forward=0)):
        with pytest.raises(ScheduleError, match="plan: costs are f, b and w relative to each other"):
            parallel_sizes(CLUSTER, MODEL, wrong)


@pytest.mark.parametrize("name", ["devices", "memory_bytes", "batch", "flops", "bandwidth"])
def test_a_cluster_has_positive_sizes(name: str) -> None:
    with pytest.raises(ScheduleError, match=f"plan: {name.replace('_', ' ')} must be more than 0; got 0"):
        cuts(**{name: 0})


def test_the_section_trains_what_was_planned() -> None:
    for cut in cuts().found:
        if not cut.fits or cut.row is None:
            continue
        config = {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 1,
            "ds_ext": json.loads(json.dumps(job_section(cut, MODEL))),
        }
        job = load_config(config)
        sizes = batch_sizes(config, placement_of(job).replicas, cut.data)
        assert sizes.micro_batches == cut.micro_batches
        made = make_job_plan(job, cut.tensor * cut.pipeline * cut.data).timetable
        assert simulate(made, cut.row.costs).makespan == cut.row.time
