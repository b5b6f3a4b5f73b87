"""docs/reference.md: the keys of the JSON and of the metrics, and the calls of a transport, are those of the code."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from ds_ext.comm.transport import Transport
from ds_ext.config.job import DsExtConfig
from ds_ext.observe.step_metrics import StepMetrics

PAGE = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(text: str) -> list[str]:
    """Names in the first column of the tables of a section."""
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)", row)]


def test_keys_of_the_json() -> None:
    keys = [field.alias or name for name, field in DsExtConfig.model_fields.items()]
    assert sorted(first_cells(section("JSON"))) == sorted(keys)


def test_keys_of_the_metrics() -> None:
    keys = section("Metrics").split("with the keys")[1].split("`ds_ext.Metrics")[0]
    assert re.findall(r"`(\w+)`", keys) == [field.name for field in fields(StepMetrics)]


def test_calls_of_a_transport() -> None:
    calls = {name for name in vars(Transport) if not name.startswith("_")}
    assert set(first_cells(section("Transport"))) == calls
