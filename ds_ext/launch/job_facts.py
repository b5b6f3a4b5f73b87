"""Facts for the roll call: settings, versions and checksums of the source code, as key -> short text."""

from __future__ import annotations

import functools
import json
import os
import sys
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..environment import package_version
from .roll_call import Facts

_PACKAGES = ("ds_ext", "torch", "deepspeed")
_SOURCE = Path(__file__).parents[1]
# Only rank 0 reads these sections, so they may differ between hosts.
_RANK_0_SECTIONS = ("tensorboard", "wandb", "comet", "csv_monitor")


def code_facts() -> Facts:
    facts = {}
    for package in _PACKAGES:
        facts[f"version of {package}"] = package_version(package) or "not installed"
    facts["source of ds_ext"] = _source_checksum()
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is not None and os.path.isfile(script):
        facts[f"source of {os.path.basename(script)}"] = checksum([Path(script).read_bytes()])
    return facts


@functools.cache
def _source_checksum() -> str:
    """Return the checksum of the source of ds_ext, as it was at the first call of this process."""
    return checksum(path.read_bytes() for path in sorted(_SOURCE.rglob("*.py")))


def setting_facts(settings: Mapping[str, Any], prefix: str = "") -> Facts:
    facts: dict[str, str] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            facts |= setting_facts(value, f"{name}.")
        elif name.partition(".")[0] not in _RANK_0_SECTIONS:
            facts[name] = as_text(value)
    return facts


def file_facts(names: Mapping[str, Any]) -> Facts:
    paths = {
        key: Path(value) for key, value in names.items() if isinstance(value, str) and os.path.isfile(value)
    }
    return {f"contents of {key}": checksum([path.read_bytes()]) for key, path in paths.items()}


def as_text(value: Any) -> str:
    """Return a JSON value as text. Python objects become their type's name, because their repr contains an address."""
    return json.dumps(value, sort_keys=True, default=lambda value: type(value).__name__)


def checksum(parts: Iterable[bytes | memoryview]) -> str:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return f"{crc:08x}"
