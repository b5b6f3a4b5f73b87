"""Orders of the schedules: published tables, closed forms of makespan and activations, placements."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import SCHEDULES, Chunk, Op, Placement, get_schedule, methods, timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.definition import Option
from ds_ext.pipe_schedules.draw.grid import time_grid
from ds_ext.pipe_schedules.placement import bidirectional_v, linear, looped
from ds_ext.pipe_schedules.registry import schedule
from ds_ext.pipe_schedules.simulation import simulate

# BitPipe at D = 4, N = 4: F or B, pipe (down, up), index in the pipe, half (a first, b second visit). A column is one
# chunk forward; a backward takes two, and "=" is its second where the header has a column for it.
STARTS = (
    "0    1    2    3    4    5    6    7    8    9    10   11   12   13   14   16   18   20   22   24   26"
)
BITPIPE = """
Fd0a Fd1a .    Fu0a Fu0b Fu1a Fu1b Fd0b Bd0b =    Fd1b Bd1b =    .    Bu0b Bu0a Bu1b Bu1a Bd0a .    Bd1a
.    Fd0a Fu0a Fd1a Fu1a Fu0b Fd0b Fu1b Fd1b .    Bd0b =    Bu0b =    Bd1b Bu1b Bu0a Bd0a Bu1a Bd1a .
.    Fu0a Fd0a Fu1a Fd1a Fd0b Fu0b Fd1b Fu1b .    Bu0b =    Bd0b =    Bu1b Bd1b Bd0a Bu0a Bd1a Bu1a .
Fu0a Fu1a .    Fd0a Fd0b Fd1a Fd1b Fu0b Bu0b =    Fu1b Bu1b =    .    Bd0b Bd0a Bd1b Bd1a Bu0a .    Bu1a
"""


def bitpipe_op(token: str, rank: int) -> Op:
    kind, pipe, index, half = token
    device = rank if pipe == "d" else 3 - rank
    return Op(kind, int(index) + (0 if pipe == "d" else 2), device if half == "a" else 7 - device)


def test_bitpipe_is_the_published_timetable() -> None:
    simulation = simulate(timetable("bitpipe", 4, 4))
    for rank, row in enumerate(BITPIPE.strip().splitlines()):
        cells = zip(STARTS.split(), row.split(), strict=True)
        expected = [(bitpipe_op(token, rank), float(start)) for start, token in cells if token not in ".="]
        # A chunk is half a device's share, so one unit of the table is half a unit of cost.
        assert [(op, start * 2) for op, start, _ in simulation.spans[rank]] == expected
    assert simulation.makespan * 2 == 28
    assert simulation.bubble == pytest.approx(4 / 28)


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("units", [1, 2, 4])
def test_bitpipe_time_and_memory(ranks: int, units: int) -> None:
    n = ranks * units
    simulation = simulate(timetable("bitpipe", ranks, n))
    assert simulation.makespan * 2 == 6 * n + (units + 1) * (ranks - 2)
    assert simulation.ideal * 2 == 6 * n
    # Live chunks: 3D/2 + 1 on the outer devices, 2D on the two central ones, whatever N is.
    expected = [3 * ranks // 2 + 1 + min(r, ranks - 1 - r) for r in range(ranks)]
    assert [peak * 2 for peak in simulation.peak_activations] == expected
    # 2D - 2 remote hops each way: the turn is on one device.
    assert simulation.messages == n * 2 * (2 * ranks - 2)


def test_bitpipe_peak_at_four_ranks() -> None:
    assert [2 * p for p in simulate(timetable("bitpipe", 4, 4)).peak_activations] == [7, 8, 8, 7]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bitpipe_bubble_formula_at_one_unit(ranks: int) -> None:
    assert simulate(timetable("bitpipe", ranks, ranks)).bubble == pytest.approx((ranks - 2) / (4 * ranks - 2))


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("ranks", "n"), [(1, 1), (2, 3), (4, 4), (4, 8), (5, 2), (8, 16)])
def test_linear_schedules_time(name: str, ranks: int, n: int) -> None:
    costs = Costs(forward=2, backward_input=3, backward_weight=2.5)
    simulation = simulate(timetable(name, ranks, n), costs)
    assert simulation.makespan == pytest.approx((n + ranks - 1) * 7.5)
    assert simulation.bubble == pytest.approx((ranks - 1) / (n + ranks - 1))


@pytest.mark.parametrize(("ranks", "n"), [(1, 3), (4, 4), (4, 9), (8, 8)])
def test_linear_schedules_memory(ranks: int, n: int) -> None:
    assert simulate(timetable("1f1b", ranks, n)).peak_activations == tuple(
        min(ranks - r, n) for r in range(ranks)
    )
    assert simulate(timetable("gpipe", ranks, n)).peak_activations == (n,) * ranks


@pytest.mark.parametrize("slices", [1, 2, 4, 5])
@pytest.mark.parametrize(("ranks", "n"), [(1, 1), (2, 3), (4, 8), (5, 2), (8, 4), (4, 1)])
def test_time_and_memory_with_slices(ranks: int, n: int, slices: int) -> None:
    """1F1B and GPipe: 3N + 3(D-1)/k. 1F1B keeps (D - device - 1 + k)/k activations."""
    one, gpipe, zb_h1 = (
        simulate(get_schedule(name).timetable(ranks, n, slices=slices)) for name in ("1f1b", "gpipe", "zb_h1")
    )
    assert one.makespan == pytest.approx(3 * n + 3 * (ranks - 1) / slices)
    assert gpipe.makespan == pytest.approx(one.makespan)
    live = [min((ranks - device - 1 + slices) / slices, n) for device in range(ranks)]
    assert one.peak_activations == pytest.approx(live)
    assert gpipe.peak_activations == pytest.approx([n] * ranks)
    assert one.messages == gpipe.messages == zb_h1.messages == 2 * n * slices * (ranks - 1)
    if n * slices >= ranks + slices - 1:
        assert zb_h1.makespan == pytest.approx(3 * n + (ranks - 1) / slices)
        assert zb_h1.peak_activations == pytest.approx([live[0]] * ranks)


@pytest.mark.parametrize(
    ("name", "ranks", "n", "activations", "bubble"),
    [
        ("1f1b", 4, 8, 1.75, 0.086),
        ("zb_v", 4, 8, 2.0, 0.0154),
        ("bitpipe_zb", 4, 8, 2.5, 0.008),
        ("zb_v", 8, 16, 3.0, 0.02),
        ("zb_v", 8, 4, 3.0, 0.07),
        ("bitpipe_zb", 8, 4, 3.25, 0.035),
    ],
)
def test_four_slices_leave_small_bubbles(
    name: str, ranks: int, n: int, activations: float, bubble: float
) -> None:
    method = get_schedule(name)
    options = {"max_activations": activations} if "max_activations" in method.options else {}
    simulation = simulate(method.timetable(ranks, n, options, slices=4))
    assert simulation.bubble <= bubble
    assert max(simulation.peak_activations) <= activations


def test_schedules_without_slices_name_those_that_have_them() -> None:
    names = [name for name, method in sorted(SCHEDULES.items()) if method.has_slices]
    assert names == ["1f1b", "bitpipe", "bitpipe_zb", "gpipe", "interleaved", "zb_h1", "zb_v"]
    for name in SCHEDULES.keys() - {*names}:
        with pytest.raises(
            ScheduleError, match=rf"^{name}: sequence_slices .*1 .*got 2.* {', '.join(names)}\."
        ):
            get_schedule(name).timetable(4, 8, slices=2)
    with pytest.raises(ScheduleError, match=r"sequence_slices .*1 .*got 0"):
        get_schedule("1f1b").timetable(4, 8, slices=0)
    with pytest.raises(ScheduleError, match=r"sequence_slices .*greedy.*got 2"):
        get_schedule("bitpipe").timetable(4, 8, slices=2)
    with pytest.raises(ScheduleError, match=r"4 stages x 8 micro-batches x 1,000,000 slices"):
        get_schedule("1f1b").timetable(4, 8, slices=10**6)


def test_an_option_slices_keeps_its_value() -> None:
    """Schedules of users may have had an option of that name."""
    options = {"slices": Option(3, 1, "forwards in flight")}
    method = replace(get_schedule("1f1b"), name="with_option", options=options)
    assert not method.has_slices
    assert len(method.timetable(2, 2).orders[0]) == 2 * 2 * 3
    with pytest.raises(ScheduleError, match=r"^with_option: sequence_slices .*got 2"):
        method.timetable(2, 2, slices=2)


def test_an_op_unpacked_into_three_fields_gets_their_names() -> None:
    method = get_schedule("1f1b")

    def old(device: int, num_devices: int, micro_batches: int) -> list[Op]:
        return [
            Op(kind, m, stage)
            for kind, m, stage in method.generate(device, num_devices, micro_batches, slices=1)  # type: ignore[misc]
        ]

    old_schedule = replace(method, name="old", generate=old)
    with pytest.raises(
        ScheduleError, match=r"^old: .*ValueError .*kind, micro_batch, stage.*slice.*line \d+"
    ):
        old_schedule.timetable(2, 2)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("ranks", "n"), [(2, 2), (4, 4), (4, 12), (8, 8)])
def test_interleaved_time(ranks: int, n: int, chunks: int) -> None:
    simulation = simulate(timetable("interleaved", ranks, n, chunks=chunks))
    assert simulation.makespan == pytest.approx(n * 3 + (ranks - 1) * 3 / chunks)
    assert simulation.messages == n * 2 * (ranks * chunks - 1)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_interleaved_memory(ranks: int, chunks: int) -> None:
    simulation = simulate(timetable("interleaved", ranks, 2 * ranks, chunks=chunks))
    live = [2 * (ranks - r - 1) + (chunks - 1) * ranks + 1 for r in range(ranks)]
    assert simulation.peak_activations == pytest.approx([n / chunks for n in live])


@pytest.mark.parametrize(("ranks", "last_win"), [(4, 3), (6, 2), (8, 2), (16, 2)])
def test_from_which_n_interleaved_is_faster_than_bitpipe(ranks: int, last_win: int) -> None:
    """docs/schedules.md, "Which schedule"."""
    for units in range(1, 6):
        n = units * ranks
        bitpipe, interleaved = (
            simulate(timetable(name, ranks, n)).makespan for name in ("bitpipe", "interleaved")
        )
        assert (bitpipe < interleaved) == (units <= last_win)


def test_what_slow_links_cost() -> None:
    """docs/schedules.md, "Which schedule"."""
    makespans = [
        [simulate(timetable(name, 8, 16), Costs(comm=comm)).makespan for comm in (0, 0.25)]
        for name in ("gpipe", "1f1b", "interleaved", "bitpipe")
    ]
    assert makespans == [[69, 72.5], [69, 79], [58.5, 66], [57, 72]]


def test_bitpipe_placement_table() -> None:
    """Chunks c0..c3 of every device: down first half, up first half, down second half, up second half."""
    assert bidirectional_v(4).chunks == (
        (Chunk(0, 0), Chunk(3, 1), Chunk(7, 0), Chunk(4, 1)),
        (Chunk(1, 0), Chunk(2, 1), Chunk(6, 0), Chunk(5, 1)),
        (Chunk(2, 0), Chunk(1, 1), Chunk(5, 0), Chunk(6, 1)),
        (Chunk(3, 0), Chunk(0, 1), Chunk(4, 0), Chunk(7, 1)),
    )


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_mirror_devices_hold_the_same_stages(ranks: int) -> None:
    placement = bidirectional_v(ranks)
    assert placement.replica_groups == (
        ((0, 1),) if ranks == 2 else tuple((d, ranks - 1 - d) for d in range(ranks // 2))
    )
    for d in range(ranks):
        assert placement.stages_of(d) == placement.stages_of(ranks - 1 - d)
        assert placement.pipes[0][ranks - 1] == placement.pipes[0][ranks]  # the turn needs no message


def test_other_placements() -> None:
    assert linear(3).pipes == ((0, 1, 2),)
    assert looped(2, 3).pipes == ((0, 1, 0, 1, 0, 1),)
    assert looped(2, 3).stages_of(1) == (1, 3, 5)
    assert looped(2, 3).chunk_index(0, 4, 0) == 2
    assert linear(3).replica_groups == ((0,), (1,), (2,))


def test_pipes_carry_disjoint_consecutive_micro_batches() -> None:
    made = timetable("bitpipe", 4, 8)
    assert [made.pipe(m) for m in range(8)] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "options", "sentence"),
    [
        ("bitpipe", 5, 5, {}, r"pipeline_parallel_size .*got 5.* 4 or 6"),
        ("bitpipe", 1, 1, {}, r"pipeline_parallel_size .*got 1.* 2\."),
        (
            "bitpipe",
            4,
            6,
            {},
            r"micro_batches .*4.*got 6.* 4 or 8",
        ),
        ("chimera", 3, 3, {}, r"pipeline_parallel_size .*got 3.* 2 or 4"),
        ("bitpipe_zb", 3, 3, {}, r"pipeline_parallel_size .*got 3.* 2 or 4"),
        ("bitpipe_zb", 4, 4, {"waves": 0}, r"option waves .* 1 .*got 0"),
        ("zb_v", 3, 4, {"max_activations": 0.5}, r"max_activations .*got 0\.5"),
        (
            "bitpipe",
            4,
            2,
            {},
            r"4.*got 2.* 4.*greedy",
        ),
        ("bitpipe", 4, 0, {}, r"micro_batches .*1 .*got 0"),
        ("bitpipe", 4, 4, {"mode": "gready"}, "option mode .*unit, greedy .*'gready'"),
        (
            "interleaved",
            3,
            4,
            {},
            r"3.*got 4.* 3 or 6",
        ),
        ("interleaved", 2, 2, {"chunks": 0}, r"option chunks .* 1 .*got 0"),
        ("interleaved", 2, 2, {"chunks": True}, r"option chunks .*got True"),
        (
            "interleaved",
            2,
            2,
            {"chunk": 2},
            r"'chunk' .*'chunks'.* chunks\.",
        ),
        ("gpipe", 2, 2, {"chunks": 2}, "gpipe: .*'chunks'.* none"),
        ("gpipe", 0, 2, {}, r"pipeline_parallel_size .*1 .*got 0"),
        ("gpipe", 2, 0, {}, r"micro_batches .*1 .*got 0"),
    ],
)
def test_sizes_that_do_not_fit(
    name: str, ranks: int, micro_batches: int, options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ScheduleError, match=sentence):
        get_schedule(name).timetable(ranks, micro_batches, options)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ScheduleError, match=r"'bitpip' .*'bitpipe'.* 1f1b, "):
        get_schedule("bitpip")
    assert get_schedule("BitPipe").name == "bitpipe"


def test_a_name_is_registered_by_one_module_only() -> None:
    def other(device: int, num_devices: int, micro_batches: int) -> itertools.chain[Op]:
        return itertools.chain()

    with pytest.raises(ScheduleError, match=r"'gpipe'.* ds_ext\.pipe_schedules\.methods\.gpipe"):
        schedule("gpipe", place=linear)(other)


PICTURE = re.compile(r"(?:^    device .*\n)+", re.MULTILINE)
METHODS = sorted({one.generate.__module__ for one in SCHEDULES.values()})


@pytest.mark.parametrize("module", METHODS)
def test_the_pictures_in_the_file_are_what_show_prints(module: str) -> None:
    """The docstring has a picture of every schedule of the file, in order, or no picture."""
    drawn = [one for one in SCHEDULES.values() if one.generate.__module__ == module]
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text())
    found = PICTURE.findall(f"{ast.get_docstring(tree, clean=False)}\n")
    assert len(found) in (0, len(drawn))
    for made, picture in zip(drawn, found, strict=False):
        lines = picture.splitlines()
        devices = made.placement(2).num_devices // 2  # of a stage
        numbers = [int(cell) for line in lines for cell in re.findall(r"\d+", line.split(maxsplit=2)[2])]
        grid = time_grid(simulate(made.timetable(len(lines) // devices, 1 + max(numbers))))
        assert [line.strip() for line in lines] == grid.splitlines(), f"draw it as\n{grid}"


def test_every_file_of_methods_registers_a_schedule_with_a_summary() -> None:
    files = {path.stem for path in Path(methods.__path__[0]).glob("*.py")} - {"__init__"}
    assert {module.rpartition(".")[2] for module in METHODS} == files
    assert all(one.summary for one in SCHEDULES.values())


def test_a_placement_is_for_as_many_devices_as_asked_for() -> None:
    """The fixed placement of docs/add_a_schedule.md supports two devices only."""
    method = get_schedule("1f1b")
    fixed = replace(method, name="fixed", place=lambda num_devices: Placement(((0, 1, 1, 0),)))
    assert fixed.placement(2).stages == 4
    with pytest.raises(ScheduleError, match=r"fixed: .* 2 .*pipeline_parallel_size 4"):
        fixed.placement(4)
    wrong = replace(method, name="wrong", place=lambda num_devices: Placement(((1 // (num_devices - 4),),)))
    with pytest.raises(ScheduleError, match=r"^wrong: .*ZeroDivisionError .*test_schedules\.py, line \d+\.$"):
        wrong.placement(4)
