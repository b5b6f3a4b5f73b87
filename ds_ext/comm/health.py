"""Whether a transport can still be used, and the words of its failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ds_ext.comm.links import FAILED
from ds_ext.comm.transport import describe_tag
from ds_ext.errors import PeerGone, TransportError, TransportTimeout

_Error = TypeVar("_Error", bound=TransportError)


class Health:
    """Of one rank's transport: sound, or the reason of its first failure.

    Behind a failure the two sides may not agree on what was sent, so nothing is sent or received any more.

    Args:
        rank: this rank.
        tell: gives all peers the cause of the first failure, as "rank 1: ..." with the rank where it began.
    """

    def __init__(self, rank: int, tell: Callable[[str], None]) -> None:
        self.rank, self._tell = rank, tell
        self.reason: str | None = None

    def check(self) -> None:
        """Raise TransportError unless the transport is sound."""
        if self.reason is not None:
            raise TransportError(
                f"rank {self.rank}: the transport cannot be used: {self.reason}", rank=self.rank
            )

    def broken(self, error: _Error, cause: str | None = None) -> _Error:
        """The error to raise for a failure; the first one is remembered, and the peers are told its cause."""
        error.rank = self.rank
        if self.reason is None:
            self.reason = f"it has failed before: {str(error).removeprefix(f'rank {self.rank}: ')}"
            self._tell(cause or str(error))
        return error

    def failed(self, what: str, kind: type[TransportError] = TransportError) -> TransportError:
        """The error of something that went wrong here."""
        return self.broken(kind(f"rank {self.rank}: {what}"))

    def timed_out(
        self,
        op: str,
        peer: int,
        tag: int,
        limit_s: float,
        untaken: tuple[int, int, int] | None = None,
        final: bool = True,
    ) -> TransportTimeout:
        """The error of a wait that took too long; ``untaken`` as of Outgoing.

        One that is not ``final``, because the caller only looked for so long, is no failure of the transport.
        """
        more = f" ({untaken[0]} messages untaken, {untaken[2]} slots not back)" if untaken else ""
        error = TransportTimeout(
            f"rank {self.rank}: {op} rank {peer} of {describe_tag(tag)}: nothing moved within the limit of "
            f"{round(limit_s, 2):g} s{more}. See what rank {peer} is doing; if it is only slow, raise "
            "transport_options.timeout_s",
            peer,
            rank=self.rank,
            op=op,
            tag=tag,
            seconds=limit_s,
            credits=untaken[0] if untaken else None,
        )
        return self.broken(error) if final else error

    def lost(self, op: str, gone: tuple[int, str], tag: int, waited_s: float) -> PeerGone:
        """The error of a wait for a peer that is gone: (rank, what became of it)."""
        peer, what = gone
        cause = what.removeprefix(FAILED) if what.startswith(FAILED) else None
        told = (
            f"rank {peer} {what}, which closed the connection after {waited_s:.1f} s of waiting. It has most likely "
            f"died or failed first: look for the first error in the output of rank {peer}"
            if cause is None
            else f"rank {peer} closed the connection after {waited_s:.1f} s of waiting, because it failed. What "
            f"failed first: {cause}"
        )
        where = f"rank {self.rank}: {op} rank {peer} of {describe_tag(tag)}"
        error = PeerGone(f"{where}: {told}", peer, op=op, tag=tag, seconds=waited_s)
        error.cause = cause
        return self.broken(error, cause)
