"""Which native transport a job uses: "shm" between ranks of one host, and "auto", which takes it where it can."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_ext.comm import torch_p2p
from ds_ext.comm.rendezvous import Card
from ds_ext.comm.shm import ShmTransport
from ds_ext.comm.shm_setup import Pairs, Setup
from ds_ext.comm.transport import DEFAULT_SLOTS, Transport
from ds_ext.errors import TransportError

logger = logging.getLogger(__name__)


def create_shm(*, timeout_s: float, device: torch.device, pairs: Pairs | tuple[()]) -> ShmTransport:
    """The transport "shm"; a collective call of all ranks of the world, with the same arguments.

    Args:
        timeout_s: the longest wait for a peer.
        device: of the tensors; only "cpu".
        pairs: (source, destination) of the links, with how many messages the receiver holds at a time; (): every rank
            with every other.

    Raises:
        TransportError: on all ranks, with the reason of the first that cannot.
    """
    made = _try_shm(timeout_s, device, pairs)
    if isinstance(made, str):
        raise TransportError(f'"transport": "shm" cannot be used: {made}. Use "auto" or "torch".')
    return made


def create_auto(*, timeout_s: float, device: torch.device, pairs: Pairs | tuple[()]) -> Transport:
    """The transport "shm" where it can be used, "torch" elsewhere, for the same arguments; collective."""
    made = _try_shm(timeout_s, device, pairs)
    if not isinstance(made, str):
        return made
    _tell(f"transport: torch, because {made}")
    return torch_p2p.create(timeout_s=timeout_s, device=device, pairs=tuple(pairs))


def _try_shm(timeout_s: float, device: torch.device, pairs: Pairs | tuple[()]) -> ShmTransport | str:
    """The transport, or why there is none; every rank gets the same answer."""
    if not dist.is_initialized():
        raise TransportError(
            "torch.distributed is not initialized: call deepspeed.init_distributed() first, "
            "in processes that `deepspeed` or `torchrun` has started"
        )
    if device.type != "cpu":
        return f"the tensors are on {device.type}, and shared memory is for those of the CPU"
    rank, everyone = dist.get_rank(), range(dist.get_world_size())
    if not isinstance(pairs, Mapping):
        pairs = {(a, b): DEFAULT_SLOTS for a in everyone for b in everyone if a != b}
    setup = Setup(rank, pairs)
    try:
        cards = _gather(setup.card())
        reason = _why_not(cards, pairs) or _first(_gather(setup.connect(cards, timeout_s)))
        if reason is not None:
            return reason
        most = max(pairs.values(), default=0)
        _tell(
            f"transport: shm, because all ranks that exchange messages are on one host; {len(pairs)} links, of which "
            f"the receiver uses up to {most} messages where they lie"
        )
        return ShmTransport(setup.links(cards), rank, len(everyone), timeout_s)
    finally:
        setup.close()


def _why_not(cards: Sequence[Card], pairs: Pairs) -> str | None:
    """Why these ranks do not even try; the same on all of them."""
    for rank, card in enumerate(cards):
        if card.refusal is not None:
            return f"rank {rank} cannot share memory: {card.refusal}"
    for source, target in pairs:
        if cards[source].host != cards[target].host:
            return f"rank {source} and rank {target}, which exchange messages, are on different hosts"
    return None


def _gather(value: Any) -> list[Any]:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    return everyones


def _first(failures: Sequence[str | None]) -> str | None:
    return next((failure for failure in failures if failure is not None), None)


def _tell(text: str) -> None:
    if dist.get_rank() == 0:
        logger.info(text)
