"""docs/plans.md: the commands print the choices and the next sizes of the table."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ds_ext.__main__ import main
from ds_ext.planner.text import format_bytes
from tests.selection import EVERYTHING

PAGE = (Path(__file__).parents[3] / "docs" / "plans.md").read_text()
TABLE = PAGE.partition("\n## ")[0]
ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| ")][2:]
COMMANDS = re.findall(r"^    (plan .*)$", TABLE.replace("\\\n", ""), re.MULTILINE)
FEW = ("7 devices", "tiny model")


def way(row: dict[str, Any]) -> str:
    """Return sizes, schedule and recomputation as the page writes them."""
    options = [f"{key}={value}" for key, value in row["schedule_options"].items() if key != "costs"]
    slices = [f"in {row['sequence_slices']} slices"] if row["sequence_slices"] > 1 else []
    text = f"`{' '.join([row['schedule'], *options, *slices])}`"
    if row["recompute"] != "none":
        every = row["recompute_interval"]
        text += f", recompute {row['recompute']}" + (f"/{every}" if every > 1 else "")
    sizes = (row[f"{name}_parallel_size"] for name in ("tensor", "pipeline", "data"))
    return "TP {} x PP {} x DP {}, ".format(*sizes) + text


@pytest.mark.parametrize(
    ("row", "command"),
    [
        pytest.param(row, command, id=row[0])
        for row, command in zip(ROWS, COMMANDS, strict=True)
        if EVERYTHING or row[0] in FEW
    ],
)
def test_choices(
    row: list[str], command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the full search
    assert main([*command.split(), "--json"]) == 0
    best, *others = (found for found in json.loads(capsys.readouterr().out)["best"] if found["fits"])
    assert row[1] == f"{way(best)}: {best['step_s']:.4g} s, {format_bytes(best['memory_bytes'])}"
    assert row[2] == (f"{way(others[0])}: {others[0]['step_s']:.4g} s" if others else "none fits")
