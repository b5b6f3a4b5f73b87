"""The measurement behind the table in CONTRIBUTING.md, at one small size."""

from __future__ import annotations

import pytest

from tests.hosts.network import NoHosts
from tests.hosts.step_times import Case, measure


def test_no_step_is_faster_than_predicted() -> None:
    """Load makes steps longer, so there is no upper limit."""
    case = Case("bitpipe", 4, 8, 30.0, 20.0)
    try:
        (row,) = measure(2, [case], 1)
    except NoHosts as error:
        pytest.skip(f"no hosts: {error}")
    assert row["link_ms"] > case.delay_ms
    assert row["predicted_ms"] > case.timetable().micro_batches * 3 * case.forward_ms
    # Messages over the slow link are on the critical path.
    assert row["predicted_ms"] > case.predict_ms(2, 0.0, 0.0) + 4 * case.delay_ms
    assert row["measured_ms"] > 0.95 * row["predicted_ms"]
