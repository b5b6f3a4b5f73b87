"""Facts that ranks compare before the first step: settings, versions and source code, as short texts by key."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .roll_call import Facts

_PACKAGES = ("ds_ext", "torch", "deepspeed")
_SOURCE = Path(__file__).parents[1]
# Rank 0 alone reads these: hosts may differ.
_OF_RANK_0 = ("tensorboard", "wandb", "comet", "csv_monitor")


def code_facts() -> Facts:
    """Return versions, and checksums of the source code of ds_ext and of the script that runs."""
    found = {}
    for package in _PACKAGES:
        try:
            found[f"version of {package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[f"version of {package}"] = "not installed"
    found["source of ds_ext"] = checksum(path.read_bytes() for path in sorted(_SOURCE.rglob("*.py")))
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is not None and os.path.isfile(script):
        found[f"source of {os.path.basename(script)}"] = checksum([Path(script).read_bytes()])
    return found


def setting_facts(settings: Mapping[str, Any], prefix: str = "") -> Facts:
    """Return the settings of a JSON, nested keys joined by dots, without those that rank 0 alone reads."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found |= setting_facts(value, f"{name}.")
        elif name.partition(".")[0] not in _OF_RANK_0:
            found[name] = as_text(value)
    return found


def file_facts(names: Mapping[str, Any]) -> Facts:
    """Return the checksums of those values that are paths of files, by key."""
    paths = {
        key: Path(value) for key, value in names.items() if isinstance(value, str) and os.path.isfile(value)
    }
    return {f"contents of {key}": checksum([path.read_bytes()]) for key, path in paths.items()}


def as_text(value: Any) -> str:
    """Return a value of a JSON as text; objects, which print their address, by their type."""
    return json.dumps(value, sort_keys=True, default=lambda one: type(one).__name__)


def checksum(parts: Iterable[bytes | memoryview]) -> str:
    """Return the CRC-32 of all parts together, in hexadecimal."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return f"{crc:08x}"
