"""What the error of a lost rank says in its first line: what this rank was doing, and who the others are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..comm.host_watch import require_hosts
from ..launch.failure import first_line, lost_peer


class TellsWhatItDid:
    """An engine whose verbs name themselves in the errors of lost ranks."""

    _doing = "setting up"

    @contextmanager
    def _during(self, doing: str) -> Iterator[None]:
        """While this goes on, the error of a rank that is gone or silent ends its first line with it.

        Args:
            doing: such as ``step 4``; an instruction that fails puts its own name before it.
        """
        self._doing = doing
        try:
            require_hosts()
            yield
        except Exception as error:
            if lost_peer(error):
                first, more = first_line(error), str(error).splitlines()[1:]
                told = "; ".join(filter(None, [self._doing, self._who(first)]))
                error.args = ("\n".join([f"{first} ({told})", *more]),)
            raise

    def _who(self, told: str) -> str:
        """Who the ranks are that an error names; empty where their numbers say enough."""
        return ""
