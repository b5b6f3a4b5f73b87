"""Transformer Engine's layer computes the outputs and gradients of the local layer."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from ds_ext.model.config import TransformerConfig
from ds_ext.recipes.models.layers import TransformerLayer
from ds_ext.recipes.models.te import _NAMES, TransformerEngineLayer
from ds_ext.tensor_parallel import DropoutClock, TensorParallel
from tests.gpu.ranks import needs_gpu

pytestmark = [
    needs_gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
    ),
]


def test_outputs_and_gradients_of_the_local_layer() -> None:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=256,
        num_attention_heads=4,
        seq_length=128,
        vocab_size=64,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    clock, tp = DropoutClock(), TensorParallel()
    te_layer = TransformerEngineLayer(config, 0, tp, clock).cuda()
    layer = TransformerLayer(config, 0, tp, clock).cuda()
    x = torch.randn(2, 128, 256, generator=torch.Generator().manual_seed(0)).cuda()
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).cuda()
    inputs, outputs = [x.clone().requires_grad_() for _ in range(2)], []
    for module, leaf in zip((te_layer, layer), inputs, strict=True):
        outputs.append(module(leaf))
        outputs[-1].backward(gradient)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-3, atol=1e-3)
    local = dict(layer.named_parameters())
    for name, parameter in te_layer.layer.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, local[_NAMES[name]].grad, rtol=1e-2, atol=1e-2)
