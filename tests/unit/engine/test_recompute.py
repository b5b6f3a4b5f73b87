"""Recomputed layers whose output depends on a buffer that they update in training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_ext.engine.deepspeed_api.recompute import checkpoint_function, run_with_recompute

pytestmark = pytest.mark.quick


class Centered(nn.Linear):
    """Linear layer that subtracts running means: one changed in place, one replaced by a new tensor."""

    mean: Tensor
    largest: Tensor

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("largest", torch.zeros(4))

    def forward(self, input: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(input.detach().mean(0), alpha=0.1)
        self.largest = torch.maximum(self.largest + 0.1, input.detach().amax(0))
        return torch.tanh(super().forward(input - self.mean.clone() - self.largest))


def train(recompute: bool, reentrant: bool) -> list[Tensor]:
    """Run two forwards before the first backward, as pipelines do. Returns gradients and buffers."""
    torch.manual_seed(0)
    layer, outputs = Centered(), []
    function = checkpoint if reentrant else checkpoint_function(None)
    for x in torch.randn(2, 3, 4).unbind():
        x = x.requires_grad_()
        outputs.append(run_with_recompute(function, [layer], layer, x, False) if recompute else layer(x))
    for output in outputs:
        output.square().sum().backward()
    return [*(p.grad for p in layer.parameters() if p.grad is not None), layer.mean, layer.largest]


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint")
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_forwards_have_the_buffers_of_the_first_ones(reentrant: bool) -> None:
    for actual, expected in zip(train(True, reentrant), train(False, reentrant), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
