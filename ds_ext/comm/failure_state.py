"""First failure of a transport, and its error messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..errors import PeerGone, TransportError, TransportTimeout
from .endpoints import FAILED
from .transport import describe_tag

_Error = TypeVar("_Error", bound=TransportError)


class FailureState:
    """First failure of one rank's transport.

    After a failure, the two sides may disagree on what was sent. So the transport refuses all further calls.

    Args:
        notify: sends the cause of the first failure to all peers, as "rank 1: ..." with the rank where it occurred.

    Attributes:
        reason: why the transport is unusable; None while it is usable.
    """

    def __init__(self, rank: int, notify: Callable[[str], None] = lambda cause: None) -> None:
        self.rank, self._notify = rank, notify
        self.reason: str | None = None

    def check(self) -> None:
        """Raise TransportError if the transport has failed or is closed."""
        if self.reason is not None:
            raise TransportError(
                f"rank {self.rank}: the transport cannot be used: {self.reason}", rank=self.rank
            )

    def record(self, error: _Error, cause: str | None = None) -> _Error:
        """Record a failure and return its error. The cause of the first failure is sent to the peers."""
        error.rank = self.rank
        if self.reason is None:
            self.reason = f"it has already failed: {str(error).removeprefix(f'rank {self.rank}: ')}"
            self._notify(cause or str(error))
        return error

    def failure(self, what: str, kind: type[TransportError] = TransportError) -> TransportError:
        return self.record(kind(f"rank {self.rank}: {what}"))

    def timeout(
        self,
        op: str,
        peer: int,
        tag: int,
        limit_s: float,
        in_flight: tuple[int, int, int] | None = None,
        final: bool = True,
    ) -> TransportTimeout:
        """Return the error for a wait that exceeded its limit.

        Args:
            op: "send to" or "recv from".
            in_flight: result of Outgoing.in_flight(), for a send.
            final: False if the caller set a shorter limit; the transport then stays usable.
        """
        more = f" ({in_flight[0]} messages in flight, {in_flight[2]} slots not released)" if in_flight else ""
        error = TransportTimeout(
            f"rank {self.rank}: {op} rank {peer} of {describe_tag(tag)}: no progress within the limit of "
            f"{round(limit_s, 2):g} s{more}. Look for the first error in the output of rank {peer}. If it is only "
            "slow, raise transport_options.timeout_s.",
            peer,
            rank=self.rank,
            op=op,
            tag=tag,
            seconds=limit_s,
            credits=in_flight[0] if in_flight else None,
        )
        return self.record(error) if final else error

    def peer_gone(self, op: str, ended: tuple[int, str], tag: int, waited_s: float) -> PeerGone:
        """Return the error for a wait for a peer that has ended; ``ended`` is (rank, how it ended)."""
        peer, how = ended
        cause = how.removeprefix(FAILED) if how.startswith(FAILED) else None
        text = (
            f"rank {peer} {how}, which closed the connection (waited {waited_s:.1f} s). It probably failed first. "
            f"Look for the first error in the output of rank {peer}."
            if cause is None
            else f"rank {peer} closed the connection (waited {waited_s:.1f} s), because it failed. First failure: "
            f"{cause}"
        )
        where = f"rank {self.rank}: {op} rank {peer} of {describe_tag(tag)}"
        error = PeerGone(f"{where}: {text}", peer, op=op, tag=tag, seconds=waited_s)
        error.cause = cause
        return self.record(error, cause)
