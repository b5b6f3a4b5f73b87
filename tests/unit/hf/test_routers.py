"""Losses of routers that are sums over layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ds_ext
from ds_ext.config.job import DsExtConfig
from ds_ext.engine.module_plan import require_auxiliary_loss
from ds_ext.errors import ConfigError
from ds_ext.hf.routers import LayerRouters
from tests.decoder_models import MODELS, ROUTERS_LOSS

transformers: Any = pytest.importorskip("transformers")
EXPERTS, CHOSEN, TOKENS, COEFFICIENT, Z = 8, 2, 40, 0.01, 0.002


def by_definition(logits_NE: torch.Tensor) -> torch.Tensor:
    """Return the losses of a layer, with one loop over tokens: arXiv 2101.03961, equation 4; 2202.08906, section 3."""
    shares_E, means_E, z = [0.0] * EXPERTS, torch.zeros(EXPERTS), torch.zeros(())
    for logits_E in logits_NE:
        for expert in logits_E.topk(CHOSEN).indices.tolist():
            shares_E[expert] += 1 / (CHOSEN * len(logits_NE))
        means_E = means_E + logits_E.softmax(0) / len(logits_NE)
        z = z + logits_E.exp().sum().log() ** 2 / len(logits_NE)
    return COEFFICIENT * EXPERTS * (torch.tensor(shares_E) @ means_E) + Z * z


@pytest.mark.parametrize("masked", [0, 7])
def test_losses_are_sums_over_layers(masked: int) -> None:
    torch.manual_seed(0)
    routers = LayerRouters(EXPERTS, CHOSEN, COEFFICIENT, None, z_coefficient=Z)
    layers = [torch.randn(TOKENS, EXPERTS, requires_grad=True) for _ in range(3)]
    mask_N = torch.arange(TOKENS) < TOKENS - masked if masked else None
    sums = routers.zeros()
    for logits_NE in layers:
        sums = routers.add(sums, logits_NE, mask_N)
    loss = routers.loss(sums)
    expected: Any = sum(by_definition(logits_NE[: TOKENS - masked]) for logits_NE in layers)
    torch.testing.assert_close(loss, expected)
    for own, other in zip(
        torch.autograd.grad(loss, layers), torch.autograd.grad(expected, layers), strict=True
    ):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize(
    ("changes", "arguments"),
    [(ROUTERS_LOSS, {}), ({}, {"auxiliary_loss": "per_layer"})],
)
def test_a_z_loss_needs_losses_of_layers(changes: dict[str, Any], arguments: Any) -> None:
    config = transformers.MixtralConfig(**{**MODELS["Mixtral"], **changes})
    with pytest.raises(ConfigError, match=r"z_loss: .*got 0\.1"):
        ds_ext.from_transformers(config, z_loss=0.1, **arguments)


@pytest.mark.parametrize("changes", [{}, ROUTERS_LOSS])
@pytest.mark.parametrize("kind", ["pooled", "per_layer"])
def test_the_json_has_the_loss_of_the_layers(changes: dict[str, Any], kind: Any) -> None:
    config = transformers.MixtralConfig(**{**MODELS["Mixtral"], **changes})
    _, loss_fn = ds_ext.from_transformers(config, auxiliary_loss=kind)
    require_auxiliary_loss(DsExtConfig(), loss_fn)
    if changes:
        require_auxiliary_loss(DsExtConfig(auxiliary_loss=kind), loss_fn)
    other = "per_layer" if kind == "pooled" or not changes else "pooled"
    with pytest.raises(ConfigError, match=rf"auxiliary_loss: .*got {other}"):
        require_auxiliary_loss(DsExtConfig(auxiliary_loss=other), loss_fn)


def test_a_gpt_has_no_loss_of_routers() -> None:
    with pytest.raises(ConfigError, match=r"auxiliary_loss: .*got pooled"):
        require_auxiliary_loss(DsExtConfig(auxiliary_loss="pooled"), None)
