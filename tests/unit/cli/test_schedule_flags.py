"""The flags of ``python -m ds_ext`` that say which timetable is meant: options, costs, sizes, evaluations, modules."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ds_ext.__main__ import main
from ds_ext.cli.schedule_verbs import title
from ds_ext.pipe_schedules import get_schedule, timetable
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.draw.grid import order_grid
from ds_ext.pipe_schedules.inference import forward_timetable
from ds_ext.pipe_schedules.lower import dump, lower
from ds_ext.pipe_schedules.simulate import simulate

ROOT = Path(__file__).parents[3]
SIZES = ["--stages", "4", "--micro-batches", "8"]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that such a request ends with."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err.removeprefix("error: ").rstrip()


# --- options ---------------------------------------------------------------------------------------------------------


def test_an_option_that_none_of_the_compared_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "compare", "1f1b", "interleaved", *SIZES, "--option", "chunk=4") == (
        "--option chunk: none of the schedules has it; 1f1b has none; interleaved has chunks."
    )


def test_an_option_that_some_of_the_compared_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "1f1b", "interleaved", *SIZES, "--option", "chunks=4"]) == 0
    *_, row, note = capsys.readouterr().out.splitlines()
    assert row.split()[:2] == [
        "interleaved",
        f"{simulate(timetable('interleaved', 4, 8, chunks=4)).makespan:g}",
    ]
    assert note == "--option chunks=4: interleaved only."
    assert main(["compare", "interleaved", *SIZES, "--option", "chunks=4"]) == 0
    assert "only" not in capsys.readouterr().out


def test_options_are_given_once_and_not_for_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = ["--option", "chunks=2", "--option", "chunks=3"]
    assert refused(capsys, "show", "interleaved", *SIZES, *twice) == (
        "--option chunks is given twice, 2 and 3; give it once."
    )
    file = tmp_path / "mine.txt"
    file.write_text("F0@0 B0@0")
    assert refused(capsys, "show", str(file), "--option", "chunks=2") == (
        "--option chunks=2: a timetable file has no options; leave it out."
    )


# --- costs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["show", "check", "dump", "simulate", "compare"])
def test_costs_are_given_in_one_way(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    both = ["--option", "costs=comm=1", "--costs", "comm=0.5"]
    error = refused(capsys, verb, "zb_v", *SIZES, *both)
    assert error.startswith("costs are given twice, --costs comm=0.5 and --option costs=comm=1, and both say")


def test_a_key_that_costs_do_not_have_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for text, wrong in (("f=1,bb=2", "'bb' is none of them"), ("links=1", "links are for a JSON file")):
        error = refused(capsys, "show", "1f1b", *SIZES, "--costs", text)
        assert f"and in a JSON file also links; {wrong}: '{text}'" in error
    assert main(["simulate", "1f1b", *SIZES, "--costs", "stages=0.5x3/2", "--json"]) == 0
    costs = Costs(stages=(0.5, 0.5, 0.5, 2.0))
    assert (
        json.loads(capsys.readouterr().out)["makespan"] == simulate(timetable("1f1b", 4, 8), costs).makespan
    )


def test_the_option_costs_means_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "costs.json"
    file.write_text('{"comm": 0.5}')
    printed = []
    for given in (["--costs", "comm=0.5"], ["--option", "costs=comm=0.5"], ["--option", f"costs={file}"]):
        assert main(["show", "zb_v", *SIZES, *given]) == 0
        printed.append(capsys.readouterr().out)
    costs = Costs(comm=0.5)
    made = get_schedule("zb_v").timetable(4, 8, {}, costs)
    assert printed[0].startswith(title(simulate(made, costs)))
    assert printed[0] == printed[1] == printed[2]
    assert main(["compare", "1f1b", "zb_v", *SIZES, "--option", "costs=comm=0.5"]) == 0
    _, first, second, note = capsys.readouterr().out.splitlines()
    assert first.split()[1] == f"{simulate(timetable('1f1b', 4, 8), costs).makespan:g}"
    assert second.split()[1] == f"{simulate(made, costs).makespan:g}"
    assert note == "--option costs=comm=0.5: planned for by zb_v; all are priced with them."
    assert "1f1b has no option 'costs'" in refused(capsys, "show", "1f1b", *SIZES, "--option", "costs=f=1")


@pytest.mark.parametrize("verb", ["show", "check", "dump", "simulate", "compare"])
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"links": {"0>4": 1}}', "link 0>4 does not join two of the 4 ranks"),
        ('{"stages": [1, 1, 1]}', "stages has 3 factors, but the schedule cuts the model into 4 stages"),
        ('{"seed": true}', "seed must be an integer"),
        ("[" * 100_000, "nested too deeply"),
        ('{"f": 1e308}', "within 1e-15 and 1e+15; got f = 1e+308"),
        ('{"f": -Infinity}', "got f = -inf"),
    ],
)
def test_costs_that_make_no_sense(
    verb: str, text: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    assert sentence in refused(capsys, verb, "1f1b", *SIZES, "--costs", str(file))


@pytest.mark.parametrize("ending", ["txt", "csv", "json", "svg", "html"])
def test_nothing_takes_time(ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = ["zb_v", *SIZES, "--costs", "f=0,b=0,w=0"]
    assert main(["show", *nothing, "-o", str(tmp_path / f"x.{ending}")]) == 0
    capsys.readouterr()
    assert main(["show", *nothing]) == 0
    assert capsys.readouterr().out.split("\n", 1)[1] == order_grid(timetable("zb_v", 4, 8)) + "\n"
    assert main(["simulate", *nothing, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == 0


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["show", "check", "dump", "simulate", "compare"])
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "1f1b --stages 4 --micro-batches 10000000",
            "4 stages of the model and 10,000,000 micro-batches make",
        ),
        ("1f1b --stages 4 --micro-batches 10000000 --forward-only", "Use at most 625,000 micro-batches"),
        (
            "interleaved --stages 4 --micro-batches 4 --option chunks=100000",
            "would be cut into 4 devices x 100,000 = 400,000 stages, more than 200,000. Use fewer devices or chunks.",
        ),
        ("bitpipe_zb --stages 8 --micro-batches 32 --option waves=5000", "80,000 stages of the model and 32"),
        ("bitpipe_zb --stages 8 --micro-batches 32 --option waves=99999999999999", "devices or waves."),
    ],
)
def test_sizes_that_no_memory_holds(
    verb: str, words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refused(capsys, verb, *words.split())


def test_what_is_not_possible_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "bitpipe", "1f1b", "interleaved", "--stages", "4", "--micro-batches", "6"]
    assert main(words) == 1
    head, first, second, third = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["schedule", "makespan"]
    assert first.split()[:2] == ["bitpipe", "-"] and "needs micro_batches to be a multiple of 4" in first
    assert second.split()[:3] == ["1f1b", "27", "1.000"]
    assert third.split()[:2] == ["interleaved", "-"] and third.endswith("gradient_accumulation_steps 4 or 8.")
    assert "bitpipe needs micro_batches" in refused(capsys, "compare", "bitpipe", "interleaved", *words[4:])


def test_other_numbers_of_micro_batches_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "six.txt")
    assert main(["show", "1f1b", "--stages", "4", "--micro-batches", "6", "-o", file]) == 0
    capsys.readouterr()
    (tmp_path / "mine.txt").write_text("F0@0 B0@0")
    assert main(["compare", file, str(tmp_path / "mine.txt"), file]) == 0
    _, first, other, again, note = capsys.readouterr().out.splitlines()
    assert first.split()[2] == again.split()[2] == "1.000" and other.split()[1:3] == ["3", "0.0%"]
    assert note == "vs first: only for 6 micro-batches, as the first has."


# --- evaluations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches"),
    [("1f1b", 4, 1), ("interleaved", 4, 6), ("bitpipe", 4, 7), ("zb_v", 3, 2), ("dualpipev", 2, 1)],
)
def test_forward_only(name: str, ranks: int, micro_batches: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = [name, "--stages", str(ranks), "--micro-batches", str(micro_batches), "--forward-only"]
    made = forward_timetable(get_schedule(name).placement(ranks), micro_batches, name)
    priced = simulate(made)
    assert main(["dump", *words]) == 0
    assert json.loads(capsys.readouterr().out) == dump(lower(made))
    assert main(["check", *words]) == 0
    assert "there are no backwards: an evaluation" in capsys.readouterr().out
    assert main(["show", *words]) == 0
    assert capsys.readouterr().out.startswith(f"{title(priced)}\n")
    assert "forward only: makespan" in title(priced)
    assert main(["simulate", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == priced.makespan
    assert main(["compare", *words]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == [name, f"{priced.makespan:g}"]


def test_forward_only_on_the_placement_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "mine.txt")
    assert main(["show", "bitpipe", *SIZES, "-o", file]) == 0
    placement = timetable("bitpipe", 4, 8).placement
    for given, n in (([], 8), (["--micro-batches", "3"], 3)):
        capsys.readouterr()
        assert main(["dump", file, "--forward-only", *given]) == 0
        assert json.loads(capsys.readouterr().out) == dump(lower(forward_timetable(placement, n, "bitpipe")))
    assert "is for --stages 4" in refused(capsys, "dump", file, "--forward-only", "--stages", "2")
    assert refused(capsys, "show", "1f1b", "--stages", "2", "--micro-batches", "0", "--forward-only") == (
        "1f1b needs at least 1 micro-batch; got 0."
    )


# --- files that stand still ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["show", "simulate", "compare"])
def test_a_file_that_stands_still_comes_with_the_grid(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wrong.txt"
    file.write_text("F0@0 B0@0 F1@0 B1@0\nF0@1 F1@1 B0@1 B1@1\n")
    assert main([verb, str(file)]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"error: {file}: wrong: no rank can move; waiting: rank 0: B0@0 needs B0@1, rank 1: F1@1 needs F1@0.\n"
        "step    0     1     2     3\n"
        "rank 0  F0@0  B0@0  F1@0  B1@0   <-- ERROR HERE\n"
        "              ^^^^\n"
        "rank 1  F0@1  F1@1  B0@1  B1@1\n"
    )
    assert main(["check", str(file)]) == 1
    assert capsys.readouterr().err.split("\n", 1)[1] == error.split("\n", 1)[1]


def test_a_rank_alone_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for slots in ([], ["--link-slots", "1"]):
        assert main(["check", "1f1b", "--stages", "1", "--micro-batches", "2", *slots]) == 0
        out = capsys.readouterr().out
        assert "\n  no messages, so every rank reaches its end by itself, however much a link holds\n" in out
        assert "only 0" not in out and "0 messages" not in out


# --- schedules of one's own ------------------------------------------------------------------------------------------


def test_the_example_of_the_page_from_the_command_line(tmp_path: Path) -> None:
    """A process each, as a schedule stays registered; every command that the page shows."""
    page = (ROOT / "docs" / "add_a_schedule.md").read_text()
    (tmp_path / "eager_1f1b.py").write_text(page.split("```python\n")[1].split("```")[0])
    commands = re.findall(r"^    python -m ds_ext (\w+ .*--import eager_1f1b.*)$", page, re.MULTILINE)
    assert {command.split()[0] for command in commands} >= {"show", "check", "simulate", "compare"}
    for command in commands:
        words = [sys.executable, "-m", "ds_ext", *command.split()]
        done = subprocess.run(
            words, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "eager_1f1b" in done.stdout


def test_modules_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "misspelt_schedule.py").write_text("x = 1\nfrom ds_ext.pipe_schedules import Opp\n")
    (tmp_path / "half_schedule.py").write_text("def f(:\n")
    found = {
        "no_such_module.inside": ("no_such_module", "PYTHONPATH"),
        "misspelt_schedule": ("ImportError", "misspelt_schedule.py, line 2"),
        "half_schedule": ("SyntaxError", "half_schedule.py, line 1"),
        "eager_1f1b.py": ("eager_1f1b.py", "my_schedules"),
        "folder/eager": ("folder/eager",),
        ".eager": (".eager",),
        "": ("''",),
    }
    for name, words in found.items():
        sentence = refused(capsys, "show", "1f1b", *SIZES, "--import", name)
        assert all(word in sentence for word in ("--import", *words))
