"""Links that are slow: a transport that holds messages back, for measurements and tests on one host.

The sender writes beside a message when it is due, by the clock that all processes of a host share; the receiver gets it
then and not before. The sender does not wait, and messages under way do not slow each other down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.transport import ITEM_BITS, Ticket
from ..engine.dynamic.messages import is_counted
from ..engine.messages import MAX_STAGES, Kind
from ..pipe_schedules.ops import BACKWARD, FORWARD, Op

# (sending rank, receiving rank, the op that waits for the message) -> seconds
Delay = Callable[[int, int, Op], float]
_NAP_S = 0.0001  # between two looks at links that have something under way
_SPUN_S = 0.00005


class SlowLinks:
    """A transport over another one, whose messages take ``delay`` at least.

    Args:
        inner: moves the messages.
        rank: this global rank.
        delay: of every message; a whole backward stands for either kind.
        least_s: what every message takes at least: so long nothing that is not under way yet can be due.
    """

    def __init__(self, inner: Any, rank: int, delay: Delay, least_s: float = 0.0) -> None:
        self.inner, self.rank, self._delay = inner, rank, delay
        self._nap_s = max(least_s, _NAP_S)
        self.timeout_s: float = inner.timeout_s

    @property
    def name(self) -> str:
        """The inner transport's."""
        return self.inner.name

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Ticket:
        """Send at once, to be seen later."""
        due = time.monotonic() + self._delay(self.rank, peer, waits_for(tensors, tag))
        return self.inner.send((*tensors, torch.tensor(due, dtype=torch.float64)), peer, tag)

    def recv(self, peer: int, tag: int) -> LateTicket:
        """Ask for a message; see Transport.recv."""
        return LateTicket(self.inner.recv(peer, tag))

    def wait_any(self, tickets: Sequence[LateTicket], timeout_s: float | None = None) -> int:
        """Wait until one of the tickets is due; its position."""
        while True:
            for position, ticket in enumerate(tickets):
                if ticket.done():
                    return position
            under_way = [ticket.due for ticket in tickets if ticket.due is not None]
            if under_way:
                _sleep_until(min(min(under_way), time.monotonic() + self._nap_s))
            else:
                self.inner.wait_any([ticket.inner for ticket in tickets], timeout_s)

    def ready(self) -> list[tuple[int, int]]:
        """What the inner transport has, due or not."""
        return self.inner.ready()

    def abort(self, cause: str) -> None:
        """Tell the peers why this rank fails."""
        self.inner.abort(cause)

    def close(self) -> None:
        """Close the inner transport."""
        self.inner.close()


class LateTicket:
    """A message that may be here and is not due yet."""

    def __init__(self, inner: Ticket) -> None:
        self.inner = inner
        self.due: float | None = None
        self._tensors: tuple[Tensor, ...] = ()

    def done(self) -> bool:
        """Whether it is here and due."""
        if self.due is None:
            if not self.inner.done():
                return False
            self._take(None)
        return self.due is not None and time.monotonic() >= self.due

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        """Block until it is due."""
        if self.due is None:
            self._take(timeout_s)
        assert self.due is not None
        _sleep_until(self.due)
        return self._tensors

    def _take(self, timeout_s: float | None) -> None:
        *tensors, due = self.inner.wait(timeout_s)
        self._tensors, self.due = tuple(tensors), float(due)


def waits_for(tensors: Sequence[Tensor], tag: int) -> Op:
    """The op that needs a message of the engine."""
    if is_counted(tag):
        kind, stage, micro_batch = tensors[0][:3].tolist()
    else:
        (kind, stage), micro_batch = divmod(tag >> ITEM_BITS, MAX_STAGES), tag & (1 << ITEM_BITS) - 1
    return Op(FORWARD if kind == Kind.ACTIVATION else BACKWARD, micro_batch, stage)


def slow_down(engine: Any, delay: Delay, least_s: float = 0.0) -> None:
    """Have an engine that has not trained yet exchange its messages over slow links, as :class:`SlowLinks`."""
    engine.use_transport(SlowLinks(engine.transport, engine.global_rank, delay, least_s))


def _sleep_until(moment: float) -> None:
    left = moment - time.monotonic() - _SPUN_S
    if left > 0:
        time.sleep(left)
    while time.monotonic() < moment:
        pass
