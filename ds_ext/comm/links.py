"""Links of one rank: their endpoints, the state of the peers, and tensors as the native code takes them."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ds_ext.comm import _native
from ds_ext.comm.endpoints import Endpoints
from ds_ext.comm.wire import CODES, check_sendable, dtype_of
from ds_ext.errors import TransportError

Pieces = list[tuple[int, Sequence[int], int]]  # of a message: (dtype code, shape, address of the contents)
# How a peer ended, as the native endpoints report it.
FAILED, CLOSED = "failed: ", "has closed its transport"


class Links:
    """All links of one rank.

    Args:
        port: takes the messages of all incoming links.
        endpoints: of the links from and to this rank; their watches are taken over.
        max_held: by peer, how many of its messages this rank may hold at a time.
    """

    def __init__(self, port: _native.Port, endpoints: Endpoints, max_held: Mapping[int, int]) -> None:
        self.port, self.max_held = port, max_held
        self.incoming, self.outgoing = endpoints.incoming, endpoints.outgoing
        self._watches = dict(endpoints.watches)
        self._polls = {peer: select.poll() for peer in self._watches}
        for peer, watch in self._watches.items():
            self._polls[peer].register(watch, select.POLLIN)

    def ended_peer(self, peers: Iterable[int]) -> tuple[int, str] | None:
        """Return a peer that will send nothing more, and how it ended; None while all may.

        Peers that have closed their transport count only if all have: the others may go on.
        """
        closed: list[tuple[int, str]] = []
        peers = list(peers)
        for peer in peers:
            endpoints = [links[peer] for links in (self.incoming, self.outgoing) if peer in links]
            reasons = filter(None, (endpoint.end_reason() for endpoint in endpoints))
            ranked = sorted(reasons, key=lambda reason: not reason.startswith(FAILED))
            if CLOSED in ranked[:1]:
                closed.append((peer, CLOSED))
            elif ranked:
                return peer, ranked[0]
            elif peer in self._polls and self._polls[peer].poll(0):
                return peer, "has ended"
        return closed[0] if closed and len(closed) == len(peers) else None

    def abort(self, cause: str) -> None:
        """Send the cause of this rank's failure to every peer."""
        for endpoint in (*self.incoming.values(), *self.outgoing.values()):
            endpoint.abort(cause)

    def close(self) -> None:
        """Close all endpoints. Memory that tensors lie in stays until the last of them is gone."""
        for endpoint in (*self.incoming.values(), *self.outgoing.values()):
            endpoint.close()
        for watch in self._watches.values():
            with contextlib.suppress(OSError):
                os.close(watch)
        self._watches, self._polls = {}, {}


def pieces_of(tensors: Sequence[Tensor]) -> tuple[Pieces, list[Tensor]]:
    """Return the tensors as the native code takes them, and the tensors whose memory it reads.

    These are copies where a tensor is strided, conjugated or negated.

    Raises:
        TransportError: one of them has a device, layout or dtype that cannot be sent.
    """
    pieces: Pieces = []
    sources: list[Tensor] = []
    for tensor in tensors:
        code = CODES.get(tensor.dtype)
        if code is None or not tensor.is_cpu or tensor.layout is not torch.strided:
            check_sendable(tensor)
            raise TransportError(
                f'a tensor on {tensor.device} cannot be sent from the CPU: use "transport": "torch"'
            )
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        pieces.append((code, tensor.shape, tensor.data_ptr()))
        sources.append(tensor)
    return pieces, sources


def views(memory: _native.Message) -> tuple[Tensor, ...]:
    """Return the tensors of a message in its memory, which each of them keeps.

    They are no views to autograd: each has a separate storage and version counter.
    """
    return tuple(
        torch.frombuffer(memory, dtype=dtype_of(code), count=count, offset=offset).resize_(shape)
        if count
        else torch.empty(shape, dtype=dtype_of(code))
        for code, shape, count, offset in memory.layout
    )


def copies(message: _native.Message) -> tuple[Tensor, ...]:
    """Return copies of the tensors of a message, and release its memory."""
    made = tuple(torch.empty(shape, dtype=dtype_of(code)) for code, shape, _, _ in message.layout)
    message.copy_out([tensor.data_ptr() for tensor in made])
    return made
