"""Experts compute what transformers' own loop computes, and defer their weight gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_ext.experts import expert_linear, replace_experts
from ds_ext.tensor_parallel import WeightGradients, deferrable, deferring
from tests.decoder_models import MORE_MODELS, random_decoder

COUNTS = [3, 0, 4, 1]  # an idle expert


def inputs(transposed: bool, bias: bool) -> list[Any]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    weight = draw(4, 5, 3) if transposed else draw(4, 3, 5)
    return [draw(8, 5), weight, draw(4, 3) if bias else None]


def loop(tensors: list[Any], transposed: bool) -> Tensor:
    (x, weight, bias), rows, start = tensors, [], 0
    for expert, count in enumerate(COUNTS):
        matrix = weight[expert].t() if transposed else weight[expert]
        rows.append(F.linear(x[start : start + count], matrix, None if bias is None else bias[expert]))
        start += count
    return torch.cat(rows)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_linear_layers_of_experts(deferred: bool, transposed: bool, bias: bool) -> None:
    (x, weight, biases), others = inputs(transposed, bias), inputs(transposed, bias)
    expected = loop(others, transposed)
    grad = torch.randn(expected.shape, dtype=torch.float64)
    expected.backward(grad)
    if not deferred:
        found = expert_linear(x, weight, biases, COUNTS, transposed)
        found.backward(grad)
    else:
        with deferrable():
            found = expert_linear(x, weight, biases, COUNTS, transposed)
        later = WeightGradients()
        with deferring(later):
            found.backward(grad)
        assert weight.grad is None
        later.compute()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for tensor, other in zip((x, weight, biases), others, strict=True):
        if tensor is not None:
            torch.testing.assert_close(tensor.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_autocast_and_frozen_weights() -> None:
    x, weight, bias = (tensor.detach().float() for tensor in inputs(True, True))
    with torch.autocast("cpu", torch.bfloat16):
        found = expert_linear(x, weight, bias, COUNTS, transposed=True)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), loop([x, weight, bias], True), rtol=0.05, atol=0.05)
    x.requires_grad_()
    bias.requires_grad_()
    expert_linear(x, weight, bias, COUNTS, transposed=True).sum().backward()
    assert weight.grad is None and x.grad is not None
    assert bias.grad is not None and bias.grad[:, 0].tolist() == COUNTS


def experts_of(name: str) -> nn.Module:
    model = random_decoder(name, **MORE_MODELS.get(name, {}), experts_implementation="eager")
    (experts, *_) = (module for module in model.modules() if hasattr(module, "_apply_gate"))
    return experts.double()


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe", "GptOss"])
def test_experts_of_transformers(name: str) -> None:
    """The second model has gates beside the experts, the third one biases and transposed weights."""
    whole: Any = experts_of(name)
    ours = copy.deepcopy(whole)
    replace_experts(ours)
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(7, 32, generator=generator, dtype=torch.float64)
    choices_NK = torch.randint(3, (7, 2), generator=generator)  # the last expert is idle
    choices_NK[:, 1] = (choices_NK[:, 0] + 1) % 3
    weights_NK = torch.rand(7, 2, generator=generator, dtype=torch.float64)
    results = []
    for experts in (whole, ours):
        x_ND, w_NK = hidden_ND.clone().requires_grad_(), weights_NK.clone().requires_grad_()
        y_ND = experts(x_ND, choices_NK, w_NK)
        y_ND.square().sum().backward()
        results.append([y_ND, x_ND.grad, w_NK.grad, *(p.grad for p in experts.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
