"""Every error that ds_ext raises on purpose. Messages give the numbers and the way out."""


class DsExtError(Exception):
    """Base of all errors raised by ds_ext."""


class ConfigError(DsExtError, ValueError):
    """A configuration that cannot run: unknown key, impossible combination, missing file."""


class ScheduleError(DsExtError, ValueError):
    """A timetable that cannot be made, or one that a check refuses."""


class TransportError(DsExtError, RuntimeError):
    """A message that did not arrive: dead peer, time limit, damaged header.

    ``peer`` is the rank that was waited for in vain; None when the fault is not another rank's silence.
    """

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class CheckpointError(DsExtError, RuntimeError):
    """A checkpoint that is missing, incomplete or does not fit the model."""
