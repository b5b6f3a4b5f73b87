"""Slow links: a transport that holds messages back, for measurements on one host.

The sender adds to each message the time at which it is due; the receiver does not get the message before that time. The
sender does not wait, and messages in flight do not slow each other down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_ext.comm.channels import MAX_STAGES
from ds_ext.comm.transport import ITEM_BITS, Ticket
from ds_ext.engine.dynamic.messages import is_numbered
from ds_ext.engine.messages import MessageKind
from ds_ext.pipe_schedules.ops import BACKWARD, FORWARD, Op

from .emulated import sleep_until

# (sending rank, receiving rank, op that waits for the message) -> seconds
Delay = Callable[[int, int, Op], float]
_POLL_S = 0.0001  # shortest interval between two polls of links with messages in flight


class SlowLinks:
    """Transport whose messages take at least ``delay``.

    Args:
        inner: moves the messages.
        rank: this global rank.
        delay: function that returns the delay of a message; BACKWARD stands for any kind of backward.
        least_s: shortest delay. A message that has not been sent yet is not due before this time has passed.
    """

    def __init__(self, inner: Any, rank: int, delay: Delay, least_s: float) -> None:
        self.inner, self.rank, self._delay = inner, rank, delay
        self._poll_s = max(least_s, _POLL_S)
        self.timeout_s: float = inner.timeout_s
        self.name: str = inner.name
        self.ready, self.settle, self.abort, self.close = inner.ready, inner.settle, inner.abort, inner.close

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Ticket:
        """Send immediately. The receiver gets the message when it is due."""
        due = time.perf_counter() + self._delay(self.rank, peer, _waiting_op(tensors, tag))
        return self.inner.send((*tensors, torch.tensor(due, dtype=torch.float64)), peer, tag)

    def recv(self, peer: int, tag: int) -> LateTicket:
        """Request a message; see Transport.recv."""
        return LateTicket(self.inner.recv(peer, tag))

    def wait_any(self, tickets: Sequence[LateTicket], timeout_s: float | None = None) -> int:
        """Wait until one of the tickets is due. Returns its position."""
        while True:
            for position, ticket in enumerate(tickets):
                if ticket.done():
                    return position
            in_flight = [ticket.due for ticket in tickets if ticket.due is not None]
            if in_flight:
                sleep_until(min(*in_flight, time.perf_counter() + self._poll_s))
            else:
                self.inner.wait_any([ticket.inner for ticket in tickets], timeout_s)


class LateTicket:
    """Message that may have arrived before it is due."""

    def __init__(self, inner: Ticket) -> None:
        self.inner = inner
        self.due: float | None = None
        self._tensors: tuple[Tensor, ...] = ()

    def done(self) -> bool:
        """Return True if the message has arrived and is due."""
        if self.due is None:
            if not self.inner.done():
                return False
            self._take(None)
        return self.due is not None and time.perf_counter() >= self.due

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        """Block until the message is due. Returns its tensors."""
        if self.due is None:
            self._take(timeout_s)
        assert self.due is not None
        sleep_until(self.due)
        return self._tensors

    def _take(self, timeout_s: float | None) -> None:
        *tensors, due = self.inner.wait(timeout_s)
        self._tensors, self.due = tuple(tensors), float(due)


def slow_down(engine: Any, delay: Delay, least_s: float) -> None:
    """Replace the transport of an engine that has not trained yet with :class:`SlowLinks`."""
    engine.use_transport(SlowLinks(engine.transport, engine.global_rank, delay, least_s))


def _waiting_op(tensors: Sequence[Tensor], tag: int) -> Op:
    """Return the op that waits for a message of the engine."""
    if is_numbered(tag):
        kind, stage, micro_batch = tensors[0][:3].tolist()
    else:
        (kind, stage), micro_batch = divmod(tag >> ITEM_BITS, MAX_STAGES), tag & (1 << ITEM_BITS) - 1
    kind = FORWARD if kind == MessageKind.ACTIVATION else BACKWARD
    return Op(kind, micro_batch, stage)
