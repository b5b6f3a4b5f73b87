"""Link selection: the kind of link for every pair of ranks, as a pure function of all ranks' offers."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .endpoints import Pairs

Incompatibility = Callable[[Any, Any, bool], str | None]  # LinkSetup.incompatibility

# Kind -> "module:class", in order of preference. The class is a LinkSetup with arguments (rank, port, node_ips).
LINK_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "shm": "ds_ext.comm.shm_setup:ShmSetup",
        "rdma": "ds_ext.comm.rdma.setup:RdmaSetup",
        "tcp": "ds_ext.comm.tcp.setup:TcpSetup",
    }
)


def kind_class(kind: str) -> Any:
    module, name = LINK_KINDS[kind].split(":")
    return getattr(importlib.import_module(module), name)


class NoLinkError(Exception):
    """No kind of link works for two ranks that exchange messages. The text gives the reason for each kind."""


@dataclass(frozen=True)
class RankOffers:
    """Kinds of links that a rank offers to all others.

    Args:
        host: identity of the host, from host_id().
        offers: kind of link -> data that the peers need to connect.
        refusals: kind of link -> why this rank cannot use it.
    """

    host: str
    host_name: str
    offers: Mapping[str, Any] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LinkSelection:
    """Kind of every link, and the reasons against the preferred kinds for pairs that fall back."""

    kinds: Mapping[tuple[int, int], str]
    fallbacks: Mapping[tuple[int, int], tuple[str, ...]]

    def pairs(self, kind: str, pairs: Pairs) -> Pairs:
        return {pair: credits for pair, credits in pairs.items() if self.kinds[pair] == kind}


def select_links(
    ranks: Sequence[RankOffers],
    pairs: Iterable[tuple[int, int]],
    kinds: Mapping[str, Incompatibility],
    failed: Mapping[str, str] = MappingProxyType({}),
) -> LinkSelection:
    """Select for every pair the first kind that both ranks can use.

    Args:
        kinds: kind -> check of two offers, in order of preference.
        failed: kind that failed in an earlier handshake -> reason.
    """
    selected: dict[tuple[int, int], str] = {}
    fallbacks: dict[tuple[int, int], tuple[str, ...]] = {}
    for pair in pairs:
        # Both directions must get the same kind, so the lower rank always comes first.
        low, high = sorted(pair)
        against: list[str] = []
        for kind, incompatibility in kinds.items():
            reason = failed.get(kind) or _reason_against(kind, incompatibility, ranks, low, high)
            if reason is None:
                selected[pair] = kind
                break
            against.append(reason if len(kinds) == 1 else f"{kind}: {reason}")
        else:
            raise NoLinkError("; ".join(against))
        if against:
            fallbacks[pair] = tuple(against)
    return LinkSelection(selected, fallbacks)


def _reason_against(
    kind: str, incompatibility: Incompatibility, ranks: Sequence[RankOffers], low: int, high: int
) -> str | None:
    for rank in (low, high):
        if kind in ranks[rank].refusals:
            return f"rank {rank} cannot use it: {ranks[rank].refusals[kind]}"
    mine, theirs = ranks[low], ranks[high]
    reason = incompatibility(mine.offers[kind], theirs.offers[kind], mine.host == theirs.host)
    return None if reason is None else f"rank {low} and rank {high} {reason}"


def describe(selection: LinkSelection, ranks: Sequence[RankOffers]) -> str:
    """Return log lines: the number of links of each kind, the host of every rank, and the reason for every fallback."""
    counts = Counter(selection.kinds.values())
    links = ", ".join(f"{count} by {kind}" for kind, count in sorted(counts.items()))
    hosts: dict[str, list[int]] = {}
    for rank, offers in enumerate(ranks):
        hosts.setdefault(offers.host, []).append(rank)
    where = ", ".join(f"{_spans(here)} on {ranks[here[0]].host_name}" for here in hosts.values())
    lines = [f"links: {links or 'none'}; {where}"]
    reasons: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for pair, against in selection.fallbacks.items():
        for reason in against:
            low, high = sorted(pair)
            words = reason.replace(f"rank {low} and rank {high}", "the ranks")
            reasons.setdefault((selection.kinds[pair], words), []).append((low, high))
    for (kind, words), pairs in reasons.items():
        shown = dict.fromkeys(f"{low}-{high}" for low, high in pairs)
        first = ", ".join(list(shown)[:8]) + (", ..." if len(shown) > 8 else "")
        lines.append(f"{kind} between {first} ({words})")
    return "\n".join(lines)


def _spans(ranks: Sequence[int]) -> str:
    """Return ranks as ``ranks 0-3, 8``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = ", ".join(f"{low}-{high}" if low < high else f"{low}" for low, high in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"
