"""Interface of the transports that move tensors between ranks; tags; the table of transports.

A transport addresses peers by global rank and messages by tag, independent of pipelines. Every message contains its
shapes and dtypes, which may change from one message to the next.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from ..errors import TransportError

if TYPE_CHECKING:
    from torch import Tensor, device

ITEM_BITS = 16
TAG_LIMIT = 1 << 31
DEFAULT_MAX_HELD = 16  # messages per link that a receiver may hold if no timetable sets the number

# Name -> "module:function". The function takes timeout_s, device, pairs and node_ips; that of "auto" also polled.
TRANSPORTS: Mapping[str, str] = MappingProxyType(
    {
        "auto": "ds_ext.comm.native:create_auto",
        "shm": "ds_ext.comm.native:create_shm",
        "rdma": "ds_ext.comm.native:create_rdma",
        "tcp": "ds_ext.comm.native:create_tcp",
        "torch": "ds_ext.comm.torch_split:create",
    }
)


class Ticket(Protocol):
    """Transfer in progress. Wait for every ticket, or close its transport."""

    def done(self) -> bool:
        """Return whether wait() would return at once; for a send this may become true late."""
        ...

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        """Block until the transfer ends and return the received tensors; empty for a send.

        Received tensors own their memory, so no later message changes it. TransportError names rank, peer, tag,
        seconds and cause if ``timeout_s`` expires (None: the transport's limit) or the peer dies. The transport is
        unusable afterwards, except after a receive over native links with an explicit ``timeout_s``: that ticket may
        be waited for again.
        """
        ...


class Transport(Protocol):
    """Point-to-point messages of one rank. Not thread-safe.

    A tag is an int below 2**31: ``tag >> 16`` is the channel, and the lower 16 bits are the item. Within a channel,
    for each peer and direction, both sides must use the items in the same order. Between channels any order is allowed.
    """

    @property
    def name(self) -> str:
        """Name of the transport in use, for metrics; never "auto"."""
        ...

    @property
    def timeout_s(self) -> float:
        """Time limit on every wait, in seconds."""
        ...

    @timeout_s.setter
    def timeout_s(self, value: float) -> None: ...

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Ticket:
        """Send tensors (at least one; any dtype, up to 8 dimensions) as one message.

        The caller may change the tensors after the call. The call blocks only if the link has no credit, which does
        not happen in a pipeline.
        """
        ...

    def recv(self, peer: int, tag: int) -> Ticket:
        """Receive the next message of the tag's channel. Its tag must be ``tag``."""
        ...

    def ready(self) -> list[tuple[int, int]]:
        """Return (peer, tag) of all messages that have arrived but have not been waited for.

        Transports over torch.distributed report only messages whose recv() has been called.
        """
        ...

    def settle(self) -> None:
        """Wait until the receives that the GPU still has to do are complete, within the time limit.

        Call it before the host waits for the GPU, whose wait would have no limit and would name no peer.
        """
        ...

    def abort(self, cause: str) -> None:
        """Send the cause of this rank's failure to the peers, if the transport supports it. Never waits."""
        ...

    def close(self) -> None:
        """Wait for unfinished sends, within the time limit. The transport is unusable afterwards."""
        ...


def make_tag(channel: int, item: int) -> int:
    """Return the tag of an item on a channel: ``channel`` below 2**15, ``item`` modulo 2**16.

    Raises:
        TransportError: the channel is out of range.
    """
    if not 0 <= channel < TAG_LIMIT >> ITEM_BITS:
        raise TransportError(f"channel: must be in 0..{(TAG_LIMIT >> ITEM_BITS) - 1} (got {channel}).")
    return channel << ITEM_BITS | item & (1 << ITEM_BITS) - 1


def describe_tag(tag: int) -> str:
    """Return a tag as error messages show it."""
    return f"tag {tag} (channel {tag >> ITEM_BITS}, item {tag & (1 << ITEM_BITS) - 1})"


def check_address(rank: int, world_size: int, peer: int, tag: int) -> None:
    """Raise TransportError for an invalid peer or tag."""
    if not 0 <= peer < world_size or peer == rank:
        raise TransportError(
            f"rank {rank}: a peer must be another rank in 0..{world_size - 1} (got {peer}). "
            "Copy tensors locally on the same rank."
        )
    if not 0 <= tag < TAG_LIMIT:
        raise TransportError(f"rank {rank}: a tag must be in 0..{TAG_LIMIT - 1} (got {tag}). Use make_tag().")


def create_transport(
    name: str,
    *,
    timeout_s: float,
    device: device,
    pairs: Iterable[tuple[int, int]] | Mapping[tuple[int, int], int] = (),
    node_ips: Sequence[str] | None = None,
    polled: bool = False,
) -> Transport:
    """Create the transport ``name``; a collective call of all ranks.

    Args:
        name: a key of TRANSPORTS.
        timeout_s: time limit on every wait for a peer, in seconds.
        device: device of the received tensors.
        pairs: directed pairs (source, destination) of global ranks that exchange messages, the same on every rank;
            empty: all pairs. The values of a mapping limit how many messages the receiver may hold at a time.
        node_ips: addresses on which ranks listen for other hosts, one per rank or one per host in the launcher's
            order; None: each rank's local address on the route to MASTER_ADDR.
        polled: whether ready() must report messages for which recv() has not been called. Affects only "auto".

    Raises:
        TransportError: the name is unknown, the transport cannot be used, or torch.distributed is not initialized.
    """
    if name not in TRANSPORTS:
        raise TransportError(f"transport: unknown (got {name!r}). Use one of {', '.join(TRANSPORTS)}.")
    module, function = TRANSPORTS[name].split(":")
    try:
        factory = getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise TransportError(
            f"ds_ext.comm._native: cannot be imported ({error}). Build it with `pip install -e .` in the "
            "checkout, which needs g++ and the Python headers."
        ) from error
    links = pairs if isinstance(pairs, Mapping) else dict.fromkeys(pairs, DEFAULT_MAX_HELD) or ()
    more = {"polled": polled} if name == "auto" else {}
    return factory(timeout_s=timeout_s, device=device, pairs=links, node_ips=node_ips, **more)
