"""Every error that ds_ext raises on purpose. Messages give the numbers and the way out."""


class DsExtError(Exception):
    """Base of all errors raised by ds_ext.

    Attributes:
        reported_by: the rank that reports an error which every rank raises; None: each rank reports its own.
    """

    reported_by: int | None = None


class ConfigError(DsExtError, ValueError):
    """A configuration that cannot run: unknown key, impossible combination, missing file."""


class ScheduleError(DsExtError, ValueError):
    """A timetable that cannot be made, or one that a check refuses."""


class TransportError(DsExtError, RuntimeError):
    """A message that did not arrive: dead peer, time limit, damaged header.

    Args:
        message: the whole text.
        peer: the rank that was waited for in vain; None when the fault is not another rank's silence.
        rank: the rank that has the error.
        op: "send to" or "recv from".
        tag: of the message.
        seconds: how long it was waited for.
        credits: messages of the link that were sent and not taken, where the op is a send.
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
    """The peer has ended, has closed its transport, or has failed; ``cause`` is what it said of its failure."""

    cause: str | None = None


class TransportTimeout(TransportError):
    """Nothing moved within the time limit; the peer is there."""


class ProtocolError(TransportError):
    """What a peer has written cannot be right; nothing of it is used."""


class CheckpointError(DsExtError, RuntimeError):
    """A checkpoint that is missing, incomplete or does not fit the model."""


class NonFiniteLoss(DsExtError, ArithmeticError):
    """The loss was infinite or not a number for too many steps in a row.

    ``first`` is (step, rank, parameter) of the first gradient that was not finite; None when all were.
    """

    def __init__(self, message: str, first: tuple[int, int, str] | None) -> None:
        super().__init__(message)
        self.first = first
