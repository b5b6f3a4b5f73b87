"""FBD without processes: its times, its ranks, what is refused."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from ds_ext.__main__ import main
from ds_ext.errors import ConfigError, ScheduleError
from ds_ext.parallel.fbd import DisaggregatedLayout, make_layout, place_by_hosts
from ds_ext.parallel.layout import data_parallel_size
from ds_ext.pipe_schedules import Op, get_schedule, timetable
from ds_ext.pipe_schedules.checks.program import check
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.draw.page import html
from ds_ext.pipe_schedules.inference import forward_timetable
from ds_ext.pipe_schedules.lowering import lower
from ds_ext.pipe_schedules.methods.fbd import most_ahead
from ds_ext.pipe_schedules.ops import Instruction
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.planner.fbd import comparison_note
from ds_ext.planner.memory import memory
from ds_ext.planner.training_sizes import TrainingSizes
from tests.plans import placement_of

MERGED = {"merge_forward_tensor_parallel": 2}


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "options", "units"),
    [(4, {}, 33), (2, MERGED, 28), (4, {"forward_slowdown": 3.0}, 39), (4, {"backward": "split"}, 30)],
)
def test_times_of_the_published_cases(stages: int, options: dict[str, object], units: int) -> None:
    """8 micro-batches. Forwards three times as slow cost what their start-up is longer, and nothing per micro-batch."""
    assert simulate(timetable("fbd", stages, 8, **options)).makespan == units


@pytest.mark.parametrize(("stages", "each", "k"), [*itertools.product([2, 3, 5, 8], [1, 2, 7], [1, 2, 3])])
def test_the_closed_form(stages: int, each: int, k: int) -> None:
    """(P - 1)f + N/k (f + b + w) + (P - 1)(b + w), and (k - 1)f until the last pipeline gets its first micro-batch."""
    costs = Costs(forward=1.0, backward_input=1.2, backward_weight=0.9)
    made = timetable("fbd", stages, each * k, backward_per_forward=k)
    time = (stages - 1) + each * 3.1 + (stages - 1) * 2.1 + (k - 1)
    assert simulate(made, costs).makespan == pytest.approx(time)


def test_backward_ranks_keep_one_micro_batch_and_forward_ranks_nothing() -> None:
    made = timetable("fbd", 4, 8)
    assert simulate(made).peak_activations == (0, 1) * 4
    sizes = TrainingSizes(num_layers=4, hidden_size=8, num_attention_heads=2, vocab_size=10, seq_length=4)
    for rank, need in enumerate(memory(made, sizes)):
        trains = bool(rank % 2)
        assert (need.activations > 0, need.gradients > 0, need.optimizer > 0) == (trains,) * 3
        assert need.weights > 0


def test_a_merged_forward_rank_has_the_whole_weights() -> None:
    sizes = TrainingSizes(
        num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=10, seq_length=4, tensor_parallel=2
    )
    merged, plain = (memory(timetable("fbd", 2, 4, **o), sizes)[0].weights for o in (MERGED, {}))
    assert plain < merged <= 2 * plain


def test_ahead_by_so_much_costs_no_time() -> None:
    """The bound of the hand-over, as an order: a forward waits for the repeated forward of so many before it."""
    for stages, n in [(4, 8), (6, 16)]:
        made = timetable("fbd", stages, n)
        end = {op: stop for spans in simulate(made).spans for op, _, stop in spans}
        first_needed = {
            m: end[Op("R", m, stages - 1)] - 1 for m in range(n)
        }  # start of the last stage's m-th
        for stage in range(stages - 1):
            room = most_ahead(stages, stage, spare=0)
            for m in range(room, n):
                taken = end[Op("R", m - room, stage + 1)]
                assert taken + (stages - 1 - stage) <= first_needed[m]


# --- the program ------------------------------------------------------------------------------------------------------


def test_the_program_of_a_stage() -> None:
    program = lower(timetable("fbd", 3, 2))
    assert check(program, link_credits=1).loss_devices == (5,)
    names = [[str(i) for i in instructions] for instructions in program.instructions]
    assert names[2][:4] == [
        "RecvActivation 0@1 from device 0",
        "F0@1",
        "SendActivation 0@1 to device 5",
        "RecvActivation 1@1 from device 0",
    ]
    assert names[3][:5] == [
        "RecvActivation 0@1 from device 0",
        "R0@1",
        "RecvGrad 0@1 from device 5",
        "B0@1",
        "SendGrad 0@1 to device 1",
    ]
    sync, end = Instruction("SyncWeights", stage=2, pipe=0, peer=5), Instruction("EndOfStep")
    assert program.instructions[4] == (sync, end)
    assert names[1][-5:-2] == ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
    assert program.instructions[1][-2:] == (Instruction("SyncWeights", stage=0, pipe=0, peer=0), end)


def test_an_evaluation_is_the_forward_ranks_alone() -> None:
    made = forward_timetable(get_schedule("fbd").placement(3, {"backward_per_forward": 2}), 5)
    assert check(lower(made)).loss_devices == (6,)
    assert [len(order) for order in made.orders] == [5, 0, 0] * 3


def test_the_dump_says_roles(capsys: pytest.CaptureFixture[str]) -> None:
    main(["dump", "fbd", "--stages", "2", "--micro-batches", "4", "--option", "backward_per_forward=2"])
    dump = json.loads(capsys.readouterr().out)
    assert (dump["stages"], dump["model_stages"], len(dump["ranks"])) == (2, 2, 6)
    assert [(c["rank"], c["stage"], c["role"]) for c in dump["chunks"]] == [
        (r, r // 3, "backward" if r % 3 else "forward") for r in range(6)
    ]
    found = {i["op"] for instructions in dump["ranks"] for i in instructions}
    assert {"ForwardPass", "RecomputeForward", "BackwardPass", "SyncWeights"} <= found
    assert [i["peer"] for i in dump["ranks"][0] if i["op"] == "SendActivation"] == [4, 5, 4, 5]


def test_the_page_draws_repeated_forwards() -> None:
    assert "repeated forward" in html([simulate(timetable("fbd", 2, 2))])


@pytest.mark.parametrize(
    ("ranks", "n", "options", "sentence"),
    [
        (1, 4, {}, r"2 .*got 1"),
        (2, 4, {"backward_per_forward": 3}, r"3 \(got 4\)\. Use 3 or 6"),
        (2, 1, {"backward_per_forward": 2}, r"got 1\)\. Use 2\."),
        (2, 4, {"backward_per_forward": 0}, r"1 .*got 0"),
        (2, 4, {"backward": "both"}, r"whole, split .*'both'"),
    ],
)
def test_sizes_that_do_not_fit(ranks: int, n: int, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ScheduleError, match=sentence):
        timetable("fbd", ranks, n, **options)


def test_a_backward_before_its_repeated_forward_is_shown() -> None:
    made = timetable("fbd", 2, 2)
    orders = list(made.orders)
    orders[3] = (orders[3][1], orders[3][0], *orders[3][2:])
    broken = type(made)(made.schedule, made.placement, made.micro_batches, tuple(orders))
    with pytest.raises(ScheduleError, match=r"device 3 .*B0@1 .*R0@1"):
        check(lower(broken))
    orders[3] = made.orders[3][1:]
    with pytest.raises(ScheduleError, match=r"0 at stage 1 \(device 3\).* R .*got B"):
        lower(type(made)(made.schedule, made.placement, made.micro_batches, tuple(orders)))


# --- ranks and groups -------------------------------------------------------------------------------------------------


def layout(stages: int, tp: int = 1, groups: int = 1, **options: object) -> DisaggregatedLayout:
    made = make_layout(get_schedule("fbd").placement(stages, options), tp, groups)
    assert isinstance(made, DisaggregatedLayout)
    return made


def test_the_published_layout_of_eight_ranks() -> None:
    groups = layout(4).groups()
    assert groups["pipeline"] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert groups["weights"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups["hand-over"] == [[0, 3], [2, 5], [4, 7]]
    assert groups["data"] == [[rank] for rank in range(8)]


def test_the_published_layout_with_tensor_parallelism() -> None:
    groups = layout(2, tp=2).groups()
    assert groups["tensor"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups["weights"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups["pipeline"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups["forward"] == [[0, 1, 4, 5]]


def test_the_published_layout_of_merged_forward_ranks_less_its_controller() -> None:
    made = layout(2, tp=2, **MERGED)
    groups = made.groups()
    assert made.world_size == 6
    assert groups["tensor"] == [[0], [1, 2], [3], [4, 5]]
    assert groups["pipeline"] == [[0, 3], [1, 4], [2, 5]]
    assert groups["weights"] == [[0, 1], [0, 2], [3, 4], [3, 5]]
    assert made.peers(0, 3) == (4, 5) and made.peers(5, 0) == (0,) and made.peers(0, 2) == (3,)


@pytest.mark.parametrize(
    ("stages", "tp", "merged", "k", "groups"),
    [*itertools.product([2, 3], [1, 2, 4], [False, True], [1, 2, 3], [1, 2])],
)
def test_every_rank_has_one_place_and_every_kind_of_group(
    stages: int, tp: int, merged: bool, k: int, groups: int
) -> None:
    made = layout(
        stages, tp, groups, merge_forward_tensor_parallel=tp if merged else 1, backward_per_forward=k
    )
    forward = 1 if merged else tp
    assert made.world_size == stages * groups * (forward + k * tp)
    table, world = made.groups(), list(range(made.world_size))
    for rank in world:
        assert made.rank(*made.coordinates(rank)) == rank
    for name in ("tensor", "pipeline", "data"):
        assert sorted(itertools.chain(*table[name])) == world
    assert sorted(table["forward"][0] + table["backward"][0]) == world
    assert [r for r in world if made.role(r) == "forward"] == sorted(table["forward"][0])
    assert len(table["weights"]) == stages * groups * tp
    if k > 1:
        assert sorted(itertools.chain(*table["mirror"])) == sorted(table["backward"][0])


def test_worlds_that_do_not_fit() -> None:
    place = get_schedule("fbd").placement(2, {"backward_per_forward": 2})
    assert data_parallel_size(12, place, 2) == 1 and data_parallel_size(24, place, 2) == 2
    with pytest.raises(ConfigError, match=r"world size: .* 2 x \(2 forward \+ 2 x 2 backward.*13.* 12 or 24"):
        data_parallel_size(13, place, 2)


def test_forward_ranks_on_the_hosts_that_are_named() -> None:
    """Two hosts of ranks 0-3 and 4-7: all forwards on the second, in order."""
    plain = layout(4)
    placed = place_by_hosts(plain, ["big.example"] * 4 + ["small.example"] * 4, ["small"])
    groups = placed.groups()
    assert groups["pipeline"] == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert groups["weights"] == [[4, 0], [5, 1], [6, 2], [7, 3]]
    assert [placed.role(rank) for rank in (0, 7)] == ["backward", "forward"]
    for rank in range(8):
        assert placed.rank(*placed.coordinates(rank)) == rank


@pytest.mark.parametrize("named", ["10.0.0.2", "fd00:0::2"])
def test_forward_ranks_on_the_host_with_an_address(named: str) -> None:
    """Addresses that begin alike are different hosts, whether hosts have names or are known by addresses."""
    plain = layout(4)
    addresses = [["10.0.0.1", "fd00::1"]] * 4 + [["10.0.0.2", "fd00::2"]] * 4
    by_address = place_by_hosts(plain, [own[0] for own in addresses], ["10.0.0.2"])
    assert by_address.groups()["pipeline"] == [[4, 5, 6, 7], [0, 1, 2, 3]]
    placed = place_by_hosts(plain, ["10-a"] * 4 + ["10-b"] * 4, [named], addresses)
    assert placed.groups() == by_address.groups()
    with pytest.raises(ConfigError, match=r"'10\.0\.0\.3'"):
        place_by_hosts(plain, ["10-a"] * 4 + ["10-b"] * 4, ["10.0.0.3"], addresses)


@pytest.mark.parametrize(
    ("hosts", "named", "values"),
    [
        (["a"] * 2 + ["b"] * 2, ["c"], "'c'.* a, b"),
        (["a"] * 3 + ["b"], ["b"], "b .*2 .*1 .* 2 "),
    ],
)
def test_hosts_that_do_not_fit(hosts: list[str], named: list[str], values: str) -> None:
    with pytest.raises(ConfigError, match=f"fbd.forward_hosts: .*{values}"):
        place_by_hosts(layout(2), hosts, named)


# --- the JSON ---------------------------------------------------------------------------------------------------------


def test_the_section() -> None:
    section = {"schedule": "fbd", "pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    fbd = {"merge_forward_tensor_parallel": True, "backward_per_forward": 3}
    place = placement_of({"ds_ext": {**section, "fbd": fbd}})
    assert place.forward is not None and (place.replicas, place.forward.merged) == (3, 2)
    assert placement_of({"ds_ext": section}).num_devices == 4


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (
            {"schedule": "1f1b", "fbd": {"forward_hosts": ["a"]}},
            r'^fbd\.forward_hosts: .*"1f1b"',
        ),
        (
            {"schedule": "1f1b", "fbd": {"backward_per_forward": 2}},
            r'^fbd\.backward_per_forward: .*"1f1b"',
        ),
        (
            {"fbd": {"backward_per_forward": 2}, "schedule_options": {"backward_per_forward": 3}},
            r"^schedule_options\.backward_per_forward: .* 2 \(got 3\)",
        ),
    ],
)
def test_sections_that_contradict_themselves(section: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        placement_of({"ds_ext": {"schedule": "fbd", "pipeline_parallel_size": 2, **section}})


def test_merging_another_number_than_there_is() -> None:
    with pytest.raises(ConfigError, match="must be 1 or tensor_parallel_size 4"):
        layout(2, tp=4, **MERGED)


# --- what it costs ----------------------------------------------------------------------------------------------------


def note_numbers(costs: Costs | None = None, n: int = 8, **options: object) -> list[float]:
    """Numbers of `compare`'s note on fbd with 4 stages: devices, ratio, ratio to recomputation, ..."""
    note = comparison_note(simulate(timetable("fbd", 4, n, **options), costs or Costs()))
    assert note is not None
    return [float(number) for number in re.findall(r"(?<!\w)\d+(?:\.\d+)?(?!\w)", note)]


def test_compare_prints_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """On equal devices with memory to spare it never pays: the published figures, 33 on 8 devices beside 33 on 4."""
    assert note_numbers() == [8, 2.0, 1.5, 4, 1]  # 4 activations do not fit, 1 is kept
    main(["compare", "1f1b", "fbd", "--stages", "4", "--micro-batches", "8"])
    note = comparison_note(simulate(timetable("fbd", 4, 8)))
    assert capsys.readouterr().out.splitlines()[-1] == note
    assert comparison_note(simulate(timetable("1f1b", 4, 8))) is None


def test_three_pipelines_of_one_forward_pipeline_cost_less_than_three_of_their_own() -> None:
    three, merged = note_numbers(n=24, backward_per_forward=3), note_numbers(merge_forward_tensor_parallel=8)
    assert three[1] < note_numbers()[1] and merged[0] == 4.5


def test_slow_messages_leave_something_for_forward_devices() -> None:
    """1F1B waits for slow messages, so forward devices may cost something."""
    *_, break_even, kept, own = note_numbers(Costs(comm=3.0), n=4, backward="split")
    assert 0 < break_even < 1 and (kept, own) == (4, 1)
