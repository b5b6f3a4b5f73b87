"""Policies of dynamic schedules, without an engine: choices, limits, errors and makespans."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from ds_ext.errors import ConfigError, ScheduleError
from ds_ext.pipe_schedules import Op, Timetable, get_schedule, timetable
from ds_ext.pipe_schedules.checks.program import check
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.dynamic import DynamicRules
from ds_ext.pipe_schedules.events import Workload
from ds_ext.pipe_schedules.list_scheduling.dispatch import dispatch
from ds_ext.pipe_schedules.lowering import lower
from ds_ext.pipe_schedules.methods.dpp import run
from ds_ext.pipe_schedules.simulation import peak_stages, simulate
from tests.plans import placement_of
from tests.selection import select
from tests.timetables import followers

PLACEMENTS = ["linear", "interleaved", "v", "bidirectional_v"]
POLICIES = ["breadth", "depth", "group"]
DPP = get_schedule("dpp")
ZB = {"placement": "bidirectional_v", "backward": "split", "max_in_flight": 8, "max_activations": 6.0}


def rules_of(ranks: int, n: int, options: dict[str, Any]) -> DynamicRules:
    rules = DPP.make_dynamic_rules(ranks, n, options)
    assert rules is not None
    return rules


def random_case(random: Random) -> tuple[int, int, dict[str, Any]]:
    """Generate valid sizes and options."""
    placement = random.choice(PLACEMENTS)
    ranks, n = (
        random.choice([2, 4] if placement == "bidirectional_v" else [1, 2, 3, 4]),
        random.randint(1, 12),
    )
    options: dict[str, Any] = {
        "placement": placement,
        "policy": random.choice(POLICIES),
        "backward": random.choice(["whole", "split"]),
        "max_in_flight": random.choice([0, 2, 3, 5, 8]),
        "max_activations": random.choice([0.0, 2.0, 2.5, 4.0]),
    }
    return ranks, n, options


def test_links_of_random_latency_never_stop_a_step() -> None:
    """Random sizes, options, link times and jitter: each op runs once, after its inputs, within the limits."""
    for seed in range(select([10_000], [200])[0]):
        random = Random(seed)
        ranks, n, options = random_case(random)
        links = {
            (a, b): random.choice([0, 0.5, 3, 20 * random.random()])
            for a in range(ranks)
            for b in range(ranks)
            if a != b
        }
        costs = Costs(
            backward_input=random.random(),
            comm=random.random(),
            links=links,
            jitter=random.random(),
            seed=seed,
        )
        rules = rules_of(ranks, n, options)
        made = Timetable("dpp", rules.placement, n, run(rules, costs))
        check(lower(made))
        for device, order in enumerate(made.orders):
            assert peak_stages(order) <= rules.max_live[device], (seed, options)
            assert len(order) == rules.num_ops(device)


def random_run(rules: DynamicRules, random: Random) -> list[list[Op]]:
    """Messages and ends of ops occur in random order."""
    work = Workload(rules.placement, rules.micro_batches, Costs(), rules.split)
    devices = [rules.device(device) for device in range(rules.placement.num_devices)]
    for op in work.entries():
        devices[work.dependencies.device(op)].add_ready(op)
    orders: list[list[Op]] = [[] for _ in devices]
    under_way: list[Op] = []
    computing: dict[int, Op] = {}
    while True:
        for device, policy in enumerate(devices):
            if device not in computing and (op := policy.choose()) is not None:
                computing[device] = op
                orders[device].append(op)
        happens: list[Op | int] = [*under_way, *computing]
        if not happens:
            return orders
        event = random.choice(happens)
        if isinstance(event, Op):
            under_way.remove(event)
            devices[work.dependencies.device(event)].add_ready(event)
            continue
        op = computing.pop(event)
        devices[event].mark_done(op)
        for follower, at in followers(work, op):
            if at == event:
                devices[event].add_ready(follower)
            else:
                under_way.append(follower)


def test_whatever_overtakes_whatever_every_label_meets_its_activation() -> None:
    """1,000 runs with arrivals in random order: an op never runs before its input."""
    orders = set()
    for seed in range(1000):
        random = Random(seed)
        ranks, n, options = random_case(random)
        rules = rules_of(ranks, n, options)
        found = random_run(rules, random)
        made = Timetable("dpp", rules.placement, n, tuple(map(tuple, found)))
        # A valid order of all ranks exists: each op comes after exactly its own (stage, micro-batch)'s inputs.
        check(lower(made))
        simulate(made)
        assert all(peak_stages(order) <= rules.max_live[d] for d, order in enumerate(made.orders)), (
            seed,
            options,
        )
        orders.add(made.orders)
    assert len(orders) > 800  # of small pipelines many are alike


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_simulation_is_the_run_of_the_policies(placement: str) -> None:
    """The simulator computes the starts and ends of the run of the policies."""
    costs = Costs(backward_input=1.3, backward_weight=0.8, comm=0.5, jitter=0.3, seed=4)
    options = {"placement": placement, "backward": "split"}
    made = DPP.timetable(4, 8, options, costs)
    rules = rules_of(4, 8, options)
    work = Workload(rules.placement, 8, costs, rules.split, jittered=True)
    live = dispatch(work, [rules.device(d) for d in range(4)])
    assert live is not None and live.orders == made.orders
    assert simulate(made, costs).makespan == pytest.approx(live.makespan)
    spans = {op: (start, end) for row in simulate(made, costs).spans for op, start, end in row}
    assert all(spans[need][1] <= spans[op][0] for op in spans for need, _ in made.dependencies.needs(op))


@pytest.mark.parametrize(
    ("static", "n", "options", "free", "slow"),
    [
        ("1f1b", 8, {}, (33, 33), (41, 36)),
        ("1f1b", 16, {}, (57, 57), (71, 60)),
        ("interleaved", 8, {"placement": "interleaved", "policy": "breadth"}, (28.5, 28.5), (35.5, 31.5)),
        ("interleaved", 16, {"placement": "interleaved"}, (52.5, 52.5), (59.5, 59)),
        ("bitpipe_zb", 8, ZB, (24.5, 24.5), (30.5, 26.5)),
        ("bitpipe_zb", 16, ZB, (48.5, 48.5), (58.5, 50.5)),
    ],
)
def test_late_messages_cost_less_than_in_the_static_order(
    static: str, n: int, options: dict[str, Any], free: tuple[float, float], slow: tuple[float, float]
) -> None:
    """Makespans of docs/dpp.md with free messages and with messages of half a forward."""
    planned = timetable(static, 4, n)
    for costs, expected in ((Costs(), free), (Costs(comm=0.5), slow)):
        found = simulate(DPP.timetable(4, n, options, costs), costs)
        assert (simulate(planned, costs).makespan, found.makespan) == expected
        assert max(found.peak_activations) <= options.get("max_activations", 8)


def test_who_waits_admits_no_more_than_max_in_flight() -> None:
    made = DPP.timetable(4, 16, {"max_in_flight": 5}, Costs(comm=3.0))
    assert simulate(made).peak_activations[0] == 5
    made = DPP.timetable(4, 16, {"placement": "bidirectional_v", "max_in_flight": 3}, Costs(comm=3.0))
    assert max(simulate(made).peak_activations) <= 3


def test_whole_numbers_may_be_written_as_4e9() -> None:
    """JSON and command lines may use 4e9; fractions are rejected."""
    given = DPP.resolve_options({"max_in_flight": 8.0})["max_in_flight"]
    assert (given, type(given)) == (8, int)
    assert get_schedule("interleaved").placement(4, {"chunks": 3.0}).stages == 12
    for wrong in (4.5, float("inf"), float("nan"), "4e9", True):
        with pytest.raises(ScheduleError, match=r"integer .* 0 \(got"):
            DPP.resolve_options({"max_in_flight": wrong})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_in_flight": 1, "placement": "bidirectional_v"},
            r"max_in_flight .*2 \(got 1\)",
        ),
        ({"max_activations": 0.5}, r"max_activations .*got 0\.5.* 1 "),
        ({"placement": "v", "max_activations": 0.9}, r"each of the 2 stages .* Use at least 1 "),
        ({"placement": "w"}, r"linear, interleaved, v, bidirectional_v .*'w'"),
        ({"chunks": 4}, r"chunks .*4 .*linear"),
        ({"follow": True}, r"'follow'"),
        ({"max_bytes": 4_000_000_000}, r"'max_bytes'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        DPP.timetable(4, 8, options)


def test_an_odd_number_of_devices_for_two_pipes() -> None:
    with pytest.raises(ScheduleError, match=r"got 3.* 2 or 4"):
        DPP.placement(3, {"placement": "bidirectional_v"})


def test_a_transport_that_cannot_be_polled() -> None:
    section = {"schedule": "dpp", "pipeline_parallel_size": 4, "transport": "torch"}
    with pytest.raises(ConfigError, match=r'"dpp".*"torch"'):
        placement_of({"ds_ext": section})
    assert placement_of({"ds_ext": {**section, "transport": "shm"}}).stages == 4
