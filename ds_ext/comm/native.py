"""Set-up of native links: of one named kind, or of the best kind for every pair ("auto")."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..errors import TransportError
from . import _native, torch_split
from .endpoints import HANDSHAKE_S, Endpoints, LinkSetup, Pairs, both_ways
from .groups import require_initialized
from .link_selection import (
    LINK_KINDS,
    LinkSelection,
    NoLinkError,
    RankOffers,
    describe,
    kind_class,
    select_links,
)
from .native_transport import NativeTransport
from .shm_handshake import host_id
from .spin import spin_us
from .transport import DEFAULT_MAX_HELD, Transport

logger = logging.getLogger(__name__)

_ERRORS = (TransportError, OSError, _native.LinkError)


class _KindFailedError(Exception):
    """Failure of the set-up of one kind of link on a rank. All ranks raise it."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def create(
    kind: str,
    *,
    timeout_s: float,
    device: torch.device,
    pairs: Pairs | tuple[()],
    node_ips: Sequence[str] | None = None,
) -> Transport:
    """Create the transport over links of one kind, a key of LINK_KINDS; see create_transport()."""
    try:
        return _make_transport([kind], timeout_s, device, pairs, node_ips)
    except NoLinkError as error:
        raise TransportError(f'transport: "{kind}" cannot be used: {error}. Use "auto" or "torch".') from None


create_shm = partial(create, "shm")
create_rdma = partial(create, "rdma")
create_tcp = partial(create, "tcp")


def create_auto(
    *,
    timeout_s: float,
    device: torch.device,
    pairs: Pairs | tuple[()],
    node_ips: Sequence[str] | None = None,
    polled: bool = False,
) -> Transport:
    """Create links of the first kind that works for each pair, or the transport "torch" if a pair has none.

    Between GPUs this is "torch", unless arrivals are ``polled`` or ranks share a GPU.
    """
    to_torch = partial(torch_split.create, timeout_s=timeout_s, device=device, pairs=tuple(pairs))
    if device.type == "cuda" and not polled:
        sharing_ranks = _find_shared_gpu(device)
        if sharing_ranks is None:
            _log("transport: torch (nccl, for a static schedule between GPUs)")
            return to_torch()
        _log(f"transport: no nccl, because ranks {', '.join(map(str, sharing_ranks))} share a GPU")
    try:
        return _make_transport(list(LINK_KINDS), timeout_s, device, pairs, node_ips)
    except NoLinkError as error:
        _log(f"transport: torch (no native links: {error})")
    return to_torch()


def _make_transport(
    kinds: list[str],
    timeout_s: float,
    device: torch.device,
    pairs: Pairs | tuple[()],
    node_ips: Sequence[str] | None,
) -> Transport:
    """Link all pairs. Kinds whose set-up fails are skipped."""
    require_initialized()
    if device.type not in ("cpu", "cuda"):
        raise NoLinkError(f"native links support tensors on cpu and cuda (got {device.type})")
    ranks = range(dist.get_world_size())
    if not isinstance(pairs, Mapping):
        pairs = {(a, b): DEFAULT_MAX_HELD for a in ranks for b in ranks if a != b}
    if device.type == "cuda":
        pairs = both_ways(pairs)
    failed: dict[str, str] = {}
    while True:
        attempt = _Attempt(kinds, failed, pairs, node_ips)
        try:
            transport = attempt.run(timeout_s)
            break
        except _KindFailedError as error:
            failed[error.kind] = str(error)
            if len(failed) == len(kinds):
                reasons = [f"{kind}: {reason}" for kind, reason in failed.items()]
                raise NoLinkError(str(error) if len(kinds) == 1 else "; ".join(reasons)) from None
        finally:
            attempt.close()
    return transport if device.type == "cpu" else _for_gpu(transport, device, pairs, attempt.kinds)


def _for_gpu(
    transport: NativeTransport, device: torch.device, pairs: Pairs, kinds: Mapping[tuple[int, int], str]
) -> Transport:
    from .cuda.device import Device
    from .cuda.transport import GpuTransport

    return GpuTransport.over(transport, Device(device), pairs, kinds)


def _find_shared_gpu(device: torch.device) -> list[int] | None:
    gpus = _gather((host_id(), str(torch.cuda.get_device_properties(device).uuid)))
    shared = next((gpu for gpu in gpus if gpus.count(gpu) > 1), None)
    return None if shared is None else [rank for rank, gpu in enumerate(gpus) if gpu == shared]


class _Attempt:
    def __init__(
        self, kinds: Sequence[str], failed: Mapping[str, str], pairs: Pairs, node_ips: Sequence[str] | None
    ) -> None:
        self._rank, self._kinds, self._failed, self._pairs = dist.get_rank(), kinds, failed, pairs
        self._node_ips = node_ips
        self._classes = {kind: kind_class(kind) for kind in kinds}
        self._setups: dict[str, LinkSetup] = {}
        self._port: _native.Port | None = None
        self.kinds: Mapping[tuple[int, int], str] = {}  # kind of each link

    def run(self, timeout_s: float) -> NativeTransport:
        """Return the transport. On failure, all ranks raise NoLinkError, or _KindFailedError if one kind failed."""
        ranks: list[RankOffers] = _gather(self._offers())
        if self._node_ips is not None:
            _refuse_wrong_addresses(ranks)
        checks = {kind: cls.incompatibility for kind, cls in self._classes.items()}
        selection = select_links(ranks, self._pairs, checks, self._failed)
        self.kinds = selection.kinds
        _raise_first(_gather(self._prepare(selection)))
        endpoints = Endpoints()
        try:
            _raise_first(_gather(self._connect(selection, ranks, timeout_s, endpoints)))
        except _KindFailedError:
            endpoints.close()
            raise
        assert self._port is not None
        for link in endpoints.incoming.values():
            self._port.add(link)
        self._port.spin(spin_us(sum(offers.host == ranks[self._rank].host for offers in ranks)))
        used_kinds = [kind for kind in self._kinds if kind in selection.kinds.values()] or [self._kinds[0]]
        name = "+".join(used_kinds)
        _log(f"transport: {name}; {describe(selection, ranks)}")
        max_held = {source: most for (source, target), most in self._pairs.items() if target == self._rank}
        world = dist.get_world_size()
        return NativeTransport(self._port, endpoints, max_held, name, self._rank, world, timeout_s)

    def close(self) -> None:
        """Close everything that the transport does not own."""
        for setup in self._setups.values():
            setup.close()

    def _offers(self) -> RankOffers:
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
                offers[kind] = setup.offer()
            except _ERRORS as error:
                refusals[kind] = _text(error)
        return RankOffers(host_id(), socket.gethostname(), offers, refusals)

    def _prepare(self, selection: LinkSelection) -> tuple[str, str] | None:
        """Prepare all selected kinds. Return the kind that failed on this rank and the reason, or None."""
        for kind in sorted(set(selection.kinds.values())):
            try:
                self._setups[kind].prepare(selection.pairs(kind, self._pairs))
            except _ERRORS as error:
                return kind, f"rank {self._rank} cannot use it: {_text(error)}"
        return None

    def _connect(
        self, selection: LinkSelection, ranks: Sequence[RankOffers], timeout_s: float, endpoints: Endpoints
    ) -> tuple[str, str] | None:
        """Connect all selected kinds, add their endpoints, and close the port's descriptor; see _prepare()."""
        assert self._port is not None
        for kind in sorted(set(selection.kinds.values())):
            offers = {rank: entry.offers[kind] for rank, entry in enumerate(ranks) if kind in entry.offers}
            try:
                pairs = selection.pairs(kind, self._pairs)
                endpoints.add(self._setups[kind].connect(offers, pairs, min(timeout_s, HANDSHAKE_S)))
            except _ERRORS as error:
                return kind, _text(error)
        # Peers have received the doorbell's file, so this descriptor is no longer needed.
        self._port.close_fileno()
        return None


def _refuse_wrong_addresses(ranks: Sequence[RankOffers]) -> None:
    """Raise TransportError for an address in node_ips that a rank cannot use, even if no tcp link is needed."""
    for offers in ranks:
        if "tcp" in offers.refusals:
            raise TransportError(offers.refusals["tcp"])


def _text(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _raise_first(failures: Sequence[tuple[str, str] | None]) -> None:
    for failure in failures:
        if failure is not None:
            raise _KindFailedError(*failure)


def _log(text: str) -> None:
    if dist.get_rank() == 0:
        logger.info(text)
