"""Candidates of a search equal schedules, simulations and memory computed directly; the best is the best of all."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import SCHEDULES, Schedule, get_schedule
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.events import Workload
from ds_ext.pipe_schedules.list_scheduling.search import lower_bound
from ds_ext.pipe_schedules.placement import linear
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.planner.candidates import SAME, Candidates
from ds_ext.planner.memory import memory
from ds_ext.planner.request import Request
from ds_ext.planner.search import choose
from ds_ext.planner.stage_costs import stage_costs
from ds_ext.planner.training_sizes import TrainingSizes
from ds_ext.planner.variant import PREVIEWED
from tests.selection import select

ALL_OPS = 10**9  # "cheap_ops" with which every candidate is priced
MODEL = TrainingSizes(
    num_layers=48, hidden_size=1024, num_attention_heads=16, vocab_size=32000, seq_length=1024
)
SIZES = select(
    [(4, 8, 0.0), (4, 8, 0.3), (4, 6, 0.1), (2, 4, 0.0), (3, 7, 0.05), (1, 4, 0.0), (8, 16, 0.1)],
    [(4, 6, 0.1), (2, 4, 0.0), (3, 7, 0.05), (1, 4, 0.0)],
)
GB = 10**9


def check_prices(candidates: Candidates, request: Request) -> None:
    """Compare every priced row with its schedule, its simulation and its memory."""
    for row in candidates.ranked:
        if row.time is None:
            continue
        timetable = get_schedule(row.schedule).timetable(
            request.devices, request.micro_batches, row.options, row.costs
        )
        simulation = simulate(timetable, row.costs)
        assert (row.time, row.bubble) == (simulation.makespan, simulation.bubble)
        if request.sizes is not None:
            sizes = replace(request.sizes, recompute=row.recompute, stage_layers=row.layers)
            assert row.layers is not None and sum(row.layers) == request.sizes.num_layers
            assert row.memory_bytes == max(device.total for device in memory(timetable, sizes))


@pytest.mark.parametrize(("devices", "micro_batches", "comm"), SIZES)
def test_all_variants_are_priced_and_the_best_is_first(devices: int, micro_batches: int, comm: float) -> None:
    limit = 16 * GB
    request = Request(devices, micro_batches, Costs(comm=comm), MODEL, limit)
    candidates = choose(request)
    listed = [(row.schedule, dict(row.options), row.recompute) for row in candidates.ranked]
    expected = [
        (name, dict(options), recompute)
        for recompute in ("none", "full")
        for name, schedule in SCHEDULES.items()
        for options in schedule.variants(devices, micro_batches)
    ]
    assert sorted(map(str, listed)) == sorted(map(str, expected))
    check_prices(candidates, request)
    fits = [r for r in candidates.ranked if r.time is not None and (r.memory_bytes or 0) <= limit]
    best, least = candidates.best, min(r.time or 0.0 for r in fits)
    assert best is not None and best.memory_bytes is not None and best.memory_bytes <= limit
    assert (best.time or 0.0) <= least * (1 + SAME)
    equal = [r for r in fits if (r.time or 0.0) <= least * (1 + SAME)]
    assert best.memory_bytes == min(r.memory_bytes or 0 for r in equal)
    assert all(bool(r.refusal) == (r not in candidates.usable) for r in candidates.ranked)


def test_bitpipe_zb_is_the_best_with_free_messages_and_memory() -> None:
    candidates = choose(Request(4, 8))
    best = candidates.best
    # docs/schedules.md: (D-2)f/(4w) beyond ideal.
    assert best is not None
    assert (best.schedule, best.options, best.time) == ("bitpipe_zb", {"waves": 2}, 24.25)
    assert candidates.reason().startswith(f"{best.label}: ") and "zb_v, 5.2%" in candidates.reason()
    assert {row.recompute for row in candidates.ranked} == {"none"}


def test_less_memory_takes_more_time() -> None:
    request = Request(4, 8, Costs(comm=0.1), replace(MODEL, micro_batch=2))
    times = []
    for gigabytes in (40, 8, 5):
        best = choose(replace(request, memory_bytes=gigabytes * GB)).best
        assert best is not None and best.time is not None and (best.memory_bytes or 0) <= gigabytes * GB
        times.append(best.time)
    assert times == sorted(times) and len(set(times)) == 3

    nothing = choose(replace(request, memory_bytes=GB))
    assert nothing.best is None and nothing.smallest is not None
    least = min(row.memory_bytes for row in nothing.ranked if row.memory_bytes is not None)
    assert nothing.smallest.memory_bytes == least
    numbers = [float(number) for number in re.findall(r"(\d+\.\d) GB", nothing.reason())]
    assert numbers == pytest.approx([1.0, least / GB, least / GB - 1], abs=0.06)
    assert nothing.smallest.label in nothing.reason()

    only = choose(replace(request, memory_bytes=least + 1))
    assert only.best is not None and {row.memory_bytes for row in only.usable} == {least}
    assert nothing.smallest.label in {row.label for row in only.usable}
    assert only.reason().startswith(only.best.label)


def test_recomputation_costs_forward_time() -> None:
    request = Request(4, 8, sizes=replace(MODEL, attention_scores=True))
    rows = {r.recompute: r for r in choose(request).ranked if r.label == "1f1b"}
    assert set(rows) == {"none", "selective", "full"}
    # The head is V / (12h + 2s) = 2.23 layers and is not recomputed; the model is four D-ths with f = 1.
    head = 32000 / 14336
    expected = {
        "none": (0.0, (12, 13, 13, 10)),
        "selective": (1 / 7, (12, 13, 13, 10)),
        "full": (1.0, (12, 12, 13, 11)),
    }
    for kind, (repeated, layers) in expected.items():
        assert rows[kind].layers == layers
        times = rows[kind].costs.durations(linear(4))
        for stage, count in enumerate(layers):
            work = count * (3 + repeated) + 3 * head * (stage == 3)
            assert times["B"][stage] + times["F"][stage] == pytest.approx(work * 4 / (48 + head))
    ordered = [rows[kind] for kind in expected]
    assert [row.time for row in ordered] == sorted(row.time or 0.0 for row in ordered)
    sizes = [row.memory_bytes or 0 for row in ordered]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3
    assert {r.recompute for r in choose(replace(request, recompute=("full",))).ranked} == {"full"}


def test_an_interval_repeats_the_forwards_of_its_layers() -> None:
    """Layers 0, 3, 6 and 9 of 10 recompute."""
    sizes = replace(MODEL, num_layers=10, stage_layers=(4, 2, 3, 1), recompute="full", recompute_interval=3)
    costs = stage_costs(Costs(), sizes)
    times, head = costs.durations(linear(4)), sizes.head_work()
    for stage, (layers, repeated) in enumerate(((4, 2), (2, 0), (3, 1), (1, 1))):
        work = 3 * layers + repeated + 3 * head * (stage == 3)
        assert times["B"][stage] + times["F"][stage] == pytest.approx(work * 4 / (10 + head), rel=1e-6)


def test_ties_go_to_the_simplest() -> None:
    """On one device all orders take the same time, and most of them the same memory."""
    candidates = choose(Request(1, 4, Costs(comm=0.1), MODEL, cheap_ops=ALL_OPS))
    best = candidates.best
    assert best is not None and (best.schedule, best.stages) == ("1f1b", 1)
    equal = {
        c.schedule for c in candidates.usable if (c.time, c.memory_order) == (best.time, best.memory_order)
    }
    assert {"1f1b", "interleaved"} <= equal
    smallest = choose(Request(1, 4, Costs(comm=0.1), MODEL, GB)).smallest
    assert smallest is not None and smallest.schedule == "1f1b"


def test_duplicates_follow_the_candidates_that_are_too_large() -> None:
    limit = 6 * GB
    ranked = choose(Request(4, 8, Costs(comm=0.1), MODEL, limit, cheap_ops=ALL_OPS)).ranked
    sizes = [row.memory_bytes or 0 for row in ranked]
    groups = [2 * bool(row.refusal) - (size > limit) for row, size in zip(ranked, sizes, strict=True)]
    assert groups == sorted(groups)
    large = [size for size in sizes if size > limit]
    assert large == sorted(large)
    duplicates = [row for row, size in zip(ranked, sizes, strict=True) if row.refusal and 0 < size <= limit]
    assert duplicates


def refusals(devices: int, micro_batches: int, **model: Any) -> dict[tuple[str, str], str]:
    request = Request(devices, micro_batches, sizes=replace(MODEL, **model))
    return {(r.label, r.recompute): r.refusal for r in choose(request).ranked}


def test_refusals_are_one_sentence_with_the_numbers() -> None:
    odd_devices, odd_batch, few_layers = refusals(3, 7), refusals(4, 7), refusals(4, 8, num_layers=8)
    assert odd_devices["1f1b", "none"] == ""
    for found, label, words in (
        (odd_devices, "bitpipe mode=unit", ("bitpipe", "even")),
        (odd_devices, "interleaved chunks=2", ("interleaved", "3", "7")),
        (odd_batch, "bitpipe_zb waves=1", ("bitpipe_zb", "2 pipes", "7")),
        (few_layers, "bitpipe_zb waves=2", ("8 layers", "16 stages")),
    ):
        assert all(word in found[label, "none"] for word in words)
        for reason in found.values():
            assert not reason or (reason.endswith(".") and ". " not in reason)


@pytest.mark.parametrize("limit", [None, 9 * GB, 2 * GB])
@pytest.mark.parametrize(("devices", "micro_batches", "comm"), SIZES)
def test_bounds_exclude_no_winner(devices: int, micro_batches: int, comm: float, limit: int | None) -> None:
    request = Request(devices, micro_batches, Costs(comm=comm), MODEL, limit, cheap_ops=ALL_OPS)
    everything, pruned = choose(request), choose(replace(request, cheap_ops=0))
    assert pruned.best == everything.best
    if pruned.best is None:
        assert pruned.smallest == everything.smallest
    excluded = [row for row in pruned.ranked if row.unpriced]
    by_key = {(r.label, r.recompute): r for r in everything.ranked}
    for row in excluded:
        priced = by_key[row.label, row.recompute].time
        bound = re.search(r"at least ([\d.e+]+)", row.refusal)
        assert bound is not None and (priced is None or priced >= float(bound[1]) * (1 - 1e-3))
    if (devices, limit) == (4, None):
        assert excluded


def test_many_devices_need_few_planned_orders() -> None:
    candidates = choose(Request(32, 64, Costs(comm=0.05)))
    assert (
        candidates.best is not None and candidates.best.bubble is not None and candidates.best.bubble < 0.05
    )
    assert 1 <= sum(row.planned and row.time is not None for row in candidates.ranked) <= 3


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("costs", [Costs(), Costs(1, 1.3, 0.7), Costs(1, 2, 1, comm=0.1)], ids=str)
@pytest.mark.parametrize("name", sorted(n for n, s in SCHEDULES.items() if not s.planned and n != "fbd"))
def test_few_micro_batches_wait_no_longer_than_many(name: str, costs: Costs, slices: int) -> None:
    schedule = get_schedule(name)
    if slices > 1 and not schedule.has_slices:
        pytest.skip("no slices")
    for devices in (2, 4):
        few, many = PREVIEWED * devices, 4 * PREVIEWED * devices
        for options in schedule.variants(devices, many):
            waits, peaks = [], []
            for count in (few, many):
                timetable = schedule.timetable(devices, count, options, costs, slices)
                simulation = simulate(timetable, costs)
                least = lower_bound(
                    Workload(timetable.placement, count, costs.fit(timetable.placement), True, slices=slices)
                )
                waits.append(simulation.makespan - least)
                peaks.append(max(simulation.peak_activations))
            assert waits[0] <= waits[1] * (1 + SAME) + SAME and peaks[0] <= peaks[1]


def test_a_margin_bounds_the_loss() -> None:
    request = Request(4, 8, Costs(comm=0.02), MODEL, 30 * GB, cheap_ops=0)
    exact, near = choose(request), choose(replace(request, margin=0.01))
    assert exact.best is not None and near.best is not None
    assert (exact.best.time or 0.0) <= (near.best.time or 0.0) <= (exact.best.time or 0.0) * 1.0101
    assert sum(row.unpriced for row in near.ranked) > sum(row.unpriced for row in exact.ranked)


def test_settings_reproduce_the_priced_order() -> None:
    candidates = choose(Request(4, 6, Costs(backward_input=1.5, comm=0.25), MODEL, cheap_ops=ALL_OPS))
    for row in candidates.usable:
        schedule = get_schedule(row.schedule)
        assert simulate(schedule.timetable(4, 6, row.settings), row.costs).makespan == row.time
        assert ("costs" in row.settings) == schedule.planned
    settings = {r.label: r.settings for r in candidates.usable if r.recompute == "full"}["zb_v"]
    assert settings["costs"].startswith("f=1,b=2.5,w=1,comm=0.25,stages=0.9")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": 0}, r"devices: .*got 0"),
        ({"micro_batches": 0}, r"micro_batches: .*got 0"),
        ({"memory_bytes": 10}, r"memory limit: .*got 10 B"),
        ({"recompute": ("some",)}, r"recompute: .*got some.*none, selective, full"),
    ],
)
def test_wrong_requests(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        replace(Request(4, 8), **changes)


def test_a_schedule_that_fails_is_one_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: int, num_devices: int, micro_batches: int) -> object:
        raise ZeroDivisionError("no\nreason")

    others = {name: SCHEDULES[name] for name in ("1f1b", "bitpipe")}
    others["broken"] = Schedule("broken", broken, linear)
    monkeypatch.setattr("ds_ext.planner.variant.SCHEDULES", others)
    refused = {row.schedule: row.refusal for row in choose(Request(4, 8, cheap_ops=ALL_OPS)).ranked}
    assert re.search(r"^broken: .*ZeroDivisionError.*no reason.*test_search\.py, line \d+", refused["broken"])
    assert refused["1f1b"] == ""


def test_weight_gradients_at_once_are_no_better_than_whole_backwards() -> None:
    """A backward of recomputed layers takes as long as three forwards; docs/schedules.md has the figures."""

    def bubble(name: str, costs: Costs, **options: Any) -> float:
        return simulate(get_schedule(name).timetable(4, 8, options, costs), costs).bubble

    at_once, whole = Costs(backward_input=3, backward_weight=0), Costs().with_recompute(1.0)
    interleaved = bubble("interleaved", whole, chunks=4)
    assert bubble("zb_h1", at_once) == bubble("1f1b", whole) == pytest.approx(0.273, abs=5e-4)
    assert bubble("zb_v", at_once) == pytest.approx(0.22, abs=5e-4)
    assert interleaved == pytest.approx(0.086, abs=5e-4)
    assert interleaved <= bubble("bitpipe_zb", at_once) + 1e-9
