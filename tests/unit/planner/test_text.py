"""Text of tables, sizes, costs and reasons."""

from __future__ import annotations

import pytest

from ds_ext.errors import ScheduleError
from ds_ext.pipe_schedules.costs import Costs, parse_costs
from ds_ext.planner.text import aligned, costs_text, format_bytes, join_reasons, join_words, parse_bytes


def test_bytes() -> None:
    texts = {"80GB": 80 * 10**9, "1.5kB": 1500, "16 GiB": 16 * 2**30, "2T": 2 * 10**12, "7B": 7}
    assert [parse_bytes(text) for text in texts] == list(texts.values())
    sizes = {7: "7 B", 1500: "1.5 KB", 2_340_000: "2.3 MB", 80e9: "80.0 GB", 1.2e12: "1.2 TB"}
    assert [format_bytes(size) for size in sizes] == list(sizes.values())
    for wrong in ("80", "", "GB", "-1GB", "0GB", "80XB", "200Gb", "80gb", "1.5kb"):
        with pytest.raises(ScheduleError, match=f"got '{wrong}'.*80GB"):
            parse_bytes(wrong)


def test_costs() -> None:
    costs = Costs(forward=2.5, backward_weight=0.1, comm=1 / 3, jitter=0.1, seed=4)
    assert parse_costs(costs_text(costs)) == costs
    stages = Costs(stages=(0.1, 0.1, 0.1, 2.0, 1 / 3))
    assert costs_text(stages).endswith(f",stages=0.1x3/2.0/{1 / 3!r}")
    assert parse_costs(costs_text(stages)) == stages
    with pytest.raises(ScheduleError, match=r"^costs: .*1 links"):
        costs_text(Costs(links={(0, 1): 0.5}))


def test_tables_and_lists() -> None:
    assert aligned([["a", "", "bb"], ["ccc", "", "d"]], left=(0,)) == ["a    bb", "ccc   d"]
    assert [join_words([1]), join_words([1, 2, 4])] == ["1", "1, 2 or 4"]
    reasons = ["8 layers are fewer than 16 stages", "4 heads by TP 5", "other", "4 heads by TP 3", "other"]
    assert join_reasons(reasons) == ["8 layers are fewer than 16 stages", "4 heads by TP 3, 5", "other"]
