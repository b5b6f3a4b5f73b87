"""Split backwards of a stage give the gradients of plain torch over several micro-batches, and a forward runs once."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from ds_ext.engine.stages.body import StageForward
from ds_ext.engine.stages.buffer import Buffer
from ds_ext.engine.step import BackwardContext
from ds_ext.errors import ConfigError
from ds_ext.tensor_parallel import WeightGradients, deferrable, deferring, let_defer

WIDTH, MICRO_BATCHES = 4, 3


def identity(loss: Any) -> Tensor:
    return loss


class Layer(nn.Module):
    """Linear layer and a function of (this module, input)."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.table = nn.Embedding(5, WIDTH, dtype=dtype)
        self.queries = nn.Parameter(torch.randn(5, WIDTH, dtype=dtype))
        self.state: Tensor
        self.register_buffer("state", torch.zeros(5, WIDTH, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def hidden(micro_batch: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(1, 5, WIDTH, generator=torch.Generator().manual_seed(micro_batch), dtype=dtype)


def plain(model: nn.Module, inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
    """Return the gradients of one micro-batch after the other. Autograd would add some of their sums twice."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = [model(x * 1) for x in leaves]
    sums: list[Tensor | None] = [None for _ in model.parameters()]
    for output, grad in zip(outputs, grads, strict=True):
        output.backward(grad.clone())
        for index, parameter in enumerate(model.parameters()):
            if parameter.grad is not None:
                before, gradient, parameter.grad = sums[index], parameter.grad.clone(), None
                sums[index] = gradient if before is None else before + gradient
    return [*(x.grad for x in leaves), *sums]


def in_a_stage(
    model: nn.Module, inputs: list[Tensor], grads: list[Tensor], splits: bool
) -> list[Tensor | None]:
    """Run all forwards, then all backwards or first halves, then all second halves."""
    let_defer(model)
    forward = StageForward(SimpleNamespace(forward_stage=lambda stage, x, *_: model(x)))  # pyright: ignore[reportArgumentType]
    buffers = [Buffer() for _ in inputs]
    leaves = []
    for buffer, x in zip(buffers, inputs, strict=True):
        buffer.set_inputs((x.clone(),))
        assert buffer.inputs is not None
        leaves += buffer.inputs
        with deferrable() if splits else nullcontext():
            buffer.outputs = (forward(1, buffer.inputs, 0, 0),)
        buffer.take_outputs()
    input_grads = []
    for buffer, grad in zip(buffers, grads, strict=True):
        buffer.grads = (grad.clone(),)
        buffer.deferred = WeightGradients() if splits else None
        with nullcontext() if buffer.deferred is None else deferring(buffer.deferred):
            buffer.backward(BackwardContext(identity, parameters=list(model.parameters())))
        input_grads += buffer.take_input_grads()
    for buffer in buffers:
        if buffer.deferred is not None:
            buffer.deferred.compute()
    return [*input_grads, *(p.grad for p in model.parameters())]


def swapped(m: Layer, x: Tensor) -> Tensor:
    """Assign other values to the weight in each forward."""
    m.linear.weight.data = m.linear.weight.data * 1.1
    return m.linear(x)


def frozen_input(m: Layer, x: Tensor) -> Tensor:
    """Change the weight of a layer in place, whose input needs no gradient."""
    with torch.no_grad():
        m.linear.weight.mul_(1.1)
    return x + m.linear(x.detach())


def tangent(m: Layer, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(m.linear(forward_ad.make_dual(x, torch.ones_like(x))))
        assert dual.tangent is not None
        return x + dual.tangent


def substituted(m: Layer, x: Tensor) -> Tensor:
    weights: dict[str, Tensor] = {name: 2 * p for name, p in m.linear.named_parameters()}
    return torch.func.functional_call(m.linear, weights, (x,)) + m.linear(x)


def partly_without_gradients(m: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        factor = m.linear(x)
    return m.linear(x) * factor


def counted(m: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.state += 1
    return m.linear(m.state.clone()) + m.linear(x)


FUNCTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "parameter added to the output": lambda m, x: m.linear(x) + m.queries.unsqueeze(0),
    "rows of a table added to the output": lambda m, x: m.linear(x) + m.table.weight.unsqueeze(0),
    "table looked up and added": lambda m, x: m.table(torch.arange(5)) + m.linear(x) + m.table.weight[None],
    "parameter added to the input": lambda m, x: torch.tanh(x + m.queries.unsqueeze(0)),
    "parameter added to a view of the input": lambda m, x: torch.tanh(x[None] + m.queries[None, None])[0],
    "parameter added to the input in place": lambda m, x: m.linear(x.add_(m.queries)),
    "two parameters added to the input": lambda m, x: x + m.queries.unsqueeze(0) + m.table.weight.unsqueeze(0),
    "two parameters added to each other": lambda m, x: 2 * x + (m.queries[None] + m.table.weight[None]),
    "output changed in place": lambda m, x: m.linear(F.relu_(m.linear(x))).mul_(2).add_(x),
    "lookup changed in place": lambda m, x: x * m.table(torch.arange(5)).mul_(2),
    "weight used twice": lambda m, x: m.linear(torch.tanh(m.linear(x))) + x @ m.linear.weight,
    "weight assigned": swapped,
    "weight changed in place": frozen_input,
    "buffer changed in place": counted,
    "partly without gradients": partly_without_gradients,
    "vmap": lambda m, x: torch.func.vmap(m.linear)(x),
    "jvp": lambda m, x: torch.func.jvp(m.linear, (x,), (torch.ones_like(x),))[1] * x,
    "forward-mode autograd": tangent,
    "functional_call": substituted,
}  # fmt: skip


def compare(model: nn.Module, splits: bool = True, dtype: torch.dtype = torch.float32) -> None:
    other = copy.deepcopy(model)
    inputs = [hidden(micro_batch, dtype) for micro_batch in range(MICRO_BATCHES)]
    grads = [hidden(10 + micro_batch, dtype) for micro_batch in range(MICRO_BATCHES)]
    expected = plain(other, inputs, grads)
    torch.testing.assert_close(in_a_stage(model, inputs, grads, splits), expected)


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_gradients_of_several_micro_batches(function: Callable[[Any, Tensor], Tensor], splits: bool) -> None:
    torch.manual_seed(0)
    compare(Layer(function), splits)


def test_complex_weights() -> None:
    torch.manual_seed(0)
    compare(Layer(lambda m, x: m.linear(x) * m.linear(1j * x), torch.complex64), dtype=torch.complex64)


class Hooked(nn.Module):
    """Linear layer with hooks, whose weight another operation may use too."""

    def __init__(self, add: Callable[[nn.Linear], Any], mixed: bool) -> None:
        super().__init__()
        self.linear, self.add, self.mixed = nn.Linear(WIDTH, WIDTH), add, mixed
        add(self.linear)

    def __deepcopy__(self, memo: Any) -> Hooked:
        other = Hooked(self.add, self.mixed)
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y + x @ self.linear.weight if self.mixed else y


HOOKS: dict[str, Callable[[nn.Linear], Any]] = {
    "parameter": lambda linear: linear.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1)),
    "forward": lambda linear: linear.register_forward_hook(lambda m, inputs, output: output.mul_(2)),
    "before the forward": lambda linear: linear.register_forward_pre_hook(lambda m, inputs: 2 * inputs[0]),
    "backward": lambda linear: linear.register_full_backward_hook(lambda m, given, got: (2 * given[0],)),
    "before the backward": lambda linear: linear.register_full_backward_pre_hook(lambda m, got: (2 * got[0],)),
    "parametrization": lambda linear: nn.utils.parametrizations.weight_norm(linear),
}  # fmt: skip


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("add", HOOKS.values(), ids=HOOKS)
def test_hooks(add: Callable[[nn.Linear], Any], mixed: bool) -> None:
    torch.manual_seed(0)
    compare(Hooked(add, mixed))


class Halve(torch.autograd.Function):
    """Function whose backward changes its argument in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].mul_(0.5)


def test_an_output_gradient_changed_in_place_is_refused() -> None:
    layer = Layer(lambda m, x: Halve.apply(x) + m.linear(x))
    with pytest.raises(ConfigError, match=r"^schedule: .*\(4, 4\).*1f1b"):
        in_a_stage(layer, [hidden(0)], [hidden(1)], splits=True)


class Counter(nn.Module):
    """Counts its forwards, in a buffer and in an integer input, and then changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: Tensor
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, positions = pair
        self.forwards += 1
        positions += 1
        return x.mul_(2)


def test_a_stage_that_begins_with_an_in_place_operation_runs_once() -> None:
    model, buffer = Counter(), Buffer()
    forward = StageForward(SimpleNamespace(forward_stage=lambda stage, x, *_: model(x)))  # pyright: ignore[reportArgumentType]
    buffer.set_inputs((torch.ones(3), torch.arange(3)))
    assert buffer.inputs is not None
    buffer.outputs = (forward(1, buffer.inputs, 0, 0),)
    assert model.forwards == 1 and buffer.inputs[1].tolist() == [1, 2, 3]
    buffer.grads = (torch.ones(3),)
    buffer.backward(BackwardContext(identity))
    assert buffer.take_input_grads()[0].tolist() == [2, 2, 2]


def test_a_stage_keeps_neither_sent_outputs_nor_the_inputs_of_deferred_gradients() -> None:
    model, buffer = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), Buffer()
    let_defer(model)
    buffer.set_inputs((torch.ones(2, 4),))
    assert buffer.inputs is not None
    with deferrable():
        buffer.outputs = (model(buffer.inputs[0] * 1) + 1,)
    output, inputs = weakref.ref(buffer.take_outputs()[0]), weakref.ref(buffer.inputs[0])
    assert output() is None
    buffer.grads, buffer.deferred = (torch.ones(2, 4),), WeightGradients()
    with deferring(buffer.deferred):
        buffer.backward(BackwardContext(identity, parameters=list(model.parameters())))
    buffer.take_input_grads()
    assert inputs() is None and model[1].weight.grad is None
    buffer.deferred.compute()
    assert model[1].weight.grad is not None
