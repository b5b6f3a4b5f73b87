"""``bench transport`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ds_ext.bench.transport import IDLE, WAYS

ROOT = Path(__file__).parents[2]


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "ds_ext", "bench", "transport", *flags]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900)


def test_every_way_is_measured() -> None:
    done = bench("--repeats", "1", "--sizes", "4,1000000", "--idle", "0.2", "--busy", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(set(item) == {"name", "params", "median", "best", "unit", "repeats"} for item in found)
    idle = [item for item in found if item["name"] in IDLE]
    assert [item["unit"] for item in idle] == ["% of a core"] * 2 and all(item["best"] > 0 for item in idle)
    found = [item for item in found if item not in idle]
    sized = {(item["name"], item["params"]["bytes"]) for item in found if item["name"] != "ready"}
    assert sized == {(name, size) for name in WAYS if name != "ready" for size in (4, 1_000_000)}
    assert [item["params"] for item in found if item["name"] == "ready"] == [{"peers": 8}]
    assert all(0 < item["best"] <= item["median"] and item["unit"] == "us" for item in found)
    assert found[0]["params"]["machine"]["cores"] >= 1 and found[0]["params"]["busy"] == 1


@pytest.mark.parametrize(
    "flags", [("--sizes", "0"), ("--sizes", "a"), ("--repeats", "0"), ("--idle", "-1"), ("--busy", "-1")]
)
def test_a_wrong_request_is_one_error(flags: tuple[str, str]) -> None:
    done = bench(*flags)
    assert done.returncode == 2 and done.stdout == "" and f"error: {flags[0]} must be" in done.stderr
