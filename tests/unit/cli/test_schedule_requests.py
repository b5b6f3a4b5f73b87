"""Options behind a schedule's name, as every verb takes them, and where their values are listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_ext.__main__ import main
from ds_ext.pipe_schedules import get_schedule
from ds_ext.pipe_schedules.simulate import simulate
from tests.unit.cli.test_schedule_flags import SIZES, refused


def test_help_lists_the_values_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["show", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "--option policy=group (which of several ready computations is taken; one of group, breadth, depth)",
        "one of linear, interleaved, v, bidirectional_v)",
        "weight gradients fill the waits; one of whole, split)",
        "also with options of its own, dpp:placement=v",
    ):
        assert text in shown


def test_options_behind_the_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same request for every verb as for `bench schedules`; a comparison names its rows by it."""
    request, options = (
        "dpp:placement=v:max_in_flight=4e0",
        ["--option", "placement=v", "--option", "max_in_flight=4"],
    )
    for verb in ("show", "check", "dump", "simulate"):
        assert main([verb, request, *SIZES]) == 0
        joined = capsys.readouterr().out
        assert main([verb, "dpp", *SIZES, *options]) == 0
        assert joined == capsys.readouterr().out
    assert main(["compare", "1f1b", "dpp:placement=v", "dpp", *SIZES, "--option", "policy=depth"]) == 0
    *_, first, second, note = capsys.readouterr().out.splitlines()
    for row, name, given in ((first, "dpp:placement=v", {"placement": "v"}), (second, "dpp", {})):
        made = get_schedule("dpp").timetable(4, 8, {**given, "policy": "depth"})
        assert row.split()[:2] == [name, f"{simulate(made).makespan:g}"]
    assert note == "--option policy=depth: dpp:placement=v, dpp only."
    file = str(tmp_path / "a:b=c.txt")  # a path may have a colon
    assert main(["show", "1f1b", *SIZES, "-o", file]) == 0
    assert main(["check", file]) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["show", "dpp:v"], "'dpp:v' is not of the form bitpipe:mode=greedy."),
        (
            ["show", "dpp:chunks=1:chunks=2"],
            "'dpp:chunks=1:chunks=2' gives chunks twice, 1 and 2; give it once.",
        ),
        (
            ["show", "dpp:chunks=1", "--option", "chunks=2"],
            "chunks is given twice, by dpp:chunks=1 and by --option chunks=2; give it once.",
        ),
        (
            ["simulate", "zb_v:costs=comm=1", "--costs", "comm=2"],
            "costs are given twice, --costs comm=2 and --option costs=comm=1, and both say what is planned for and "
            "priced with; give one of them.",
        ),
        (
            ["compare", "1f1b", "zb_v:costs=comm=1"],
            "zb_v:costs=comm=1: a comparison has one price list; give --costs comm=1 for all.",
        ),
    ],
)
def test_requests_that_cannot_be(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *words, *SIZES) == sentence
