"""Rank order: how global ranks are numbered over the tensor, data and pipeline axes. Pure arithmetic.

An order is written with the innermost axis first, as in Megatron ("tp-dp-pp"). ``mirror`` is the axis of a device's
replicas. Without it, ``pp`` counts the devices 0..D-1. With it, ``pp`` counts groups of replicas, so that an order such
as "tp-mirror-pp-dp" puts the two devices of every BitPipe pair side by side (arXiv 2410.19367, section 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError

TENSOR, DATA, PIPELINE, MIRROR = "tp", "dp", "pp", "mirror"
_EXAMPLES = "tp-dp-pp (default), tp-pp-dp, tp-mirror-dp-pp, tp-mirror-pp-dp"


@dataclass(frozen=True)
class RankOrder:
    """Order of the axes, innermost first."""

    axes: tuple[str, ...] = (TENSOR, DATA, PIPELINE)

    def __post_init__(self) -> None:
        axes = sorted(axis for axis in self.axes if axis != MIRROR)
        if axes != sorted((TENSOR, DATA, PIPELINE)) or self.axes.count(MIRROR) > 1 or self.axes[0] != TENSOR:
            raise ConfigError(
                f"ds_ext.rank_order: must be tp, then dp, pp and optionally mirror, each once (got {str(self)!r}). "
                f"Examples: {_EXAMPLES}."
            )

    @property
    def pairs_mirrors(self) -> bool:
        return MIRROR in self.axes

    def rank(self, index: Mapping[str, int], sizes: Mapping[str, int]) -> int:
        rank, stride = 0, 1
        for axis in self.axes:
            rank += index[axis] * stride
            stride *= sizes[axis]
        return rank

    def index(self, rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
        index = {}
        for axis in self.axes:
            rank, index[axis] = divmod(rank, sizes[axis])
        return index

    def __str__(self) -> str:
        return "-".join(self.axes)


DEEPSPEED_ORDER = RankOrder()


def parse_rank_order(text: str) -> RankOrder:
    return RankOrder(tuple(text.split("-")))
