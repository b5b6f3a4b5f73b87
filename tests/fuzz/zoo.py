"""Zoo of layers, and the models made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_ext.tensor_parallel import TensorParallel

from .crossings import CROSSINGS
from .decoder_layers import DECODERS
from .ends import ENDS as BASE_ENDS
from .ends import STARTS, End
from .habit_layers import HABITUAL
from .kinds import Kind, Place
from .loss_forms import LOSS_FORMS
from .sliced_layers import SLICED
from .standard_layers import STANDARD
from .unusual_layers import UNUSUAL

ENDS: dict[str, End] = {**BASE_ENDS, **LOSS_FORMS}
ZOO: dict[str, Kind] = {**STANDARD, **UNUSUAL, **CROSSINGS, **SLICED, **HABITUAL, **DECODERS}


def model_layers(
    start: str, blocks: Sequence[str], end: str, tp: TensorParallel, plain: bool = False
) -> list[Any]:
    """Return the layers of a model: modules, functions and specs; ``plain``: those of one process."""
    layers = STARTS[start].layers()
    for number, name in enumerate(blocks):
        kind = ZOO[name]
        layers += ((plain and kind.plain) or kind.layers)(Place(number, tp))
    return layers + ENDS[end].layers()
