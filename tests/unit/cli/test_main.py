"""``python -m ds_ext``, as a user runs it and in this process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds_ext.__main__ import main
from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules import SCHEDULES, timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.draw.grid import time_grid
from ds_ext.pipe_schedules.files import schedule_of_file
from ds_ext.pipe_schedules.lower import dump, lower
from ds_ext.pipe_schedules.simulate import simulate
from tests.processor import python_s

BITPIPE = ["bitpipe", "--stages", "4", "--micro-batches", "8"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ds_ext", *arguments]


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *BITPIPE]) == 0
    title, grid = capsys.readouterr().out.split("\n", 1)
    assert title == (
        "bitpipe, 4 stages, 8 micro-batches: makespan 27, ideal 24, bubble 11.1%, peak activations 3.5 4 4 3.5"
    )
    assert grid == time_grid(simulate(timetable("bitpipe", 4, 8))) + "\n"


def test_show_with_options(capsys: pytest.CaptureFixture[str]) -> None:
    shape = [
        "interleaved",
        "--stages",
        "2",
        "--micro-batches",
        "2",
        "--option",
        "chunks=3",
        "--costs",
        "f=2,comm=1",
    ]
    assert main(["show", *shape, "--labels", "op", "--color", "always"]) == 0
    priced = simulate(timetable("interleaved", 2, 2, chunks=3), Costs(forward=2, comm=1))
    out = capsys.readouterr().out
    assert out.endswith(time_grid(priced, labels="op", color=True) + "\n")
    assert "\x1b[36mF0@0\x1b[0m" in out


def test_colors_are_for_terminals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(**environment: str) -> str:
        monkeypatch.delenv("NO_COLOR", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert main(["show", *BITPIPE]) == 0
        return capsys.readouterr().out

    assert "\x1b" not in shown()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b" in shown()
    assert "\x1b" not in shown(NO_COLOR="1")


def test_dump(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", *BITPIPE]) == 0
    assert json.loads(capsys.readouterr().out) == dump(lower(timetable("bitpipe", 4, 8)))


def test_simulate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *BITPIPE, "--json"]) == 0
    priced = json.loads(capsys.readouterr().out)
    assert list(priced) == ["makespan", "ideal", "bubble", "peak_activations", "messages", "busy"]
    assert priced["busy"] == pytest.approx([8 / 9] * 4)
    assert (
        priced["makespan"] == 27
        and priced["peak_activations"] == [3.5, 4, 4, 3.5]
        and priced["messages"] == 96
    )
    assert priced["bubble"] == pytest.approx(1 / 9)
    assert main(["simulate", *BITPIPE]) == 0
    assert re.search(r"makespan +27\n.*bubble +11\.1%\n", capsys.readouterr().out, re.DOTALL)


def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *BITPIPE]) == 0
    out = capsys.readouterr().out
    assert out.startswith("bitpipe, 4 stages, 8 micro-batches: valid\n  128 computations, each once")
    assert (
        "96 messages" in out
        and "when a link holds only 1 of its messages" in out
        and "7 8 8 7 buffers" in out
    )


def test_check_refuses_with_the_grid(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["interleaved", "--stages", "2", "--micro-batches", "4"]
    assert main(["check", *shape, "--link-slots", "1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(
        "interleaved: no rank can move when a link holds 1 of its messages; waiting: rank 0"
    )
    assert "<-- ERROR HERE" in captured.err
    assert main(["check", *shape, "--link-slots", "2"]) == 0


@pytest.mark.parametrize("verb", ["show", "dump", "check", "simulate"])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "bitpip --stages 4 --micro-batches 8",
            "schedule 'bitpip' is not known (did you mean 'bitpipe'?); known: 1f1b",
        ),
        ("bitpipe --stages 3 --micro-batches 8", "bitpipe needs an even number of stages"),
        (
            "bitpipe --stages 4 --micro-batches 6",
            "got 6. Use 4 or 8, that is gradient_accumulation_steps 2 or 4.",
        ),
        (
            "interleaved --stages 2 --micro-batches 2 --option chunks",
            "--option 'chunks' is not of the form chunks=3.",
        ),
        ("interleaved --stages 2 --micro-batches 2 --option chunks=x", "at least 1; got 'x'"),
        (
            "gpipe --stages 2 --micro-batches 2 --costs f=-1",
            "costs are finite and not negative: f, b, w, comm",
        ),
    ],
)
def test_wrong_requests(verb: str, arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and sentence in captured.err


def test_a_link_needs_room(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *BITPIPE, "--link-slots", "0"]) == 2
    assert capsys.readouterr().err == "error: --link-slots must be at least 1; got 0.\n"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in ("show", "dump", "check", "simulate", "prepare"))
    with pytest.raises(SystemExit, match="0"):
        main(["show", "--help"])
    text = capsys.readouterr().out
    for name, schedule in SCHEDULES.items():
        assert f"  {name} " in text and schedule.summary in text
    assert "--option chunks=2 (stages a device)" in text


def test_prepare_is_the_data_packages_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "nowhere"
    assert main(["prepare", "--source", str(missing), "--output", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and "nowhere" in captured.err


def test_the_pure_verbs_answer_at_once_and_without_torch() -> None:
    code = (
        "import sys; from ds_ext.__main__ import main;"
        "status = main(['show', 'bitpipe', '--stages', '4', '--micro-batches', '4']);"
        "print(status, *sorted({'torch', 'deepspeed', 'pydantic', 'numpy'} & set(sys.modules)))"
    )

    def processor_s() -> float:
        before = os.times()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "0"
        after = os.times()
        return sum(after[2:4]) - sum(before[2:4])  # of the children, user and system

    # About 6 times the loop; torch alone takes 60 times as long.
    assert min(processor_s() for _ in range(3)) < 30 * python_s()


def test_a_reader_that_leaves_is_no_error() -> None:
    arguments = ["dump", "bitpipe", "--stages", "8", "--micro-batches", "64"]
    with subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 141


def test_a_timetable_file_has_its_own_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "mine.txt")
    assert main(["show", "1f1b", "--stages", "2", "--micro-batches", "4", "-o", file]) == 0
    assert main(["check", file]) == main(["check", file, "--stages", "2", "--micro-batches", "4"]) == 0
    capsys.readouterr()
    assert main(["check", file, "--stages", "4"]) == 2
    assert "mine.txt is for --stages 2 --micro-batches 4; leave both out" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "none.txt")]) == 2
    assert "none.txt' cannot be read: No such file or directory." in capsys.readouterr().err
    assert main(["show", "1f1b", "--stages", "2", "--micro-batches", "4", "-o", "x.foo"]) == 2
    assert "-o x.foo: .foo is no ending that says a format; use .html, .csv, .svg" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["show", "simulate", "compare"])
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "F0@0 F1@0 B0@0",
            "micro-batch 1 at stage 0 (rank 0) has F; it needs F and either B or both I and W",
        ),
        ("F0@0 F0@0 B0@0", "rank 0 runs F0@0 twice."),
        (
            "F0@0 B0@0 F999999999@0 B999999999@0",
            "there are 1000000000 micro-batches, from 0; expected at most",
        ),
    ],
)
def test_a_file_with_a_mistake_is_not_priced(
    verb: str, text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.txt"
    file.write_text(text)
    assert main([verb, str(file)]) == 2
    assert sentence in capsys.readouterr().err


def test_a_forward_only_file_is_an_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "forward.txt"
    file.write_text("F0@0 F1@0\nF0@1 F1@1\n")
    assert main(["check", str(file)]) == 0
    assert "there are no backwards: an evaluation" in capsys.readouterr().out
    with pytest.raises(ScheduleError, match=r"has no backwards; a job needs one for every forward\."):
        schedule_of_file(file)


def test_costs_of_nothing_and_numbers_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--stages", "4", "--micro-batches", "4"]
    assert main(["compare", "1f1b", "bitpipe", *sizes, "--costs", "f=0,b=0,w=0"]) == 0
    assert (
        main(["simulate", "bitpipe_zb", *sizes, "--option", "max_activations=1e308", "--costs", "w=2"]) == 0
    )
    capsys.readouterr()
    for words in (
        ["optimise", "1f1b", *sizes, "--max-activations", "nan"],
        ["show", "1f1b", "--stages", "99999999999", "--micro-batches", "1"],
    ):
        assert main(words) == 2
        assert capsys.readouterr().err.startswith("error: ")
    file = tmp_path / "costs.json"
    for text in ('{"links": {"²>1": 1}}', '{"f": 1' + "0" * 400 + "}"):
        file.write_text(text)
        assert main(["simulate", "1f1b", *sizes, "--costs", str(file)]) == 2
        assert capsys.readouterr().err.startswith("error: costs")
