"""``bench transport`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.transport import IDLE, METHODS
from ds_ext.__main__ import main

ROOT = Path(__file__).parents[2]


def test_every_way_is_measured() -> None:
    flags = ["--repeats", "1", "--sizes", "4,1000000", "--idle", "0.2", "--json"]
    command = [sys.executable, "-m", "ds_ext", "bench", "transport", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for item in found:
        assert set(item) == {"name", "params", "median", "best", "unit", "repeats"}
        assert 0 < item["best"] <= item["median"]
        assert item["unit"] == ("% of a core" if item["name"] in IDLE else "us")
        assert item["params"]["machine"]["cores"] >= 1
    sized = [(item["name"], item["params"]["bytes"]) for item in found if "bytes" in item["params"]]
    assert sorted(sized) == sorted((name, size) for name in METHODS["cpu"] for size in (4, 1_000_000))
    others = {item["name"]: item["params"].get("peers") for item in found if "bytes" not in item["params"]}
    assert others == {"ready": 8, **dict.fromkeys(IDLE)}


@pytest.mark.parametrize("flags", [("--sizes", "0"), ("--sizes", "a"), ("--repeats", "0"), ("--idle", "-1")])
def test_a_wrong_request_is_one_error(flags: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transport", *flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and flags[0] in printed.err
