"""Whether a transport can still be used, and the words of its failures."""

from __future__ import annotations

from ds_ext.comm.transport import describe_tag
from ds_ext.errors import TransportError


class Health:
    """Of one rank's transport: sound, or the reason of its first failure.

    Behind a failure the two sides may not agree on what was sent, so nothing is sent or received any more.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.reason: str | None = None

    def check(self) -> None:
        """Raise TransportError unless the transport is sound."""
        if self.reason is not None:
            raise TransportError(f"rank {self.rank}: the transport cannot be used: {self.reason}")

    def broken(
        self, what: str, peer: int | None = None, kind: type[TransportError] = TransportError
    ) -> TransportError:
        """The error to raise for a failure; the first one is remembered."""
        self.reason = self.reason or f"it has failed before: {what}"
        return kind(f"rank {self.rank}: {what}", peer)

    def timed_out(self, action: str, peer: int, tag: int, limit_s: float, more: str = "") -> TransportError:
        """The error of a wait that took too long."""
        return self.broken(
            f"{action} rank {peer} of {describe_tag(tag)}: nothing moved within the limit of {round(limit_s, 2):g} s"
            f"{more}. See what rank {peer} is doing; if it is only slow, raise transport_options.timeout_s",
            peer,
        )

    def lost(self, action: str, gone: tuple[int, str], tag: int, waited_s: float) -> TransportError:
        """The error of a wait for a peer that is gone: (rank, what became of it)."""
        peer, what = gone
        return self.broken(
            f"{action} rank {peer} of {describe_tag(tag)}: rank {peer} {what}, which closed the connection after "
            f"{waited_s:.1f} s of waiting. It has most likely died or failed first: look for the first error in the "
            f"output of rank {peer}",
            peer,
        )
