"""What a rank is connected to: the native ends of all its links, and who of the peers is still there."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ds_ext.comm import _native
from ds_ext.comm.ends import Ends
from ds_ext.errors import TransportError

_DTYPES = tuple(getattr(torch, name, None) for name, _ in _native.ELEMENT_TYPES)
CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}
Pieces = list[tuple[int, Sequence[int], int]]  # of a message: (dtype code, shape, address of the contents)
FAILED = "failed: "  # begins what a peer has said of its failure
CLOSED = "has closed its transport"  # as the native ends say it


class Links:
    """Everything native of one rank, by peer.

    Args:
        port: the rank's bell, and all incoming links.
        ends: of the links to and from this rank; their watches are taken over.
        slots: how many messages of a peer this rank may hold at a time.
    """

    def __init__(self, port: _native.Port, ends: Ends, slots: Mapping[int, int]) -> None:
        self.port, self.incoming, self.outgoing, self.slots = port, ends.incoming, ends.outgoing, slots
        self._watches = dict(ends.watches)
        self._polls = {peer: select.poll() for peer in self._watches}
        for peer, watch in self._watches.items():
            self._polls[peer].register(watch, select.POLLIN)

    def gone(self, peers: Iterable[int]) -> tuple[int, str] | None:
        """One of the peers from which nothing more will come, and what became of it.

        Those that have closed in order, and perhaps ended since, count only where all have: the others may go on.
        """
        closed: list[tuple[int, str]] = []
        peers = list(peers)
        for peer in peers:
            ends = [links[peer] for links in (self.incoming, self.outgoing) if peer in links]
            told = sorted(
                filter(None, (end.gone() for end in ends)), key=lambda text: not text.startswith(FAILED)
            )
            if CLOSED in told[:1]:
                closed.append((peer, CLOSED))
            elif told:
                return peer, told[0]
            elif peer in self._polls and self._polls[peer].poll(0):
                return peer, "has ended"
        return closed[0] if closed and len(closed) == len(peers) else None

    def abort(self, cause: str) -> None:
        """Tell every peer why this rank fails."""
        for link in (*self.incoming.values(), *self.outgoing.values()):
            link.abort(cause)

    def close(self) -> None:
        """Tell the peers that this rank is done. Memory that tensors lie in stays until the last of them is gone."""
        for link in (*self.incoming.values(), *self.outgoing.values()):
            link.close()
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
            raise TransportError(_why_not(tensor))
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        pieces.append((code, tensor.shape, tensor.data_ptr()))
        sources.append(tensor)
    return pieces, sources


def views(memory: _native.Message) -> tuple[Tensor, ...]:
    """The tensors of a message where they lie; each keeps the memory.

    They are no views to autograd: each has a storage and a version counter of its own.
    """
    return tuple(
        torch.frombuffer(memory, dtype=dtype_of(code), count=count, offset=offset).resize_(shape)
        if count
        else torch.empty(shape, dtype=dtype_of(code))
        for code, shape, count, offset in memory.layout
    )


def copies(message: _native.Message) -> tuple[Tensor, ...]:
    """The tensors of a message in memory of their own; its memory goes back."""
    made = tuple(torch.empty(shape, dtype=dtype_of(code)) for code, shape, _, _ in message.layout)
    message.copy_out([tensor.data_ptr() for tensor in made])
    return made


def dtype_of(code: int) -> torch.dtype:
    """The dtype with a code that the native code has checked."""
    dtype = _DTYPES[code]
    if dtype is None:
        name = _native.ELEMENT_TYPES[code][0]
        raise _native.DescriptorError(f"the peer sends {name}, which torch {torch.__version__} does not have")
    return dtype


def _why_not(tensor: Tensor) -> str:
    if tensor.dtype not in CODES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in CODES)
        return f"tensors of {tensor.dtype} cannot be sent; known: {names}"
    if not tensor.is_cpu:
        return f'a tensor on {tensor.device} cannot be sent from the CPU: use "transport": "torch"'
    return f"a {tensor.layout} tensor cannot be sent: make it dense with to_dense()"
