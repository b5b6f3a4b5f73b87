"""Rounds in which the communicators of directed links are made. Needs no torch.

A communicator of NCCL runs its operations in order on one stream. It may serve only one direction of one pair: a send
ends after the peer's receive has started, so two sends that face each other on one communicator would wait for ever.
A rank therefore has one communicator for each of its links. Links without a common rank are connected in the same
round, so the number of rounds depends on the links of a rank and not on the size of the world.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_DEFAULT_QUEUES = 8  # hardware queues of a CUDA process without CUDA_DEVICE_MAX_CONNECTIONS
_OTHER_STREAMS = 3  # computations, receives, reductions

Link = tuple[int, int]  # (source, destination), global ranks


def divide_into_rounds(links: Iterable[Link]) -> list[list[Link]]:
    """Divide links into rounds in which no rank occurs twice (a greedy edge coloring).

    The result depends on the order of the links, so pass the same order on all ranks. There are at most ``2 * n - 1``
    rounds, where n is the maximum number of links of a rank.
    """
    result: list[list[Link]] = []
    busy: list[set[int]] = []
    for link in dict.fromkeys(links):
        number = next((n for n, ranks in enumerate(busy) if ranks.isdisjoint(link)), len(busy))
        if number == len(busy):
            result.append([])
            busy.append(set())
        result[number].append(link)
        busy[number].update(link)
    return result


def links_per_rank(links: Iterable[Link]) -> int:
    """Return the maximum number of links of a rank, in both directions."""
    return max(Counter(rank for link in set(links) for rank in link).values(), default=0)


def queue_shortage(max_connections: str | None, links: int) -> str | None:
    """Return a warning if the streams of a rank do not have separate hardware queues, otherwise None.

    ``max_connections`` is the value of CUDA_DEVICE_MAX_CONNECTIONS; None: not set.
    """
    queues = int(max_connections or _DEFAULT_QUEUES)
    if queues >= links + _OTHER_STREAMS:
        return None
    return (
        f"CUDA_DEVICE_MAX_CONNECTIONS: {links + _OTHER_STREAMS} streams need separate hardware queues, or a job may "
        f"hang (got {queues}). Set it to 32 before CUDA starts."
    )
