"""Trial of layers in slices of a sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_ext.engine.stages.slice_trial import _try_layer
from ds_ext.errors import ConfigError
from ds_ext.tensor_parallel import earlier_slices, slice_start

TOKENS = 6


class Positions(nn.Module):
    """Adds the position of each token, in the sample or in the slice."""

    def __init__(self, in_sample: bool) -> None:
        super().__init__()
        self.in_sample = in_sample

    def forward(self, x_BSD: Tensor) -> Tensor:
        first = slice_start() if self.in_sample else 0
        return x_BSD + torch.arange(first, first + x_BSD.size(1))[:, None]


class MaskedSum(nn.Module):
    """Sums the tokens up to each one that a mask of queries and keys selects."""

    def forward(self, inputs: Any) -> tuple[Tensor, Tensor]:
        x_BSD, mask_1QK = inputs
        parts = [part for (part,) in earlier_slices(self, x_BSD)]
        return mask_1QK.to(x_BSD.dtype) @ torch.cat((*parts, x_BSD), 1), mask_1QK


class Cutting(MaskedSum):
    def cut_sequence(self, inputs: Any, start: int, stop: int) -> tuple[Tensor, Tensor]:
        x_BSD, mask_1QK = inputs
        return x_BSD[:, start:stop], mask_1QK[:, start:stop, :stop]


def test_a_layer_that_ignores_the_start_of_the_slice_is_refused() -> None:
    x_BSD = torch.randn(2, TOKENS, 3)
    _try_layer(nn.Module(), Positions(True), "layer 0", x_BSD, TOKENS)
    with pytest.raises(ConfigError):
        _try_layer(nn.Module(), Positions(False), "layer 0", x_BSD, TOKENS)


def test_a_layer_cuts_its_own_masks() -> None:
    x_BSD, mask_1QK = torch.randn(2, TOKENS, 3), torch.ones(1, TOKENS, TOKENS, dtype=torch.bool).tril()
    _try_layer(nn.Module(), Cutting(), "layer 0", (x_BSD, mask_1QK), TOKENS)
    with pytest.raises(ConfigError):
        _try_layer(nn.Module(), Cutting(), "layer 0", (x_BSD, torch.ones_like(mask_1QK)), TOKENS)


def test_a_layer_that_mixes_tokens_without_keeping_them_is_refused() -> None:
    with pytest.raises(ConfigError):
        _try_layer(nn.Module(), lambda x_BSD: x_BSD.cumsum(1), "layer 0", torch.randn(2, TOKENS, 3), TOKENS)
