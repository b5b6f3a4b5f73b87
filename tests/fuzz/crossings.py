"""Kinds of several layers, whose messages may cross stages: tuples, views, other dtypes, ties."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from .kinds import WIDTH, Kind, Place, chain
from .standard_layers import linear
from .unusual_layers import AddedToBothEnds, Identity


class WithLinear(nn.Module):
    """Base of layers with one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()


class Twice(WithLinear):
    """Output of the same tensor twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y


class TwiceAgain(WithLinear):
    """Sum of a pair, and the same tensor twice."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        y = self.linear(pair[0] + 2 * pair[1])
        return y, y


class Sum(nn.Module):
    """Sum of the parts."""

    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        x = parts[0]
        for part in parts[1:]:
            x = x + part
        return x


class WithView(WithLinear):
    """Tensor and views of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        return y, y[..., :], y[:, :1]


class WithInput(WithLinear):
    """Input itself beside the output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.tanh(self.linear(x))


class OtherLayout(WithLinear):
    """Expanded, transposed, scalar, empty, bool and integer tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        expanded = y.mean(1, keepdim=True).expand(-1, 3, -1)
        return (
            *(y, expanded, y.transpose(0, 1), y.mean()),
            *(y > 0, y.new_empty(0, 4), torch.arange(WIDTH, device=y.device)),
        )


class OtherLayoutAgain(WithLinear):
    """Layer that uses and returns these tensors."""

    def forward(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, expanded, transposed, scale, mask, empty, numbers = parts
        y = self.linear(x) * scale.sigmoid() + expanded.mean(1, keepdim=True)
        y = y + transposed.transpose(0, 1) * mask + 0.01 * numbers.to(x.dtype)
        return y, 2 * expanded, transposed * 0.5, scale * 1.5, ~mask, empty, numbers


class FromOtherLayout(nn.Module):
    """Sum of what is left of these tensors."""

    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        return parts[0] + parts[1].sum(1, keepdim=True) * parts[3] + parts[5].sum()


class ToComplex(WithLinear):
    """Complex output."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(self.linear(x), x)


class ComplexLinear(nn.Module):
    """Complex linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.get_default_dtype().to_complex())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class FromComplex(nn.Module):
    """Real output."""

    def forward(self, x: Tensor) -> Tensor:
        return x.real + 0.5 * x.imag


class ReturnedParameter(WithLinear):
    """Parameter returned beside the output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.scale


class UsedParameter(nn.Module):
    """Product with a parameter of the layer before."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


class WithMask(WithLinear):
    """Bool mask beside the output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x > 0


class Masked(WithLinear):
    """Layer that uses the mask."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = pair
        return self.linear(x).masked_fill(mask, 0.5), mask


class First(nn.Module):
    """First part alone; the others get no gradient."""

    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        return parts[0]


class WithDepth(WithLinear):
    """Depth counter beside the output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)


class Deeper(nn.Module):
    """Counter changed in place, then an in-place residual."""

    def __init__(self) -> None:
        super().__init__()
        self.depth, self.linear = nn.Embedding(6, WIDTH), linear()

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, depth = pair
        depth += 1
        x += self.depth(depth.clone()).unsqueeze(1)
        return self.linear(torch.tanh(x)), depth


class WithAuxiliary(WithLinear):
    """Auxiliary loss beside the output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y.square().mean()


class AddAuxiliary(WithLinear):
    """Layer that adds to the auxiliary loss."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        y = self.linear(pair[0])
        return y, pair[1] + y.square().mean()


class UseAuxiliary(nn.Module):
    """Layer that uses the auxiliary loss."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


class WithDetached(WithLinear):
    """Detached tensor beside the output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x.detach()


class UseDetached(WithLinear):
    """Product with the detached tensor."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(pair[0] * pair[1]) + pair[0]


class AsList(WithLinear):
    """List of a tensor and a residual."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.linear(x), x]


class ListLayer(WithLinear):
    """Layer between lists."""

    def forward(self, parts: list[Tensor]) -> list[Tensor]:
        return [torch.tanh(self.linear(parts[0])), parts[1]]


class Transposed(WithLinear):
    """Non-contiguous output with another shape."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).transpose(0, 1)


class Cast(WithLinear):
    """Output in another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).to(self.dtype)


class CastBack(WithLinear):
    """Output in the dtype of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(self.linear.weight.dtype))


class DoubleLinear(nn.Module):
    """Linear layer with fp64 weights, which DeepSpeed casts in a bf16 model, and fp64 output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(self.linear.weight.dtype)).double()


class UnusedOutput(WithLinear):
    """Second output that no layer uses."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y * 2


class TiedLinear(nn.Linear):
    """Tied layer: one weight, no bias."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)


def transposed_linear(module: nn.Module, x: Tensor) -> Tensor:
    """Multiply with the transposed weight of a tied layer."""
    assert isinstance(module.weight, Tensor)
    return F.linear(x, module.weight.t())


def residual_tie(module: nn.Module, x: Tensor) -> Tensor:
    """Apply a tied layer with a residual."""
    return x + module(x)


def _tied(place: Place) -> list[Any]:
    key = f"tied{place.number}"
    first = TiedLayerSpec(key, TiedLinear)
    return [
        first,
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        TiedLayerSpec(key, TiedLinear, forward_fn=transposed_linear),
    ]


def _tied_neighbours(place: Place) -> list[Any]:
    key = f"neighbours{place.number}"
    return [TiedLayerSpec(key, TiedLinear), TiedLayerSpec(key, TiedLinear, forward_fn=residual_tie)]


def _tied_thrice(place: Place) -> list[Any]:
    key = f"thrice{place.number}"
    spec = TiedLayerSpec(key, TiedLinear, forward_fn=residual_tie)
    return [spec, LayerSpec(nn.Linear, WIDTH, WIDTH), spec, LayerSpec(nn.Linear, WIDTH, WIDTH), spec]


def _same_module(place: Place) -> list[Any]:
    module = linear()
    return [module, LayerSpec(nn.Linear, WIDTH, WIDTH), module]


def _shared_parameter(place: Place) -> list[Any]:
    first, second = linear(), linear()
    second.weight = first.weight
    return [first, LayerSpec(Identity), second]


def _modules(place: Place) -> list[Any]:
    return [nn.Sequential(linear(), nn.Tanh(), nn.Sequential(linear())), nn.Tanh()]


def _scaled(x: Tensor) -> Tensor:
    return 0.5 * x


def _functions(place: Place) -> list[Any]:
    return [LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh, LayerSpec(nn.Linear, WIDTH, WIDTH), _scaled]


def _functions_in_place(place: Place) -> list[Any]:
    return [
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        torch.tanh_,
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        lambda x: x.mul_(1.5),
    ]


def _cast(dtype: torch.dtype, **options: Any) -> Kind:
    return Kind(lambda place: [LayerSpec(Cast, dtype), LayerSpec(CastBack)], **options)


CROSSINGS: dict[str, Kind] = {
    "same_tensor_twice": chain(Twice, TwiceAgain, TwiceAgain, Sum),
    "views": chain(WithView, Sum),
    "input_returned": chain(WithInput, Sum),
    "other_layouts": chain(OtherLayout, OtherLayoutAgain, OtherLayoutAgain, FromOtherLayout),
    "complex": chain(ToComplex, ComplexLinear, ComplexLinear, FromComplex, fp32=True, weight=2),
    "parameter_returned": chain(ReturnedParameter, UsedParameter),
    "mask": chain(WithMask, Masked, Masked, First),
    "depth_in_place": chain(WithDepth, Deeper, Deeper, First, changes_input=True),
    "auxiliary_loss": chain(WithAuxiliary, AddAuxiliary, AddAuxiliary, UseAuxiliary),
    "detached_message": chain(WithDetached, UseDetached),
    "list": chain(AsList, ListLayer, ListLayer, Sum),
    "transposed": chain(Transposed, Transposed),
    "bf16_message": _cast(torch.bfloat16, rounds=True),
    "fp64_message": _cast(torch.float64),
    "fp64_layers": chain(DoubleLinear, DoubleLinear, CastBack, doubles=True, weight=3),
    "unused_output": chain(UnusedOutput, First),
    "added_to_both_ends": chain(*[AddedToBothEnds] * 4, fixed_length=True, weight=6, keeps_gradient=True),
    "tied": Kind(_tied),
    "tied_neighbours": Kind(_tied_neighbours),
    "tied_thrice": Kind(_tied_thrice),
    "same_module": Kind(_same_module),
    "shared_parameter": Kind(_shared_parameter),
    "modules": Kind(_modules),
    "functions": Kind(_functions),
    "functions_in_place": Kind(_functions_in_place, changes_input=True),
}
