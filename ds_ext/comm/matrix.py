"""Which kind of link joins which two ranks, and why; pure functions of the cards that all ranks have."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ds_ext.comm.ends import Pairs

WhyNot = Callable[[Any, Any, bool], str | None]  # LinkSetup.why_not

# In the order of preference. A class is a LinkSetup, made of (rank, port, node_ips).
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "shm": "ds_ext.comm.shm_setup:ShmSetup",
        "rdma": "ds_ext.comm.rdma.setup:RdmaSetup",
        "tcp": "ds_ext.comm.tcp.setup:TcpSetup",
    }
)


def kind_class(kind: str) -> Any:
    """The class of a key of KINDS, imported when it is asked for."""
    module, name = KINDS[kind].split(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Card:
    """What a rank tells all others about itself.

    Args:
        host: the same for two processes of one host that can reach each other's unix sockets.
        host_name: for people.
        offers: by kind of link, what the others must know.
        refusals: by kind of link, why this rank cannot have it.
    """

    host: str
    host_name: str
    offers: Mapping[str, Any] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Matrix:
    """The kind of every link, and for pairs that an earlier kind would have served, what spoke against it."""

    kinds: Mapping[tuple[int, int], str]
    fallbacks: Mapping[tuple[int, int], tuple[str, ...]]

    def pairs(self, kind: str, pairs: Pairs) -> Pairs:
        """Those of the pairs that the kind serves."""
        return {pair: slots for pair, slots in pairs.items() if self.kinds[pair] == kind}


def choose(
    cards: Sequence[Card],
    pairs: Iterable[tuple[int, int]],
    kinds: Mapping[str, WhyNot],
    failed: Mapping[str, str] = MappingProxyType({}),
) -> Matrix | str:
    """The first of the kinds that nothing speaks against, for every pair; or why a pair has none.

    Args:
        kinds: in the order of preference, with what speaks against two ranks.
        failed: kinds that were tried before, with why they failed.
    """
    chosen: dict[tuple[int, int], str] = {}
    fallbacks: dict[tuple[int, int], tuple[str, ...]] = {}
    for pair in pairs:
        # Both directions of a pair get the same kind: the lower rank is always the first.
        low, high = sorted(pair)
        against: list[str] = []
        for kind, why_not in kinds.items():
            reason = failed.get(kind) or _against(kind, why_not, cards, low, high)
            if reason is None:
                chosen[pair] = kind
                break
            against.append(reason if len(kinds) == 1 else f"{kind}: {reason}")
        else:
            return "; ".join(against)
        if against:
            fallbacks[pair] = tuple(against)
    return Matrix(chosen, fallbacks)


def _against(kind: str, why_not: WhyNot, cards: Sequence[Card], low: int, high: int) -> str | None:
    for rank in (low, high):
        if kind in cards[rank].refusals:
            return f"rank {rank} cannot: {cards[rank].refusals[kind]}"
    mine, theirs = cards[low], cards[high]
    reason = why_not(mine.offers[kind], theirs.offers[kind], mine.host == theirs.host)
    return None if reason is None else f"rank {low} and rank {high}, which exchange messages, {reason}"


def describe(matrix: Matrix, cards: Sequence[Card]) -> str:
    """The links, who is on which host, and the reason of every fallback; a line each."""
    counts = Counter(matrix.kinds.values())
    links = ", ".join(f"{count} by {kind}" for kind, count in sorted(counts.items()))
    hosts: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        hosts.setdefault(card.host, []).append(rank)
    where = ", ".join(f"{cards[ranks[0]].host_name} has {_ranks(ranks)}" for ranks in hosts.values())
    lines = [f"links: {links or 'none'}; {where}"]
    reasons: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for pair, against in matrix.fallbacks.items():
        for reason in against:
            low, high = sorted(pair)
            words = reason.replace(f"rank {low} and rank {high}, which exchange messages,", "the ranks")
            reasons.setdefault((matrix.kinds[pair], words), []).append((low, high))
    for (kind, words), pairs in reasons.items():
        shown = dict.fromkeys(f"{low}-{high}" for low, high in pairs)
        first = ", ".join(list(shown)[:8]) + (", ..." if len(shown) > 8 else "")
        lines.append(f"{kind} between {first} ({words})")
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks as people write them: 0-3, 8."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = ", ".join(f"{low}-{high}" if low < high else f"{low}" for low, high in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"
