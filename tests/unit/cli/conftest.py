"""Short searches for all tests of the command line."""

from __future__ import annotations

import pytest

from ds_ext.pipe_schedules.list_scheduling import search


@pytest.fixture(autouse=True)
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let planned schedules simulate few orders: worse orders, in a tenth of the time."""
    monkeypatch.setattr(search, "_MAX_OPS", 2_000)
