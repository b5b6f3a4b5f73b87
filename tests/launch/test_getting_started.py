"""docs/getting_started.md: its commands run, and print the numbers of the page."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.first_run import default_config
from ds_ext.__main__ import main
from ds_ext.comm.spin import usable_cores
from tests.launch.jobs import ROOT, Job, environment, write_json

PAGE = (ROOT / "docs" / "getting_started.md").read_text()
PYTHON = "3.11.7"  # its standard library is the text of the page
STEPS = 10
RANKS = 2
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


def code_lines(heading: str) -> list[str]:
    """Return the indented lines of a section."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [line.removeprefix("    ") for line in section.splitlines() if line.startswith("    ")]


def numbers(line: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(line)]


def line_of(lines: list[str], start: str) -> str:
    """Return the only line that starts with a pattern."""
    (line,) = [line for line in lines if re.match(start, line)]
    return line


def columns(line: str) -> dict[str, float]:
    """Return name -> number of the columns of a step's line; the name is what is no number."""
    return {NUMBER.sub("", cell).strip(): numbers(cell)[0] for cell in line.split(" | ")[1:]}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the data that ``make train`` prepares."""
    if (ROOT / "data/stdlib/meta.json").is_file():
        return ROOT / "data/stdlib"
    folder = tmp_path_factory.mktemp("data") / "stdlib"
    words = [sys.executable, "-m", "ds_ext", "prepare", "--source", "stdlib", "--output", str(folder)]
    subprocess.run(words, env=environment(), check=True)
    return folder


@pytest.fixture
def checkout(tmp_path: Path, data: Path) -> Path:
    """Return a folder with the script and its data."""
    (tmp_path / "train_gpt.py").symlink_to(ROOT / "train_gpt.py")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/stdlib").symlink_to(data)
    return tmp_path


def short_config(folder: Path) -> Path:
    """Write the JSON of ``make train`` for a run that stops after ten steps."""
    path = ROOT / default_config(RANKS)
    config = json.loads(path.read_text())
    config["ds_ext"]["train"] |= {"exit_interval": STEPS, "eval_interval": STEPS, "eval_iters": 1}
    return write_json(folder / path.name, config)


def test_make_train_prints_the_numbers_of_the_page(checkout: Path, free_port: Callable[[], int]) -> None:
    """Compare the lines up to step 10, and the table."""
    words = [sys.executable, "-m", "benchmarks.first_run", short_config(checkout).name]
    with Job([*words, "--ranks", str(RANKS), "--port", str(free_port()), "--steps", "4"], checkout) as job:
        assert job.wait(600) == 0, job.text
    first, _, table = (part.splitlines() for part in job.text.partition("\nThe first "))
    shown = code_lines("What it prints")
    meta: dict[str, Any] = json.loads((checkout / "data/stdlib/meta.json").read_text())
    same_text = meta["source"]["python"] == PYTHON
    for key in ("schedule ", "rate ", "world ", "model "):
        assert numbers(line_of(first, key)) == numbers(line_of(shown, key)), key
    found, expected = (columns(line_of(lines, r"step +10/")) for lines in (first, shown))
    assert [name for name in found if "left" not in name] == [name for name in expected if "left" not in name]
    assert found["lr"] == expected["lr"] and len(found) == len(expected)
    for start in (r"step \d+: validation loss", r"step \d+: saved"):
        assert len(numbers(line_of(first, start))) == len(numbers(line_of(shown, start))), start
    if same_text:
        assert numbers(line_of(first, "data ")) == numbers(line_of(shown, "data "))
        assert found["loss"] == pytest.approx(expected["loss"], abs=5e-4)
        assert found["norm"] == pytest.approx(expected["norm"], abs=5e-3)
        entropy = numbers(line_of(shown, "validation loss"))[-1]
        assert entropy == pytest.approx(meta["unigram_entropy_nats"], abs=5e-5)
    header = re.split(r" {2,}", line_of(shown, " +bubble planned").strip())
    is_measured = usable_cores() >= 2
    assert re.split(r" {2,}", line_of(table, " +bubble planned").strip()) == header[: 3 if is_measured else 1]
    for name in ("1f1b", default_config(RANKS).stem):
        row, row_of_page = (line_of(lines, f"{name} .*%").split() for lines in (table, shown))
        assert row[:2] == row_of_page[:2] and len(row) == (len(row_of_page) if is_measured else 2)


COMMANDS = [
    command.partition("#")[0]
    for heading in ("Inspect a schedule before you launch", "3D parallelism")
    for command in code_lines(heading)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_run(
    command: str, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training only makes its plan."""
    monkeypatch.chdir(checkout)
    program, *words = shlex.split(command.replace("python -m ds_ext", "ds_ext"))
    if program == "ds_ext":
        assert main(words) == 0
        assert capsys.readouterr().out or (checkout / words[words.index("-o") + 1]).stat().st_size
        return
    words = [sys.executable, *words[words.index("train_gpt.py") :], "--dry-run"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert line_of(lines, "schedule ") and numbers(line_of(lines, "world "))


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 5
