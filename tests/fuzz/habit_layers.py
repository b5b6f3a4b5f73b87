"""Kinds of layers that only habits draw: ties of all kinds, other precisions, DeepSpeed's experts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from .crossings import TiedLinear, WithLinear, residual_tie
from .kinds import WIDTH, Kind, Place, layer
from .standard_layers import linear

EXPERTS = 2

# --- ties ---


class TiedTanh(TiedLinear):
    """Another layer with the same weight."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(2 * (input @ self.weight))


class TiedScale(TiedLinear):
    """Layer with a tied weight and an argument."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        return self.scale * torch.tanh(super().forward(input))


class TiedFrozen(TiedLinear):
    """Layer with a tied weight, and a frozen bias and a buffer of random values."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("offset", torch.randn(WIDTH))

    def forward(self, input: Tensor) -> Tensor:
        return torch.tanh(super().forward(input) + self.get_buffer("offset").to(input.dtype))


class TiedEncoder(nn.Module):
    """Layer whose tied weight has another name for users: a property."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    @property
    def tied(self) -> Tensor:
        """The tied weight."""
        return self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def _tied(name: str, *specs: tuple[Any, ...], **options: Any) -> Kind:
    """Return a kind of specs with one key, with a linear layer behind each: (class, its arguments)."""

    def layers(place: Place) -> list[Any]:
        made = []
        for layer_class, *args in specs:
            made += [
                TiedLayerSpec(f"{name}{place.number}", layer_class, *args, **options),
                LayerSpec(nn.Linear, WIDTH, WIDTH),
            ]
        return made

    return Kind(layers, weight=0)


def _tied_classes_with_function(place: Place) -> list[Any]:
    key = f"functions{place.number}"
    return [
        TiedLayerSpec(key, TiedLinear),
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        TiedLayerSpec(key, TiedTanh, forward_fn=residual_tie),
    ]


def _module_thrice(place: Place) -> list[Any]:
    module = nn.Sequential(linear(), nn.Tanh())
    return [module, module, LayerSpec(nn.Linear, WIDTH, WIDTH), module]


def _bias_by_assignment(place: Place) -> list[Any]:
    modules = [linear() for _ in range(3)]
    for module in modules[1:]:
        module.bias = modules[0].bias
    return [*modules]


# --- precisions ---


class LinearOf(nn.Module):
    """Linear layer with weights of one dtype in a model of another."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(self.linear.weight.dtype)).to(x.dtype)


class Fp32Scale(WithLinear):
    """Linear layer with one fp32 parameter, as norms have it in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).float() * self.scale).to(x.dtype)


# --- DeepSpeed's experts ---


class DeepSpeedExperts(nn.Module):
    """Layer with DeepSpeed's experts, on ``ep_size`` ranks."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        options: dict[str, Any] = {"k": 1, "min_capacity": 0, "drop_tokens": False, "use_rts": False}
        self.moe = MoE(WIDTH, linear(), num_experts=EXPERTS, ep_size=ep_size, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)[0]


class _Named(nn.Module):
    """Module with given attributes."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


class PlainExperts(nn.Module):
    """The same layer without ranks, and with the same names."""

    def __init__(self) -> None:
        super().__init__()
        expert = linear()
        experts = nn.ModuleList([copy.deepcopy(expert) for _ in range(EXPERTS)])
        gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.moe = _Named(
            deepspeed_moe=_Named(gate=_Named(wg=gate), experts=_Named(deepspeed_experts=experts))
        )
        self.parts = (gate, experts)  # a tuple, so that they are not registered twice

    def forward(self, x: Tensor) -> Tensor:
        gate, experts = self.parts
        weights = gate(x).softmax(-1)
        weight, chosen = weights.max(-1, keepdim=True)
        outputs = torch.stack([expert(x) for expert in experts], -2)
        index = chosen.unsqueeze(-1).expand(*chosen.shape, WIDTH)
        return x + weight * outputs.gather(-2, index).squeeze(-2)


def _experts(ep_size: int) -> Kind:
    return Kind(
        lambda place: [LayerSpec(DeepSpeedExperts, ep_size)],
        plain=lambda place: [LayerSpec(PlainExperts)],
        fp32=True,
        weight=0,
    )


HABITUAL: dict[str, Kind] = {
    "tied_classes": _tied("classes", (TiedLinear,), (TiedTanh,)),
    "tied_arguments": _tied("arguments", (TiedScale, 1.0), (TiedScale, 2.0)),
    "tied_equal_arguments": _tied("equal", (TiedScale, 1.5), (TiedScale, 1.5)),
    "tied_frozen": _tied("frozen", (TiedFrozen,), (TiedFrozen,)),
    "tied_property": _tied("property", (TiedEncoder,), (TiedEncoder,), tied_weight_attr="tied"),
    "tied_three_classes": _tied("three", (TiedTanh,), (TiedLinear,), (TiedTanh,)),
    "tied_classes_with_function": Kind(_tied_classes_with_function, weight=0),
    "module_thrice": Kind(_module_thrice, weight=0),
    "bias_by_assignment": Kind(_bias_by_assignment, weight=0),
    "bf16_layer": layer(LinearOf, torch.bfloat16, rounds=True, weight=0, mixed=torch.bfloat16),
    "fp16_layer": layer(LinearOf, torch.float16, rounds=True, weight=0, mixed=torch.float16),
    "fp32_layer": layer(LinearOf, torch.float32, weight=0, mixed=torch.float32),
    "fp32_scale": layer(Fp32Scale, weight=0, mixed=torch.float32),
    "experts_1": _experts(1),
    "experts_2": _experts(2),
}
TIES = tuple(name for name in HABITUAL if name.startswith(("tied", "module", "bias")))
EXPERT_LAYERS = ("experts_1", "experts_2")
MIXED = tuple(name for name, kind in HABITUAL.items() if kind.mixed)
