"""Timetables as text, in the format of ds_ext and of torch.distributed.pipelining."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ds_ext.errors import ConfigError, ScheduleError
from ds_ext.pipe_schedules import SCHEDULES, Op, Placement, Timetable, timetable
from ds_ext.pipe_schedules.checks.program import check, check_timetable
from ds_ext.pipe_schedules.files import read_timetable
from ds_ext.pipe_schedules.lowering import lower
from ds_ext.pipe_schedules.placement import bidirectional_linear, bidirectional_v, linear, looped
from ds_ext.pipe_schedules.simulation import simulate
from ds_ext.pipe_schedules.text import dumps, loads, torch_csv
from tests.plans import placement_of, timetable_of

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}

MADE = [timetable(name, 4, 8) for name in sorted(SCHEDULES)]


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 12))
def test_what_is_written_is_read(name: str, ranks: int, micro_batches: int) -> None:
    try:
        made = timetable(name, ranks, micro_batches)
    except ScheduleError:
        assume(False)
        raise
    assert loads(dumps(made)) == made
    if made.placement.replicas == 1 and made.placement.forward is None:
        assert loads(torch_csv(made), name) == made


ops = st.builds(Op, st.sampled_from("FBIW"), st.integers(0, 99), st.integers(0, 999), st.integers(0, 9))


@given(
    st.lists(st.lists(ops, max_size=9).map(tuple), min_size=2, max_size=2).filter(any),
    st.sampled_from([linear(2), looped(2, 2), bidirectional_v(2), Placement(((1, 1), (0, 1)))]),
    st.text(st.characters(codec="utf-8").filter(str.isprintable)),
    st.integers(1, 10**4),
    st.integers(1, 9),
)
def test_any_timetable_round_trips_also_a_wrong_one(
    ranks: list[tuple[Op, ...]], placement: Placement, name: str, micro_batches: int, slices: int
) -> None:
    made = Timetable(name, placement, micro_batches, tuple(ranks), slices)
    assert loads(dumps(made)) == made


def test_the_text() -> None:
    assert dumps(timetable("bitpipe", 2, 2)).splitlines()[:2] == [
        "# timetable schedule=bitpipe micro_batches=2 pipes=0,1,1,0;1,0,0,1",
        "F0@0, F1@1, F1@2, F0@3, B0@3, B1@2, B1@1, B0@0",
    ]
    assert torch_csv(timetable("1f1b", 2, 2)) == "0F0,0F1,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1,\r\n"


@pytest.mark.parametrize(
    "text",
    [
        "F0@0 F1@0 . . B0@0 . B1@0\n. F0@1 B0@1 F1@1 B1@1\n",
        "\ufeff0F0,0F1,,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1\r\n\r\n",
        '# by hand\n"0F0","F1@0",,"0B0","0B1"\n\n# and by torch, with communication\n'
        "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1F1,1B1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD\n",
        "0F0,0F1,0B0,0B1\n1UNSHARD,1F0,( 1B0; 1F1 )OVERLAP_F_B,1B1,1RESHARD\n",
        "# timetable micro_batches=2\nF0@0,F1@0,B0@0,B1@0\nF0@1,B0@1,F1@1,B1@1",
    ],
)
def test_what_people_and_torch_write(text: str) -> None:
    assert loads(text, "1f1b") == timetable("1f1b", 2, 2)


def test_two_pipes_from_a_header() -> None:
    made = loads("# timetable pipes=0,1;1,0\nF0@0 F1@1 B1@1 B0@0\n1F0 0F1 1B0 0B1\n")
    assert (made.schedule, made.micro_batches) == ("timetable", 2)
    assert [made.pipe(m) for m in (0, 1)] == [0, 1]
    assert check(lower(made)).messages == 4


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("", (1, 1), "F3@1 or 1F3"),
        ("\n,,\n.", (1, 1), "F3@1 or 1F3"),
        (
            "F0@0\nF0@1, X3, B0@1",
            (2, 7),
            "'X3'",
        ),
        ("0F0,0F", (1, 5), "'0F'"),
        ("0F0,(0F1;0Q1)OVERLAP_F_B", (1, 5), "'0Q1'"),
        ("F0@0,F-1@0", (1, 6), "'F-1@0'"),
        ("F0@0,F0@9999999999", (1, 6), "F0@9999999999"),
        (
            "F0@0 F0@1\nF1@1",
            (2, 1),
            "F1@1 is on device 1, but stage 1 is on device 0",
        ),
        ("F0@0\nF0@5 F0@6", (2, 1), "stage 1"),
        (
            "# timetable pipe=0\nF0@0",
            (1, 1),
            "'pipe=0'",
        ),
        ("# timetable pipes=0 pipes=0\nF0@0", (1, 1), "'pipes=0'"),
        ("# timetable schedule='a\nF0@0", (1, 1), "quotation"),
        ("\n# timetable micro_batches=0\nF0@0", (2, 1), "1 (got 0)"),
        ("# timetable micro_batches=many\nF0@0", (1, 1), "1 (got many)"),
        ("# timetable pipes=0,a\nF0@0", (1, 1), "(got 0,a)"),
        ("# timetable pipes=0,1;1\nF0@0\n.", (1, 1), "(got 1 and 2)"),
        ("# timetable pipes=0,1\nF0@0", (1, 1), "2 devices (got 1"),
        ("# timetable pipes=0,999999999\nF0@0\n.", (1, 1), "1000000000 devices (got 2"),
    ],
)
def test_errors_say_where_and_what_was_expected(text: str, where: tuple[int, int], what: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        loads(text)
    assert str(caught.value).startswith("timetable, line {}, column {}: ".format(*where))
    assert what in str(caught.value)


@given(st.text(st.sampled_from('FBIW0123@,;. \n#"()=\u00b2\u0663') | st.characters(codec="utf-8")))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        made = loads(text)
    except ScheduleError:
        return
    assert loads(dumps(made)) == made


def test_what_torch_cannot_say_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"bitpipe: .*got 2 "):
        torch_csv(timetable("bitpipe", 2, 2))
    with pytest.raises(ScheduleError, match=r"a\\nb"):
        dumps(Timetable("a\nb", linear(1), 1, ((Op("F", 0, 0),),)))


def test_steps_are_those_in_which_everything_is_there() -> None:
    """Each op, also of split backwards, takes one step after its inputs."""
    order = ((Op("F", 0, 0), Op("I", 0, 0), Op("W", 0, 0)), (Op("F", 0, 1), Op("B", 0, 1)))
    assert torch_csv(Timetable("mixed", linear(2), 1, order)) == "0F0,,,0I0,0W0\r\n,1F0,1B0,,\r\n"


def read_by_torch(text: str) -> list[list[Op]]:
    from torch.distributed.pipelining.schedules import _Action

    rows = [[_Action.from_str(cell) for cell in row] for row in csv.reader(io.StringIO(text, newline=""))]
    return [
        [Op(KINDS[a.computation_type.name], a.microbatch_index or 0, a.stage_index) for a in row if a]
        for row in rows
    ]


@pytest.mark.parametrize(
    "made",
    [m for m in MADE if m.placement.replicas == 1 and m.placement.forward is None],
    ids=lambda made: made.schedule,
)
def test_torch_reads_what_is_written(made: Timetable) -> None:
    assert read_by_torch(torch_csv(made)) == [list(order) for order in made.orders]


# Without 1F1B: the table of torch 2.13 lacks a forward on the last devices and has one too many.
@pytest.mark.parametrize(
    "name", ["GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_what_torch_generates_is_read(name: str) -> None:
    """The tables of torch's generators are valid timetables with the same ops."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = get_schedule_ops(name, 4, 8)
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    made = loads(text.getvalue(), name)
    check_timetable(made)
    assert (made.schedule, made.micro_batches, made.placement.num_devices) == (name, 8, 4)
    computed = sum(
        len(cell.sub_actions or (cell,)) for row in rows for cell in row if cell and cell.is_compute_op
    )
    assert sum(map(len, made.orders)) == computed
    assert simulate(made).bubble < 0.35  # and its order can run


def test_torchs_interleaved_is_ours() -> None:
    """Both are Megatron's order. The check accepts the timetable from the file."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = get_schedule_ops("Interleaved1F1B", 4, 8, num_stages_per_rank=2)
    theirs = loads("\n".join(",".join("" if cell is None else str(cell) for cell in row) for row in rows))
    assert theirs.orders == timetable("interleaved", 4, 8).orders
    assert check(lower(theirs)) == check(lower(timetable("interleaved", 4, 8)))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 4), (2, 4), (2, 7), (3, 6), (4, 8), (4, 13)])
def test_dualpipev_of_torch_and_of_deepspeed_is_ours(ranks: int, micro_batches: int) -> None:
    """DeepSpeed's order has only whole backwards."""
    from deepspeed.runtime.pipe.schedule import BackwardPass, DualPipeVSchedule, ForwardPass
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    ours = timetable("dualpipev", ranks, micro_batches).orders
    rows = get_schedule_ops("DualPipeV", ranks, micro_batches)
    assert loads("\n".join(",".join(f'"{cell or ""}"' for cell in row) for row in rows)).orders == ours
    kinds = {ForwardPass: "F", BackwardPass: "B"}
    for rank, order in enumerate(ours):
        steps = DualPipeVSchedule(micro_batches, ranks, rank).steps()
        found = [
            Op(kinds[type(c)], c.buffer_id % micro_batches, 2 * ranks - 1 - rank if c.phase else rank)
            for step in steps
            for c in step
            if type(c) in kinds
        ]
        assert found == [
            op._replace(kind="B" if op.kind == "I" else op.kind) for op in order if op.kind != "W"
        ]


def test_a_timetable_file_is_a_schedule_of_a_job(tmp_path: Path) -> None:
    """It supports only the sizes of the file."""
    file = tmp_path / "mine.txt"
    made = timetable("bitpipe", 4, 8)
    file.write_text(dumps(made))

    def section(ranks: int, path: object = file) -> dict[str, Any]:
        return {"ds_ext": {"schedule": str(path), "pipeline_parallel_size": ranks}}

    assert timetable_of(section(4), 8) == made and placement_of(section(4)) == made.placement
    with pytest.raises(ConfigError, match=r"micro_batches .*8 \(got 4\).*train_batch_size: 8"):
        timetable_of(section(4), 4)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size .*4 \(got 2\)"):
        placement_of(section(2))
    with pytest.raises(ConfigError, match=r"none\.txt: .*No such file"):
        placement_of(section(4, tmp_path / "none.txt"))
    file.write_text("0F0,bad")
    with pytest.raises(ConfigError, match=r"line 1, column 5: .*'bad'"):
        placement_of(section(4))


def test_errors_of_a_file_say_its_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("F0@0 X")
    with pytest.raises(ScheduleError) as caught:
        read_timetable(file)
    assert str(caught.value).startswith(f"timetable {file}, line 1, column 6: ") and "'X'" in str(
        caught.value
    )


def test_the_example_of_the_page() -> None:
    """The timetable file in docs/schedules.md is valid and as described there."""
    page = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text()
    section = page.split("## Timetable files")[1].split("\n## ")[0]
    block = "\n".join(line[4:] for line in section.splitlines() if line.startswith("    "))
    made = loads(block)
    assert len(block.splitlines()) <= 10 and check(lower(made)).messages == 8
    assert (made.schedule, made.placement, made.micro_batches) == ("mine", bidirectional_linear(2), 4)
    assert simulate(made).makespan < simulate(timetable("gpipe", 2, 4)).makespan


def test_sizes_that_no_memory_holds_are_refused_before_they_are_checked() -> None:
    pipes = ",".join(["0"] * 300)
    cells = " ".join(f"F{0}@{stage}" for stage in range(300)) + " "
    cells += " ".join(f"B{0}@{stage}" for stage in reversed(range(300)))
    with pytest.raises(ScheduleError, match=r"600,000,000 .*300 .*1,000,000"):
        loads(f"# timetable schedule=own micro_batches=1000000 pipes={pipes}\n{cells}")


def test_a_file_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    made = timetable("1f1b", 2, 2)
    path = tmp_path / "ours.txt"
    path.write_bytes(b"\xef\xbb\xbf# \xc3\xa4 comment\n" + dumps(made).encode())
    code = (
        f"from ds_ext.pipe_schedules.files import read_timetable; print(read_timetable({str(path)!r}).orders)"
    )
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=plain, capture_output=True, text=True, timeout=900
    )
    assert done.stdout.strip() == str(made.orders), done.stderr
