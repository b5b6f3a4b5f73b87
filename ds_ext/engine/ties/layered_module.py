"""Module with layers, as its ties see it: its stages and their ranks, and the parameters that layers share."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from ...parallel.layout import ParallelLayout
from ..grid import FoldedTopology
from ..types import Layer


class LayeredModule(Protocol):
    """Attributes of PipelineModule that its ties depend on."""

    @property
    def layout(self) -> ParallelLayout: ...

    role_name: str | None  # "forward" or "backward" with fbd, else None
    global_rank: int
    num_stages: int
    parts: list[int]
    shared: list[SharedParameter]
    tied_rows: list[dict[int, str]]  # of a tied head in parts: layer -> parameter, of every part
    tied_kinds: dict[str, list[int]]  # key of a tie of several kinds of layers -> its layers
    joined: list[dict[int, str]]  # layer -> parameter, of every weight that different kinds of layers tie
    tied_modules: Mapping[str, nn.Module]
    tied_weight_attrs: Mapping[str, list[str]]
    _layer_specs: Sequence[Layer]

    @property
    def stages(self) -> Sequence[int]: ...

    def stage_modules(self, stage: int) -> dict[int, nn.Module]: ...

    def stage_owner(self, layer_idx: int) -> int: ...

    def topology(self) -> FoldedTopology: ...


@dataclass(frozen=True)
class SharedParameter:
    """Parameter that several layers share as one object.

    Attributes:
        parameter: object in this process. Every process has one, even if its stages do not use it; rows of a tied
            embedding are None on a rank without them.
        places: global index of each layer with the parameter -> name of the parameter in that layer.
        whole: name in the first layer of the parameter of which these are rows; "": it is no part.
    """

    parameter: Tensor | None
    places: dict[int, str]
    whole: str = ""

    @property
    def layer(self) -> int:
        """Index of the first layer with the parameter, part of its name in checkpoints."""
        return min(self.places)

    @property
    def key(self) -> str:
        return self.places[self.layer]


def built_layers(module: LayeredModule) -> Iterator[tuple[int, nn.Module]]:
    for stage in module.stages:
        yield from module.stage_modules(stage).items()


def stage_of(module: LayeredModule, index: int) -> int:
    """Return the stage of a layer, also of a part of the head."""
    return bisect.bisect_right(module.parts, index) - 1


def rank_groups(module: LayeredModule, places: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that together hold all ``places``; empty if each rank holds all or none of them.

    The ranks of a group are in the order of the first layer in ``places`` that they hold.
    """
    if module.role_name is not None:
        # fbd: tie the backward ranks only. Forward ranks receive the weights.
        stages = sorted({stage_of(module, index) for index in places})
        return tuple(map(tuple, _tie_ranks(module.layout, stages))) if len(stages) > 1 else ()
    owners = list(dict.fromkeys(module.stage_owner(index) for index in sorted(places)))
    if len(owners) < 2:
        return ()
    topology = module.topology()
    other_axes = [axis for axis in topology.get_axis_names() if axis != "pipe"]
    ranges = [range(topology.get_dim(axis)) for axis in other_axes]
    coordinates = [dict(zip(other_axes, values, strict=True)) for values in itertools.product(*ranges)]
    return tuple(tuple(topology.get_rank(pipe=owner, **entry) for owner in owners) for entry in coordinates)


def _tie_ranks(layout: ParallelLayout, stages: Sequence[int]) -> Iterator[list[int]]:
    """Yield the backward ranks of ``stages`` of each pipe, data-parallel group and tensor-parallel rank."""
    for data in range(layout.data_parallel_size):
        for pipe in layout.placement.pipes:
            for tensor in range(layout.tensor_parallel_size):
                yield [layout.rank(pipe[stage], data, tensor) for stage in stages]
