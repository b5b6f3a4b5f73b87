"""Zoo of layers, and the models made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_ext.tensor_parallel import TensorParallel

from .crossings import CROSSINGS
from .ends import ENDS, STARTS
from .kinds import Kind, Place
from .sliced_layers import SLICED
from .standard_layers import STANDARD
from .unusual_layers import UNUSUAL

ZOO: dict[str, Kind] = {**STANDARD, **UNUSUAL, **CROSSINGS, **SLICED}


def model_layers(start: str, blocks: Sequence[str], end: str, tp: TensorParallel) -> list[Any]:
    """Return the layers of a model: modules, functions and specs."""
    layers = STARTS[start].layers()
    for number, name in enumerate(blocks):
        layers += ZOO[name].layers(Place(number, tp))
    return layers + ENDS[end].layers()
