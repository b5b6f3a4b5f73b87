"""Cache of transformers through which the attention of a slice reads earlier keys and values, and stores its own."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..tensor_parallel import earlier_slices
from .split import NotSplittable


class SliceCache(Cache):
    """Keys and values of the earlier slices of a sample, as leaves with gradients.

    ``earlier`` is the number of their tokens. ``updates`` counts the attentions that have read the cache.
    """

    def __init__(self, earlier: int, owner: object = None) -> None:  # without layers that store something
        self._earlier, self._owner = earlier, owner
        self.updates = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of all earlier slices and of this one, and keep the latter."""
        states = key_states, value_states
        # The view of a fused projection would keep it all.
        copy = any(state.untyped_storage().nbytes() > state.nbytes for state in states)
        earlier = earlier_slices((self._owner, self.updates), *states, copy=copy)
        self.updates += 1
        if not earlier:
            return states
        keys, values = (torch.cat(parts, -2) for parts in zip(*earlier, states, strict=True))
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._earlier

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys for this number of queries, and the position of the first key."""
        return self._earlier + query_length, 0

    @property
    def is_sliding(self) -> list[bool]:
        """One layer for all: it keeps every token, and masks select those in a window."""
        return [False]

    @property
    def is_linear(self) -> list[bool]:
        """No layer has a recurrent state."""
        return [False]

    @property
    def is_dummy(self) -> list[bool]:
        """No layer is without keys and values."""
        return [False]

    @property
    def is_compileable(self) -> bool:
        """The cache grows, so a compiled forward cannot use it."""
        return False

    @property
    def layers(self) -> Any:
        """Any other state that a model reads of a cache. Raises NotSplittable."""
        raise NotSplittable(
            "its layers keep more than keys and values of earlier tokens, such as a recurrent state"
        )


def cache_arguments(backbone: nn.Module, cache: SliceCache | None) -> dict[str, Any]:
    if cache is None:
        return {"use_cache": False}
    parameters = inspect.signature(backbone.forward).parameters
    for name in ("past_key_values", "cache"):  # until transformers 5.23, and from 5.24 on
        if name in parameters:
            return {"use_cache": True, name: cache}
    raise NotSplittable("its backbone takes no cache of keys and values")
