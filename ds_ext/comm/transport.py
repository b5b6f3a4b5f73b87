"""Interface of the transports that move tensors between pipeline ranks, its tags, and the table of transports.

A transport knows peers (global ranks) and tags, and nothing of pipelines. Messages carry their own shapes and
dtypes, so nothing is agreed on beforehand and shapes may change from one message to the next.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from ds_ext.errors import TransportError

if TYPE_CHECKING:
    from torch import Tensor, device

ITEM_BITS = 16
TAG_LIMIT = 1 << 31
# Channels that transports of GPU tensors use themselves.
GPU_CONTROL, GPU_PIECES = (1 << 14) - 2, (1 << 14) - 1
DEFAULT_MAX_HELD = 16  # messages of a link that a receiver may hold, where no timetable gives the number

# A value is "module:function"; the function takes create_transport's arguments after the name.
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
    """A transfer under way. Every ticket is to be waited for, or closed with its transport."""

    def done(self) -> bool:
        """True once wait() would return at once; of a send it may become known only later."""
        ...

    def wait(self, timeout_s: float | None = None) -> tuple[Tensor, ...]:
        """Block until the transfer is over and return the received tensors (of a send: none).

        Received tensors own their memory: no later message touches it. After `timeout_s` seconds (None: the
        transport's own limit), or when the peer dies, TransportError names rank, peer, tag, seconds and
        cause. That is the end of the transport, but for a receive over native links whose `timeout_s` was given:
        it may be waited for again.
        """
        ...


class Transport(Protocol):
    """Point-to-point messages of one rank.

    A tag is an int below 2**31: `tag >> 16` names a channel, the lower 16 bits the item. Per peer, direction
    and channel both sides use the items in the same order (a static schedule is first-in first-out per
    channel, and the checker proves it); between channels any order is allowed. Not thread-safe: one thread
    per rank uses it.
    """

    @property
    def name(self) -> str:
        """The transport in use, as metrics show it; "auto" is none."""
        ...

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Ticket:
        """Send tensors (at least one; any dtype, up to 8 dimensions) as one message.

        The tensors may be changed as soon as this returns. It blocks only when much more than a pipeline ever keeps
        under way is still unreceived.
        """
        ...

    def recv(self, peer: int, tag: int) -> Ticket:
        """Ask for the next message of the tag's channel, which must carry exactly this tag."""
        ...

    def ready(self) -> list[tuple[int, int]]:
        """(peer, tag) of the messages that have arrived and were not yet waited for.

        A transport over torch.distributed sees only those whose recv() has been called.
        """
        ...

    def abort(self, cause: str) -> None:
        """Tell the peers why this rank fails, so that their errors show it, where the transport can; never waits."""
        ...

    def close(self) -> None:
        """Wait for unfinished sends, within the time limit, and refuse further use."""
        ...


def make_tag(channel: int, item: int) -> int:
    """Return the tag of an item on a channel: `channel` below 2**15, `item` counted modulo 2**16.

    Raises:
        TransportError: the channel is out of range.
    """
    if not 0 <= channel < TAG_LIMIT >> ITEM_BITS:
        raise TransportError(f"channel {channel} is not in 0..{(TAG_LIMIT >> ITEM_BITS) - 1}")
    return channel << ITEM_BITS | item & (1 << ITEM_BITS) - 1


def describe_tag(tag: int) -> str:
    """Return a tag as error messages show it."""
    return f"tag {tag} (channel {tag >> ITEM_BITS}, item {tag & (1 << ITEM_BITS) - 1})"


def check_address(rank: int, world_size: int, peer: int, tag: int) -> None:
    """Raise TransportError for a peer or a tag that no message can have."""
    if not 0 <= peer < world_size or peer == rank:
        raise TransportError(
            f"rank {rank} of {world_size} cannot exchange messages with rank {peer}: "
            "a peer is another global rank (tensors stay on their own rank by a local copy)"
        )
    if not 0 <= tag < TAG_LIMIT:
        raise TransportError(
            f"rank {rank}: tag {tag} is not in 0..{TAG_LIMIT - 1}; make tags with make_tag()"
        )


def create_transport(
    name: str,
    *,
    timeout_s: float,
    device: device,
    pairs: Iterable[tuple[int, int]] | Mapping[tuple[int, int], int] = (),
    node_ips: Sequence[str] | None = None,
    polled: bool = False,
) -> Transport:
    """Make the transport `name` on every rank of the world (a collective call).

    Args:
        name: a key of TRANSPORTS.
        timeout_s: the longest wait for a peer, in seconds.
        device: where received tensors are to lie.
        pairs: the directed pairs (source, destination) of global ranks that will be used, the same on every rank; as
            a mapping also with how many messages the receiver may hold at a time. On GPUs each gets
            a communicator, in shared memory a segment; left out: every rank with every other.
        node_ips: the addresses at which ranks listen for connections of other hosts: one for each rank, or one for
            each host in the launcher's order; None: those from which they reach MASTER_ADDR.
        polled: "auto" must choose one that tells what has come without waiting for it.

    Raises:
        TransportError: the name is unknown or cannot be used here, or torch.distributed is not initialized.
    """
    if name not in TRANSPORTS:
        raise TransportError(f'transport "{name}" unknown; known: {", ".join(TRANSPORTS)}')
    module, function = TRANSPORTS[name].split(":")
    factory = getattr(importlib.import_module(module), function)
    links = pairs if isinstance(pairs, Mapping) else dict.fromkeys(pairs, DEFAULT_MAX_HELD) or ()
    more = {"polled": polled} if name == "auto" else {}
    return factory(timeout_s=timeout_s, device=device, pairs=links, node_ips=node_ips, **more)
