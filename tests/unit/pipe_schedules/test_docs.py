"""Commands in README and docs print the output on the page; the example of a new schedule works."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_ext.__main__ import main
from ds_ext.parallel.partition import BALANCED, layer_boundaries, stage_weights
from ds_ext.pipe_schedules import get_schedule
from ds_ext.pipe_schedules.costs import Costs
from ds_ext.pipe_schedules.simulation import Simulation, simulate

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"    \$ python -m ds_ext ((?:show|check|simulate|dump|compare) .*)")


def shown() -> Iterator[tuple[str, str, str]]:
    """Yield (page, command, output) of every command that a page shows with its output."""
    for page in PAGES:
        lines = page.read_text().splitlines()
        for at, line in enumerate(lines):
            if found := COMMAND.fullmatch(line):
                block = lines[at + 1 :]
                stop = next((i for i, x in enumerate(block) if x and not x.startswith("    ")), len(block))
                text = "\n".join(x[4:] for x in block[:stop])
                yield page.name, found[1], text.strip()


SHOWN = list(shown())


def test_there_is_something_to_compare() -> None:
    assert {page for page, _, text in SHOWN if text} >= {"schedules.md"}


@pytest.mark.parametrize(
    ("page", "command", "text"), SHOWN, ids=[f"{page}: {command}" for page, command, _ in SHOWN]
)
def test_pages_show_what_is_printed(
    page: str, command: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(shlex.split(command))
    captured = capsys.readouterr()
    assert text == (captured.out + captured.err).strip()


SLICES = [
    (int(devices), int(n), name, slices, cell)
    for devices, n, table in re.findall(
        r"At D = (\d+) and N = (\d+)(.*?\n(?:\|[^\n]*\n)+)",
        (ROOT / "docs" / "long_sequences.md").read_text(),
        re.DOTALL,
    )
    for name, *cells in re.findall(r"^\| `(\w+)`" + r" \| ([\d.]+ %, [\d.]+)" * 5, table, re.MULTILINE)
    for slices, cell in zip((1, 2, 4, 8, 16), cells, strict=True)
]


def test_the_tables_of_slices() -> None:
    assert {(devices, n) for devices, n, *_ in SLICES} == {(8, 4), (4, 8)}
    for devices, n, name, slices, cell in SLICES:
        simulation = simulate(get_schedule(name).timetable(devices, n, slices=slices))
        assert cell == f"{100 * simulation.bubble:.1f} %, {max(simulation.peak_activations):.3g}"


HEADS = re.findall(
    r"^\| (\d+) \| (\d+) \| `(\w+)`" + r" \| ([+-][\d.]+ %, [\d.]+)" * 6,
    (ROOT / "docs" / "schedules.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize("row", HEADS, ids=[" ".join(row[:3]) for row in HEADS])
def test_the_table_of_heads(row: tuple[str, ...]) -> None:
    devices, n, name, cells = int(row[0]), int(row[1]), row[2], row[3:]
    method, layers = get_schedule(name), 4 * int(row[0])
    even = simulate(method.timetable(devices, n)).makespan
    for head, cut, parts in zip((1, 2, 4), cells[::2], cells[1::2], strict=True):
        weights = (0.0, float(head))
        bounds = layer_boundaries(layers, 0, 1, method.placement(devices), name, BALANCED, weights)
        stages = Costs(stages=stage_weights(bounds, 0, 1, weights))
        simulation = simulate(method.timetable(devices, n, costs=stages), stages)
        assert cut == head_cell(simulation, even)
        costs = Costs(head=head / 4)
        simulation = simulate(method.dividing_head().timetable(devices, n, costs=costs), costs)
        assert parts == head_cell(simulation, even * (1 + head / layers))


def head_cell(simulation: Simulation, even: float) -> str:
    """Return the time relative to an even split, and the largest peak of activations."""
    return f"{100 * (simulation.makespan / even - 1):+.1f} %, {max(simulation.peak_activations):g}"


def test_there_is_a_table_of_heads() -> None:
    assert {row[:3] for row in HEADS} >= {("4", "8", "1f1b"), ("8", "16", "zb_v"), ("8", "16", "bitpipe_zb")}


def test_the_table_of_the_readme() -> None:
    page = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) % \| ([\d.]+) %(.*?)\|", page, re.MULTILINE)
    assert {name for name, *_ in rows} == {"1f1b", "interleaved", "bitpipe", "zb_v", "bitpipe_zb"}
    for name, whole, in_slices, options in rows:
        method = get_schedule(name)
        assert whole == f"{100 * simulate(method.timetable(4, 8)).bubble:.1f}"
        values = json.loads(f"{{{options.strip(', `')}}}") if options.strip() else {}
        assert in_slices == f"{100 * simulate(method.timetable(4, 8, values, slices=4)).bubble:.1f}"


def test_the_example_of_a_new_schedule(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "add_a_schedule.md").read_text()
    code = re.search(r"```python\n(.*?)```\n", page, re.DOTALL)
    assert code is not None and len(code[1].splitlines()) <= 30
    file = tmp_path / "eager_1f1b.py"
    file.write_text(code[1])
    # A separate process, because it registers a schedule.
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=True, cwd=ROOT)
    block = page[code.end() :].split("\n\n")[1]
    assert block.splitlines() == [f"    {line}" for line in done.stdout.splitlines()]


def test_the_example_is_accepted_in_a_json(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "add_a_schedule.md").read_text()
    (tmp_path / "eager_1f1b.py").write_text(page.split("```python\n")[1].split("```")[0])
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import eager_1f1b\n"
        "from tests.plans import timetable_of\n"
        "section = {'schedule': 'eager_1f1b', 'pipeline_parallel_size': 4}\n"
        "print(timetable_of({'ds_ext': section}, 8).schedule)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "eager_1f1b\n"
