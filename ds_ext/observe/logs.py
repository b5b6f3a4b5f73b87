"""What a run shows besides its own lines."""

from __future__ import annotations

import logging
import os
import sys
import warnings

from ..errors import ConfigError

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

# True in every run of every rank and nothing that its user can act on.
_EXPECTED_LOGS = (
    "Attempting to get learning rate from scheduler before it has started",
    "Setting accelerator to CPU",
)
_EXPECTED_WARNINGS = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"


def set_up_logging(level: str | None = None) -> None:
    """Show the library's log on standard error, and leave out what DeepSpeed and torch say in every run.

    Call it after DeepSpeed has been imported. At "info" and "debug" nothing is left out, and DeepSpeed logs at that
    level too. Python's ``-W`` and ``PYTHONWARNINGS`` still decide about warnings.

    Args:
        level: debug, info, warning or error; by default that of
            DS_EXT_LOG_LEVEL in the environment, else warning.

    Raises:
        ConfigError: the level is unknown.
    """
    name = (level or os.environ.get("DS_EXT_LOG_LEVEL") or "warning").lower()
    if name not in _LEVELS:
        raise ConfigError(f"DS_EXT_LOG_LEVEL must be one of {', '.join(_LEVELS)}; got {name!r}.")
    number = _LEVELS[name]
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter(f"rank {os.environ.get('RANK', '0')} | %(levelname)s | %(name)s | %(message)s")
    )
    ours, theirs = logging.getLogger("ds_ext"), logging.getLogger("DeepSpeed")
    ours.handlers, ours.propagate = [handler], False
    ours.setLevel(number)
    if number < logging.WARNING:
        for logger in (theirs, *theirs.handlers):
            logger.setLevel(number)
        return
    theirs.addFilter(lambda record: record.levelno >= number and not _expected(record))
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", message=_EXPECTED_WARNINGS, category=FutureWarning)


def _expected(record: logging.LogRecord) -> bool:
    return record.getMessage().startswith(_EXPECTED_LOGS)
