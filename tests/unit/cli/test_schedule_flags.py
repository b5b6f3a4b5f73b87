"""Flags of ``python -m ds_ext`` for schedules: options, costs, sizes, custom schedules."""

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
from ds_ext.pipe_schedules.simulation import simulate
from tests.selection import select

ROOT = Path(__file__).parents[3]
SIZES = ["--num-devices", "4", "--micro-batches", "8"]
ALL_VERBS = ["show", "check", "dump", "simulate", "compare"]
VERBS = select(ALL_VERBS, ["dump", "compare"])  # the others read their flags as dump does


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the error of a wrong request, which is one line."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err.removeprefix("error: ").rstrip()


# --- options ---------------------------------------------------------------------------------------------------------


def test_options_that_only_some_compared_schedules_have(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "compare", "1f1b", "interleaved", *SIZES, "--option", "chunk=4")
    assert error.startswith("--option: ") and "1f1b: none; interleaved: chunks" in error
    assert main(["compare", "1f1b", "interleaved", *SIZES, "--option", "chunks=4"]) == 0
    *_, row, note = capsys.readouterr().out.splitlines()
    makespan = simulate(timetable("interleaved", 4, 8, chunks=4)).makespan
    assert row.split()[:2] == ["interleaved", f"{makespan:g}"]
    assert note.startswith("--option chunks=4: ") and "interleaved" in note and "1f1b" not in note
    assert main(["compare", "interleaved", *SIZES, "--option", "chunks=4"]) == 0
    assert "--option" not in capsys.readouterr().out


def test_options_after_the_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every verb takes them; a comparison names its rows by the whole request."""
    request = "dpp:placement=v:max_in_flight=4e0"
    options = ["--option", "placement=v", "--option", "max_in_flight=4"]
    for verb in ("show", "check", "dump", "simulate"):
        assert main([verb, request, *SIZES]) == 0
        joined = capsys.readouterr().out
        assert main([verb, "dpp", *SIZES, *options]) == 0
        assert joined == capsys.readouterr().out
    assert main(["compare", "1f1b", "dpp:placement=v", "dpp", *SIZES, "--option", "policy=depth"]) == 0
    *_, first, second, note = capsys.readouterr().out.splitlines()
    for row, name, given in ((first, "dpp:placement=v", {"placement": "v"}), (second, "dpp", {})):
        order = get_schedule("dpp").timetable(4, 8, {**given, "policy": "depth"})
        assert row.split()[:2] == [name, f"{simulate(order).makespan:g}"]
    assert note.startswith("--option policy=depth: ") and "dpp:placement=v, dpp" in note
    file = str(tmp_path / "a:b=c.txt")  # a path may have a colon
    assert main(["show", "1f1b", *SIZES, "-o", file]) == 0
    assert main(["check", file]) == 0


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("show dpp:v", r"^dpp:v: .*got 'v'"),
        ("show dpp:chunks=1:chunks=2", r"^dpp:chunks=1:chunks=2: .*got 1 and 2"),
        ("show dpp:chunks=1 --option chunks=2", r"^dpp:chunks=1: .*got --option chunks=2"),
        ("show interleaved --option chunks=2 --option chunks=3", r"^--option: .*got 2 and 3"),
        ("show 1f1b --option costs=f=1", r"1f1b.*'costs'"),
        ("simulate zb_v:costs=comm=1 --costs comm=2", r"^--costs: .*comm=2 .*comm=1"),
        ("compare zb_v --option costs=comm=1 --costs comm=0.5", r"^--costs: .*comm=0\.5 .*comm=1"),
        ("compare 1f1b zb_v:costs=comm=1", r"^zb_v:costs=comm=1: .*--costs comm=1"),
    ],
)
def test_contradictory_options(words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(error, refused(capsys, *words.split(), *SIZES))


def test_a_file_has_no_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("F0@0 B0@0")
    assert "got chunks=2" in refused(capsys, "show", str(file), "--option", "chunks=2")


# --- costs -----------------------------------------------------------------------------------------------------------


def test_the_option_costs_equals_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "costs.json"
    file.write_text('{"comm": 0.5}')
    printed = []
    for given in (["--costs", "comm=0.5"], ["--option", "costs=comm=0.5"], ["--option", f"costs={file}"]):
        assert main(["show", "zb_v", *SIZES, *given]) == 0
        printed.append(capsys.readouterr().out)
    costs = Costs(comm=0.5)
    order = get_schedule("zb_v").timetable(4, 8, {}, costs)
    assert printed[0].startswith(title(simulate(order, costs)))
    assert printed[0] == printed[1] == printed[2]
    assert main(["compare", "1f1b", "zb_v", *SIZES, "--option", "costs=comm=0.5"]) == 0
    _, first, second, note = capsys.readouterr().out.splitlines()
    assert first.split()[1] == f"{simulate(timetable('1f1b', 4, 8), costs).makespan:g}"
    assert second.split()[1] == f"{simulate(order, costs).makespan:g}"
    assert note.startswith("--option costs=comm=0.5: ") and "zb_v" in note


@pytest.mark.parametrize("verb", [*VERBS, "optimise"])
def test_costs_from_a_file(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if verb == "optimise":
        pytest.importorskip("ortools")
    given = {"f": 1, "b": 2, "comm": 0.5, "links": {"0>1": 1.5}}
    (tmp_path / "costs.json").write_text(json.dumps(given))
    shape = [verb, "zb_v", "--num-devices", "2", "--micro-batches", "4", "--costs"]
    outputs = []
    for costs in (str(tmp_path / "costs.json"), "b=2,comm=0.5"):
        assert main([*shape, costs]) == 0
        outputs.append(capsys.readouterr().out)
    if verb == "compare":
        costs = Costs(backward_input=2, comm=0.5, links={(0, 1): 1.5})
        order = get_schedule("zb_v").timetable(2, 4, None, costs)
        assert f" {simulate(order, costs).makespan:g}" in outputs[0] and outputs[0] != outputs[1]
    assert "none.json" in refused(capsys, *shape, str(tmp_path / "none.json"))


def test_factors_of_stages_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "1f1b", *SIZES, "--costs", "stages=0.5x3/2", "--json"]) == 0
    costs = Costs(stages=(0.5, 0.5, 0.5, 2.0))
    makespan = simulate(timetable("1f1b", 4, 8), costs).makespan
    assert json.loads(capsys.readouterr().out)["makespan"] == makespan
    for text, wrong in (("f=1,bb=2", "bb"), ("links=1", "links")):
        assert wrong in refused(capsys, "show", "1f1b", *SIZES, "--costs", text)


def test_extreme_costs_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "1f1b", "bitpipe", *SIZES, "--costs", "f=0,b=0,w=0"]) == 0
    words = [
        "simulate",
        "bitpipe_zb",
        *SIZES,
        "--option",
        "max_activations=1e308",
        "--costs",
        "w=2",
        "--json",
    ]
    assert main(words) == 0


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"links": {"0>4": 1}}', "0 to 3 .*0>4"),
        ('{"links": {"²>1": 1}}', "costs"),
        ('{"stages": [1, 1, 1]}', "stages.* 4 .*3"),
        ('{"seed": true}', "seed"),
        ('{"g": 1}', "f, b, w, comm, overhead, stages, links"),
        ("[" * 100_000, "nested"),
        ('{"f": 1e308}', r"1e\+308"),
        ('{"f": 1' + "0" * 400 + "}", "costs"),
        ('{"f": -Infinity}', "-inf"),
    ],
    ids=lambda value: value[:20],
)
def test_wrong_costs(
    verb: str, text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    assert re.search(words, refused(capsys, verb, "1f1b", *SIZES, "--costs", str(file)))


def test_flags_of_a_model_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in (["--overlap-across-steps"], ["--data-parallel", "2"]):
        error = refused(capsys, "simulate", "1f1b", *SIZES, *flag)
        assert (
            error.startswith(f"{flag[0]}: ") and "True" not in error and all(word in error for word in flag)
        )


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("1f1b --num-devices 4 --micro-batches 10000000", "10,000,000"),
        ("1f1b --num-devices 4 --micro-batches 10000000 --forward-only", "625,000"),
        ("interleaved --num-devices 4 --micro-batches 4 --option chunks=100000", "400,000.*200,000"),
        ("bitpipe_zb --num-devices 8 --micro-batches 32 --option waves=5000", "80,000.* 32"),
        ("bitpipe_zb --num-devices 8 --micro-batches 32 --option waves=99999999999999", "waves"),
    ],
)
def test_sizes_beyond_any_memory(
    verb: str, words: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(error, refused(capsys, verb, *words.split()))


# --- custom schedules ------------------------------------------------------------------------------------------------


def test_the_example_of_the_page(tmp_path: Path) -> None:
    """Every command on the page runs, each in its own process because a schedule stays registered."""
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
