"""Content of a ``config.json``, and its typed values. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError

_REQUIRED = object()


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}. Use a model folder that transformers' save_pretrained() wrote."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: invalid JSON (got {error}).") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must contain a JSON object (got {type(value).__name__}).")
    return value


def refused(key: str, value: object, problem: str) -> ConfigError:
    return ConfigError(f"{key}: {problem} (got {json.dumps(value)}).")


def require_supported(values: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ConfigError for an unsupported setting.

    ``supported`` is key -> supported values, the first of which is transformers' default.
    """
    for key, choices in supported.items():
        value = values.get(key, choices[0])
        if value not in choices:
            # 1.0 and 1 are one choice.
            texts = map(json.dumps, dict.fromkeys(choices))
            raise refused(key, value, f"only models with {' or '.join(texts)} can be converted")


def integer(values: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> Any:
    """Return an integer, or ``default`` if the key is missing. A null is None if there is a default."""
    value = values.get(key, None if default is _REQUIRED else default)
    if value is None and default is not _REQUIRED:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise refused(key, value, "must be an integer")
    return value


def number(values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise refused(key, value, "must be a number")
    return value
