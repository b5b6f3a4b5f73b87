"""What NativeTransport gives out and keeps for its messages."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from ds_ext.comm import _native
from ds_ext.comm.links import views

if TYPE_CHECKING:
    from ds_ext.comm.native_transport import NativeTransport


class Sent:
    """A message is on its way, and its tensors are the sender's again, when send() returns."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        return ()


SENT = Sent()


@dataclass(eq=False, slots=True)
class RecvTicket:
    """What recv() gives; see transport.Ticket."""

    transport: NativeTransport
    peer: int
    tag: int
    message: _native.Message | None = None
    tensors: tuple[Tensor, ...] | None = None

    @property
    def arrived(self) -> bool:
        """What done() is without looking for new messages."""
        return self.message is not None or self.tensors is not None

    def done(self) -> bool:
        if not self.arrived:
            self.transport.drain()
        return self.arrived

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        return self.transport.finish_recv(self, timeout_s)


class LentSlot:
    """A tensor that is sent where it lies, for the time of a block; see NativeTransport.loan."""

    def __init__(self, slot: _native.Loan) -> None:
        self._slot = slot

    def __enter__(self) -> Tensor:
        return views(self._slot)[0]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._slot.publish()
        else:
            self._slot.cancel()


@dataclass(eq=False)
class Channel:
    """What has arrived and was not asked for, or was asked for and has not arrived."""

    messages: deque[_native.Message] = field(default_factory=deque)
    tickets: deque[RecvTicket] = field(default_factory=deque)
