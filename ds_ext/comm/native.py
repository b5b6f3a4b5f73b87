"""Which native links a job uses: of a kind that is asked for by name, or the best for every pair ("auto")."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_ext.comm import _native, torch_split
from ds_ext.comm.ends import MEETING_S, Ends, LinkSetup, Pairs, both_ways
from ds_ext.comm.links import Links
from ds_ext.comm.matrix import KINDS, Card, Matrix, choose, describe, kind_class
from ds_ext.comm.native_transport import NativeTransport
from ds_ext.comm.rendezvous import host_id
from ds_ext.comm.spin import spin_us
from ds_ext.comm.transport import DEFAULT_SLOTS, Transport
from ds_ext.errors import TransportError

logger = logging.getLogger(__name__)

_ERRORS = (TransportError, OSError, _native.LinkError)


def create(
    kind: str,
    *,
    timeout_s: float,
    device: torch.device,
    pairs: Pairs | tuple[()],
    node_ips: Sequence[str] | None = None,
) -> Transport:
    """The transport of links of one kind; a collective call of all ranks of the world, with the same arguments.

    Args:
        kind: a key of KINDS.
        timeout_s: the longest wait for a peer.
        device: of the tensors: "cpu" or "cuda".
        pairs: (source, destination) of the links, with how many messages the receiver holds at a time; (): every rank
            with every other.
        node_ips: the addresses that ranks listen at, one for each rank or one for each host.

    Raises:
        TransportError: on all ranks, with the reason of the first that cannot.
    """
    made = _try([kind], timeout_s, device, pairs, node_ips)
    if isinstance(made, str):
        raise TransportError(f'"transport": "{kind}" cannot be used: {made}. Use "auto" or "torch".')
    return made


def create_shm(**arguments: Any) -> Transport:
    """The transport "shm": ranks of one host; as create()."""
    return create("shm", **arguments)


def create_rdma(**arguments: Any) -> Transport:
    """The transport "rdma": ranks with RDMA devices; as create()."""
    return create("rdma", **arguments)


def create_tcp(**arguments: Any) -> Transport:
    """The transport "tcp": between hosts, and within one; as create()."""
    return create("tcp", **arguments)


def create_auto(
    *,
    timeout_s: float,
    device: torch.device,
    pairs: Pairs | tuple[()],
    node_ips: Sequence[str] | None = None,
    polled: bool = False,
) -> Transport:
    """For every pair the first of KINDS that it can have, or "torch" for all where a pair has none; as create().

    Between GPUs it is "torch" as long as that serves: not where arrivals are ``polled``, nor for ranks of one GPU.
    """
    if device.type == "cuda" and not polled:
        one_gpu = _ranks_of_one_gpu(device)
        if one_gpu is None:
            _tell("transport: torch, because between GPUs nccl serves a static schedule")
            return torch_split.create(timeout_s=timeout_s, device=device, pairs=tuple(pairs))
        _tell(f"ranks {', '.join(map(str, one_gpu))} share a GPU, which nccl refuses")
    made = _try(list(KINDS), timeout_s, device, pairs, node_ips)
    if not isinstance(made, str):
        return made
    _tell(f"transport: torch, because {made}")
    return torch_split.create(timeout_s=timeout_s, device=device, pairs=tuple(pairs))


def _try(
    kinds: list[str],
    timeout_s: float,
    device: torch.device,
    pairs: Pairs | tuple[()],
    node_ips: Sequence[str] | None,
) -> Transport | str:
    """The transport, or why there is none; every rank gets the same answer."""
    if not dist.is_initialized():
        raise TransportError(
            "torch.distributed is not initialized: call deepspeed.init_distributed() first, "
            "in processes that `deepspeed` or `torchrun` has started"
        )
    if device.type not in ("cpu", "cuda"):
        return f"the tensors are on {device.type}, and native links are for those of the CPU and of CUDA"
    everyone = range(dist.get_world_size())
    if not isinstance(pairs, Mapping):
        pairs = {(a, b): DEFAULT_SLOTS for a in everyone for b in everyone if a != b}
    if device.type == "cuda":
        pairs = both_ways(pairs)
    failed: dict[str, str] = {}
    while True:
        attempt = _Attempt(kinds, failed, pairs, node_ips)
        try:
            made = attempt.run(timeout_s)
        finally:
            attempt.close()
        # A kind that failed although nothing spoke against it is not tried again.
        if not isinstance(made, tuple):
            if isinstance(made, str) or device.type == "cpu":
                return made
            return _for_gpu(made, device, pairs, attempt.kinds)
        kind, reason = made
        failed[kind] = reason
        if len(failed) == len(kinds):
            return reason if len(kinds) == 1 else "; ".join(f"{k}: {r}" for k, r in failed.items())


def _for_gpu(
    made: NativeTransport, device: torch.device, pairs: Pairs, kinds: Mapping[tuple[int, int], str]
) -> Transport:
    from ds_ext.comm.cuda.device import TorchCuda
    from ds_ext.comm.cuda.transport import GpuTransport

    return GpuTransport.over(made, TorchCuda(device), pairs, kinds)


def _ranks_of_one_gpu(device: torch.device) -> list[int] | None:
    """Ranks that share a GPU, if any do."""
    gpus = _gather((host_id(), str(torch.cuda.get_device_properties(device).uuid)))
    shared = next((gpu for gpu in gpus if gpus.count(gpu) > 1), None)
    return None if shared is None else [rank for rank, gpu in enumerate(gpus) if gpu == shared]


class _Attempt:
    """One try to link all pairs."""

    def __init__(
        self, kinds: Sequence[str], failed: Mapping[str, str], pairs: Pairs, node_ips: Sequence[str] | None
    ) -> None:
        self._rank, self._kinds, self._failed, self._pairs = dist.get_rank(), kinds, failed, pairs
        self._node_ips = node_ips
        self._classes = {kind: kind_class(kind) for kind in kinds}
        self._setups: dict[str, LinkSetup] = {}
        self._port: _native.Port | None = None
        self.kinds: Mapping[tuple[int, int], str] = {}  # of the links

    def run(self, timeout_s: float) -> NativeTransport | tuple[str, str] | str:
        """The transport; or a kind that failed, and why; or why no kind serves."""
        cards = _gather(self._card())
        why_not = {kind: cls.why_not for kind, cls in self._classes.items()}
        matrix = choose(cards, self._pairs, why_not, self._failed)
        if self._node_ips is not None:
            _refuse_wrong_addresses(cards)
        if isinstance(matrix, str):
            return matrix
        self.kinds = matrix.kinds
        reason = _first(_gather(self._prepare(matrix)))
        if reason is not None:
            return reason
        ends = Ends()
        reason = _first(_gather(self._connect(matrix, cards, timeout_s, ends)))
        if reason is not None:
            ends.close()
            return reason
        assert self._port is not None
        for link in ends.incoming.values():
            self._port.add(link)
        self._port.spin(spin_us(sum(card.host == cards[self._rank].host for card in cards)))
        used = [kind for kind in self._kinds if kind in matrix.kinds.values()] or [self._kinds[0]]
        name = "+".join(used)
        _tell(f"transport: {name}; {describe(matrix, cards)}")
        slots = {source: most for (source, target), most in self._pairs.items() if target == self._rank}
        return NativeTransport(
            Links(self._port, ends, slots), name, self._rank, dist.get_world_size(), timeout_s
        )

    def close(self) -> None:
        """Close what the transport has not taken over."""
        for setup in self._setups.values():
            setup.close()

    def _card(self) -> Card:
        offers: dict[str, Any] = {}
        refusals: dict[str, str] = {}
        try:
            self._port = _native.Port()
        except OSError as error:
            refusals |= dict.fromkeys(self._kinds, error.strerror or str(error))
        for kind, cls in self._classes.items():
            if kind in self._failed or self._port is None:
                continue
            setup = self._setups[kind] = cls(self._rank, self._port, self._node_ips)
            try:
                offers[kind] = setup.card()
            except _ERRORS as error:
                refusals[kind] = _words(error)
        return Card(host_id(), socket.gethostname(), offers, refusals)

    def _prepare(self, matrix: Matrix) -> tuple[str, str] | None:
        for kind in dict.fromkeys(matrix.kinds.values()):
            try:
                self._setups[kind].prepare(matrix.pairs(kind, self._pairs))
            except _ERRORS as error:
                return kind, f"rank {self._rank} cannot: {_words(error)}"
        return None

    def _connect(
        self, matrix: Matrix, cards: Sequence[Card], timeout_s: float, ends: Ends
    ) -> tuple[str, str] | None:
        assert self._port is not None
        for kind in sorted(set(matrix.kinds.values())):
            offers = {rank: card.offers[kind] for rank, card in enumerate(cards) if kind in card.offers}
            try:
                pairs = matrix.pairs(kind, self._pairs)
                ends.add(self._setups[kind].connect(offers, pairs, min(timeout_s, MEETING_S)))
            except _ERRORS as error:
                return kind, _words(error)
        self._port.close_fileno()
        return None


def _refuse_wrong_addresses(cards: Sequence[Card]) -> None:
    """Addresses that are given must be right, whether another kind of link would do or not."""
    for card in cards:
        if "tcp" in card.refusals:
            raise TransportError(card.refusals["tcp"])


def _words(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _gather(value: Any) -> list[Any]:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    return everyones


def _first(failures: Sequence[tuple[str, str] | None]) -> tuple[str, str] | None:
    return next((failure for failure in failures if failure is not None), None)


def _tell(text: str) -> None:
    if dist.get_rank() == 0:
        logger.info(text)
