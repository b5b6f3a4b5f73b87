"""Errors that ds_ext raises on purpose. A message reads ``<key or object>: <problem> (got <value>). <Fix>.``"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

# Place that answers for what other software has and ds_ext lacks.
ANSWERS = 'README.md, "Where is ...?"'


class DsExtError(Exception):
    """Base of all errors raised by ds_ext.

    Attributes:
        reported_by: the rank that prints this error when all ranks raise it; None: every rank prints its error.
    """

    reported_by: int | None = None

    def of_all_ranks(self) -> Self:
        """Return this error, which all ranks raise, for rank 0 to print."""
        self.reported_by = 0
        return self


class ConfigError(DsExtError, ValueError):
    """Invalid configuration: unknown key, impossible combination, missing file."""


class Problems:
    """Errors of a job, which are raised together.

    Attributes:
        errors: the errors so far.
        undecided: keys without a valid value. Checks that depend on one of them would report a wrong default.
    """

    def __init__(self) -> None:
        self.errors: list[ConfigError] = []
        self.undecided: set[str] = set()

    def add(self, text: str, *undecided: str) -> None:
        """Add an error with its text, and the keys that it leaves without a value."""
        self.errors.append(ConfigError(text))
        self.undecided.update(undecided)

    @contextmanager
    def collect(self, *undecided: str) -> Iterator[None]:
        """Add a ConfigError instead of raising it, and the keys that it leaves without a value."""
        try:
            yield
        except ConfigError as error:
            self.errors.append(error)
            self.undecided.update(undecided)

    def raise_all(self) -> None:
        """Raise one ConfigError with a line for each different error, if there are any."""
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise ConfigError("\n".join(dict.fromkeys(map(str, self.errors))))


class ScheduleError(DsExtError, ValueError):
    """Timetable that cannot be built or that fails a check."""


class TransportError(DsExtError, RuntimeError):
    """Failed message: dead peer, timeout, damaged header.

    Args:
        message: the error text.
        peer: the rank that did not respond; None if no other rank is at fault.
        rank: the rank that raises the error.
        op: "send to" or "recv from".
        tag: the message's tag.
        seconds: time spent waiting.
        credits: number of messages on the link that the receiver has not taken yet; sends only.
    """

    def __init__(
        self,
        message: str,
        peer: int | None = None,
        *,
        rank: int | None = None,
        op: str | None = None,
        tag: int | None = None,
        seconds: float | None = None,
        credits: int | None = None,
    ) -> None:
        super().__init__(message)
        self.peer, self.rank, self.op, self.tag = peer, rank, op, tag
        self.seconds, self.credits = seconds, credits


class PeerGone(TransportError):
    """A peer exited, closed its transport or failed; ``cause`` is the failure it reported, if any."""

    cause: str | None = None


class TransportTimeout(TransportError):
    """Time limit reached without progress, although the peer is alive."""


class ProtocolError(TransportError):
    """Malformed data from a peer. The data is discarded."""


class CheckpointError(DsExtError, RuntimeError):
    """Checkpoint that is missing or incomplete, or that does not fit the model."""


class NonFiniteLoss(DsExtError, ArithmeticError):
    """Infinite or NaN loss in too many consecutive steps.

    Attributes:
        first: (step, rank, parameter) of the first non-finite gradient; None if all gradients were finite.
    """

    def __init__(self, message: str, first: tuple[int, int, str] | None) -> None:
        super().__init__(message)
        self.first = first


class CorruptionError(DsExtError, ArithmeticError):
    """Bits that differ between ranks which must have the same ones: a fault of memory, transfer or arithmetic.

    Attributes:
        ranks: ranks that are at fault, or that differ from each other.
        lasting: the weights were wrong before the step, so the snapshots and newer checkpoints may be wrong too.
    """

    def __init__(self, message: str, ranks: list[int], lasting: bool) -> None:
        super().__init__(message)
        self.ranks, self.lasting = ranks, lasting
