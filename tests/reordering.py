"""A transport whose messages come late and in another order than they were sent, by a seed.

The real ones deliver each link's messages in order. An order that is decided at run time must not lean on that: what a
message is about stands in the message.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random
from typing import Any

from torch import Tensor

from ds_ext.engine.dynamic.messages import is_numbered

_AHEAD = 3  # messages of a link among which the order is thrown
_NAP_S = 0.0002


class Reordering:
    """A transport over another one, for :class:`~ds_ext.engine.dynamic.messages.DynamicMessages`.

    Of each link up to three messages that have come may wait for their time, which is random; the one whose time is
    first is given out first.

    Args:
        inner: moves the messages.
        longest_s: that a message is held back.

    Attributes:
        random: by which times are drawn; to be replaced between steps.
        overtaken: messages that were given out before one that was sent earlier.
    """

    def __init__(self, inner: Any, longest_s: float) -> None:
        self.inner, self.longest_s, self.timeout_s = inner, longest_s, inner.timeout_s
        self.random, self.overtaken = Random(0), 0
        self._asked: dict[int, list[Held]] = {}
        self._next: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def recv(self, peer: int, tag: int) -> Any:
        """Ask for a message: one whose tag counts is any of the next three of its link."""
        return Thrown(self, peer, tag) if is_numbered(tag) else self.inner.recv(peer, tag)

    def held(self, peer: int, tag: int) -> list[Held]:
        """The tickets of the link's next messages, by the order in which they were sent."""
        asked, first = self._asked.setdefault(peer, []), self._next.setdefault(peer, tag)
        while len(asked) < _AHEAD:
            asked.append(Held(self.inner.recv(peer, first), first))
            first = self._next[peer] = first - (first & 0xFFFF) + (first + 1 & 0xFFFF)
        return asked

    def wait_any(self, tickets: Sequence[Any], timeout_s: float | None = None) -> int:
        """Wait until one of the tickets is done; its position."""
        while True:
            for position, ticket in enumerate(tickets):
                if ticket.done():
                    return position
            if any(held.due is not None for ticket in tickets for held in ticket.held()):
                time.sleep(_NAP_S)
            else:
                inner = [held.ticket for ticket in tickets for held in ticket.held()]
                self.inner.wait_any(inner, timeout_s)


class Held:
    """A message that was asked for, and from when on it is given out."""

    def __init__(self, ticket: Any, tag: int) -> None:
        self.ticket, self.tag = ticket, tag
        self.due: float | None = None


class Thrown:
    """One of a link's next messages, whichever's time comes first."""

    def __init__(self, transport: Reordering, peer: int, tag: int) -> None:
        self._transport, self._peer, self._tag = transport, peer, tag
        self._found: Held | None = None

    def held(self) -> list[Held]:
        """What is asked for on this link."""
        return self._transport.held(self._peer, self._tag)

    def done(self) -> bool:
        """Whether one is here whose time has come."""
        held, now = self.held(), time.monotonic()
        for one in held:
            if one.due is None and one.ticket.done():
                one.due = now + self._transport.random.uniform(0, self._transport.longest_s)
        ready = [one for one in held if one.due is not None and one.due <= now]
        if self._found is None and ready:
            self._found = min(ready, key=lambda one: one.due or 0.0)
            self._transport.overtaken += held.index(self._found) > 0
            held.remove(self._found)
        return self._found is not None

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors of the message."""
        while not self.done():
            self._transport.wait_any([self])
        assert self._found is not None
        tensors: tuple[Tensor, ...] = self._found.ticket.wait()
        return tensors
