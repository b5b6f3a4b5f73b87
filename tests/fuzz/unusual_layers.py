"""Kinds of one layer that use autograd, parameters, hooks or memory in an unusual way."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .kinds import LENGTH, WIDTH, Kind, layer
from .standard_layers import linear

# --- parameters ---


class SharedWeight(nn.Module):
    """Weight used by two linear layers, twice by one of them, and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(torch.tanh(self.first(x)))
        return y + self.second(x) + F.linear(x, self.first.weight.t())


class WeightAsMatrix(nn.Module):
    """Weight used by a linear layer, by a matrix product and alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        return self.linear(x) + x @ weight + 0.1 * weight.sum() * x


class Einsum(nn.Module):
    """Three-dimensional weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(2, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bsi,kij->bsj", x, self.weight)


class FunctionalLinear(nn.Module):
    """Parameters used by functions only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH)),
            nn.Parameter(torch.zeros(WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, 1), self.weight.t()).view_as(x)


class ScalarParameter(nn.Module):
    """Parameters without dimensions and without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.zeros(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.empty.sum()


class Collections(nn.Module):
    """Parameters and modules in lists and dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(1, 1, WIDTH))})
        self.linears = nn.ModuleList([linear(), linear()])

    def forward(self, x: Tensor) -> Tensor:
        for scale, module in zip(self.scales, self.linears, strict=True):
            x = scale * module(x)
        return x + self.named["shift"]


class QueryPositions(nn.Module):
    """Learned queries added to a projection. With one sample, both receive the same gradient tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.projection = nn.Embedding(LENGTH, WIDTH), linear()

    def forward(self, x: Tensor) -> Tensor:
        # A later layer may change the result in place: it is not tanh's own, which a backward needs.
        return 0.9 * torch.tanh(self.projection(x) + self.positions.weight.unsqueeze(0))


class AddedParameter(nn.Module):
    """Parameter of the shape of one sample added to a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.projection = nn.Parameter(0.1 * torch.randn(1, LENGTH, WIDTH)), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.positions + self.projection(x)


class AddedToBothEnds(nn.Module):
    """Parameters added to the input and the output, which receive the same gradient memory with one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.first.unsqueeze(0)) + self.last.unsqueeze(0)


class Unused(nn.Module):
    """Layer with parameters that are never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Either(nn.Module):
    """One of two branches, chosen by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        # Not by the sum of the features, which is a rounding error behind a norm.
        return self.positive(x) if float(x.detach().double()[0, 0, 0]) > 0 else self.negative(x)


class Experts(nn.Module):
    """Router that sends each token to one of three experts; an expert may receive no token."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList([linear() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen, y = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            if rows.any():
                y[rows] = weights[rows][:, number : number + 1] * expert(x[rows])
        return x + y


class Lookup(nn.Module):
    """Embedding of indices computed from the input, with a padding index."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, WIDTH, padding_idx=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embedding((x[..., 0] > 0).long() + (x[..., 1] > 0).long())


class SparseBag(nn.Module):
    """Embedding bag over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(4, WIDTH, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bag((x[..., 0] > 0).long()).unsqueeze(1)


class ComplexWeight(nn.Module):
    """Complex linear layer inside a real one."""

    def __init__(self) -> None:
        super().__init__()
        dtype = torch.get_default_dtype().to_complex()
        self.first, self.inner = linear(), nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(torch.complex(self.first(x), x))
        return y.real + 0.5 * y.imag


class DoubleWeight(nn.Module):
    """Part of the layer in double precision, with an fp64 weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = linear(), nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).double() * self.scale.double()).cumsum(1).to(x.dtype)


# --- gradients ---


class NoGradPart(nn.Module):
    """Weight used with and without gradient, and a detached input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.tanh(self.first(x))
        return self.first(x) * gate + self.second(x.detach()) + x


class DetachedInput(nn.Module):
    """Layer that stops the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.detach())


class _HalvedGradient(torch.autograd.Function):
    """Identity whose backward changes its argument in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].mul_(0.5)


class InPlaceBackward(nn.Module):
    """Own function with an in-place backward, beside another branch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return _HalvedGradient.apply(x) + self.linear(x)  # pyright: ignore[reportOperatorIssue]


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * torch.sigmoid(weight * x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gate = torch.sigmoid(weight * x)
        slope = x * gate * (1 - gate)
        return grads[0] * (gate + weight * slope), (grads[0] * x * slope).sum((0, 1))


class OwnFunction(nn.Module):
    """Own function with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = linear(), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = _Swish.apply(self.linear(x), self.weight)
        assert isinstance(y, Tensor)
        return y


class WeightHook(nn.Module):
    """Hooks on a weight's gradient that are not linear, but independent of its scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.linear.weight.register_hook(lambda grad: torch.where(grad > 0, grad, 0.5 * grad))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.linear.weight


class TwiceHooked(WeightHook):
    """The same hook on the weight of a linear layer that is applied twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))


def _tanh(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Return another output."""
    return torch.tanh(output)


def _halve(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Halve the gradients of the inputs, if they have any."""
    return tuple(None if grad is None else 0.5 * grad for grad in inputs)


class ModuleHooks(nn.Module):
    """Forward and backward hooks of an inner module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.linear.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.5,))
        self.linear.register_forward_hook(_tanh)
        self.linear.register_full_backward_hook(_halve)
        self.linear.register_full_backward_pre_hook(lambda module, outputs: (2 * outputs[0],))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class TensorHook(nn.Module):
    """Hooks on an activation and on the input's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda grad: 0.5 * grad)
        return y + x


class Checkpointed(nn.Module):
    """Layer that recomputes a part itself.

    Attributes:
        starved: whether the reentrant function of torch had no input with a gradient in a step of this process, so that
            it left its parameters without.
    """

    starved = False

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second = linear(), linear()

    def _inner(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant and torch.is_grad_enabled() and not x.requires_grad:
            Checkpointed.starved = True
        y = checkpoint(self._inner, x, use_reentrant=self.reentrant)
        assert isinstance(y, Tensor)
        return y


class Autocast(nn.Module):
    """Linear layer in bf16, then one in the model's precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.first(x)
        return self.second(y.to(x.dtype))


class Jvp(nn.Module):
    """Forward-mode derivative of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.func.jvp(self.linear, (x,), (torch.ones_like(x),))[1]


class Vmap(nn.Module):
    """Linear layer mapped over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.linear)(x)


class FunctionalCall(nn.Module):
    """Linear layer called with changed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        changed = {"weight": torch.tanh(self.linear.weight), "bias": 2 * self.linear.bias}
        return torch.func.functional_call(self.linear, changed, (x,))


class InnerGradient(nn.Module):
    """Gradient of an energy, with a graph of second order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(self.linear(y)).square().sum()
            (force,) = torch.autograd.grad(energy, y, create_graph=True)
        return x - 0.1 * force


# --- memory ---


class ScaleInPlace(nn.Module):
    """In-place operation on the layer's input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(1.5)


class AddInPlace(nn.Module):
    """Residual added in place to the layer's input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.clone())
        x += y
        return x.mul_(0.9)


class ResidualInPlace(nn.Module):
    """Residual added in place to the layer's own activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y += x
        return y


class SliceAssignment(nn.Module):
    """Result written to slices of a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y[..., ::2] = self.linear(x)[..., ::2]
        y[..., 1::2] = x[..., 1::2]
        return y


class Identity(nn.Module):
    """Input returned as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Flipped(nn.Module):
    """Non-contiguous output."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).flip(0).transpose(0, 1)


class Pooled(nn.Module):
    """Linear layer applied to a vector, a matrix and a transposed input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x.mean((0, 1))) + self.linear(x[:, 0]).unsqueeze(1) + self.linear(x.mT.mT)


class Sorted(nn.Module):
    """Sorting and gathering."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.sort(-1).values).gather(-1, x.argsort(-1))


class Fourier(nn.Module):
    """Complex numbers inside a layer, with a real filter."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(WIDTH // 2 + 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH)


# --- buffers ---


class RunningMean(nn.Module):
    """Running mean of the inputs, subtracted in training too."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return self.linear(x - self.mean.to(x.dtype, copy=True))


class RunningMeanInPlace(RunningMean):
    """Running mean subtracted from the input in place."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        x.sub_(self.mean.to(x.dtype, copy=True))
        return self.linear(x)


class Counter(nn.Module):
    """Number of forwards in training, in a buffer that no output depends on."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count.add_(1)
        return self.linear(x)


class ReplacedBuffer(nn.Module):
    """Buffer replaced by a new tensor, not changed in place."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return self.linear(x)


class LinearOfBuffer(RunningMean):
    """Linear layer of a running mean."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.training:
                self.count += 1
                self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return x + self.linear(self.mean)


class Constants(nn.Module):
    """Constant buffers, one of them not in the state."""

    mask: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.register_buffer("mask", torch.arange(WIDTH) % 3 > 0, persistent=False)
        self.register_buffer("scale", torch.full((WIDTH,), 0.75))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).masked_fill(~self.mask, 0) * self.scale.to(x.dtype) + x


UNUSUAL: dict[str, Kind] = {
    "shared_weight": layer(SharedWeight),
    "weight_as_matrix": layer(WeightAsMatrix),
    "einsum": layer(Einsum),
    "functional_linear": layer(FunctionalLinear),
    "scalar_parameter": layer(ScalarParameter),
    "collections": layer(Collections),
    "query_positions": layer(QueryPositions, fixed_length=True, weight=5),
    "added_parameter": layer(AddedParameter, fixed_length=True, weight=5),
    "unused": layer(Unused),
    "either": layer(Either),
    "experts": layer(Experts),
    "lookup": layer(Lookup),
    "embedding_bag": layer(SparseBag),
    "complex_weight": layer(ComplexWeight, fp32=True, weight=2),
    "double_weight": layer(DoubleWeight, doubles=True, weight=2),
    "no_grad_part": layer(NoGradPart),
    "detached_input": layer(DetachedInput),
    "in_place_backward": layer(InPlaceBackward, weight=3, changes_saved=True, changes_gradient=True),
    "own_function": layer(OwnFunction),
    "weight_hook": layer(WeightHook, weight=2),
    "twice_hooked": layer(TwiceHooked, weight=2),
    "module_hooks": layer(ModuleHooks),
    "tensor_hook": layer(TensorHook),
    "checkpointed": layer(Checkpointed, False),
    "checkpointed_reentrant": layer(Checkpointed, True),
    "autocast": layer(Autocast, rounds=True),
    "jvp": layer(Jvp, weight=2),
    "vmap": layer(Vmap, weight=2),
    "functional_call": layer(FunctionalCall),
    "inner_gradient": layer(InnerGradient, inner_backward=True),
    "scale_in_place": layer(ScaleInPlace, changes_input=True),
    "add_in_place": layer(AddInPlace, changes_input=True),
    "residual_in_place": layer(ResidualInPlace),
    "slice_assignment": layer(SliceAssignment),
    "identity": layer(Identity),
    "flipped": layer(Flipped),
    "pooled": layer(Pooled),
    "sorted": layer(Sorted),
    "fourier": layer(Fourier, fp32=True),
    "running_mean": layer(RunningMean, statistics=True),
    "running_mean_in_place": layer(RunningMeanInPlace, statistics=True, changes_input=True),
    "linear_of_buffer": layer(LinearOfBuffer, statistics=True, changes_saved=True, fp32=True),
    "counter": layer(Counter),
    "replaced_buffer": layer(ReplacedBuffer),
    "constants": layer(Constants),
}
