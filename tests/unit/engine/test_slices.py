"""Trial of layers before they run in slices of sequences."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_ext.engine.stages.sequences import SlicedSequences
from ds_ext.engine.stages.slice_trial import _try_layer
from ds_ext.errors import ConfigError
from ds_ext.tensor_parallel import Slice, SliceStore, computing, current_slice, earlier_slices, slice_start

TOKENS, WIDTH = 4, 8
OWNER = object()
POSITIONS = torch.linspace(0, 1, TOKENS)[:, None]
_weights = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(WIDTH, WIDTH, generator=_weights)
KERNEL = torch.randn(WIDTH, WIDTH, 3, generator=_weights)


def in_place(x: Tensor) -> Tensor:
    return F.linear(x.mul_(0.5), WEIGHT)


def previous_token(x: Tensor) -> Tensor:
    earlier = earlier_slices(OWNER, x[:, -1:])
    first = earlier[-1][0] if earlier else torch.zeros_like(x[:, :1])
    return x + torch.cat((first, x[:, :-1]), 1)


def positions(x: Tensor) -> Tensor:
    return x + POSITIONS[slice_start() :][: x.size(1)]


def parameter_beside(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, WEIGHT


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "convolution": lambda x: F.conv1d(x.mT, KERNEL, padding=1).mT,
    "positions without slice_start": lambda x: x + POSITIONS[: x.size(1)],
    "mean of a slice beside the output": lambda x: (x, x.square().mean()),
    "first token beside the output": lambda x: (x, x[:, :1]),
}


def sample(tokens: int = TOKENS) -> Tensor:
    """Part of a longer sample, as the first slice is."""
    return torch.randn(2, 2 * tokens, WIDTH, generator=torch.Generator().manual_seed(1))[:, :tokens]


def rounded(x: Tensor) -> Tensor:
    """Output in fp64 that rounds by the length of the slice as fp32 does."""
    return (x * (1 + 1e-7 * x.size(1))).double()


@pytest.mark.parametrize(
    "layer", [in_place, previous_token, positions, parameter_beside, rounded, nn.Linear(8, 8)]
)
def test_layers_that_compute_the_same_are_accepted_and_keep_their_inputs(layer: Any) -> None:
    x = sample()
    with torch.no_grad():
        _try_layer(nn.Module(), layer, "layer 0", x, TOKENS)
    assert torch.equal(x, sample())


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_compute_something_else_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="layer 7"), torch.no_grad():
        _try_layer(nn.Module(), REFUSED[name], "layer 7", sample(), TOKENS)


def test_layers_that_mix_tokens_in_training_only_are_refused() -> None:
    norm = nn.BatchNorm1d(WIDTH)

    def layer(x: Tensor) -> Tensor:
        return norm(x.transpose(1, 2)).transpose(1, 2)

    with pytest.raises(ConfigError, match="mixes tokens"), torch.no_grad():
        _try_layer(norm, layer, "layer 0", sample(), TOKENS)
    norm.eval()
    with torch.no_grad():
        _try_layer(norm, layer, "layer 0", sample(), TOKENS)


def test_conditions_and_infinite_masks_beside_the_outputs_are_accepted() -> None:
    condition = torch.randn(2, 1, WIDTH)
    mask = torch.full((2, TOKENS), -torch.inf)

    def layer(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, condition, mask = inputs
        return x + condition, condition, mask

    with torch.no_grad():
        _try_layer(nn.Module(), layer, "layer 0", (sample(), condition, mask), TOKENS)


def test_stored_tensors_are_those_of_one_forward() -> None:
    store, k = SliceStore(), torch.randn(1, 2, 3, requires_grad=True) * 1
    first, second = (Slice(j, 2 * j, 2 * j + 2, 4, store) for j in range(2))
    with computing(first):
        assert earlier_slices(OWNER, k) == []
        with pytest.raises(ConfigError, match="twice"):
            earlier_slices(OWNER, k)
    with computing(replace(first, repeats=True)):
        assert earlier_slices(OWNER, k) == []
    k.mul_(2)
    with computing(second), pytest.raises(ConfigError, match="in place"):
        earlier_slices(OWNER, k)


class OneLayer(nn.Module):
    """Module with one stage of one layer."""

    def __init__(self, layer: Callable[[Tensor], Any], loss_fn: Any = F.mse_loss) -> None:
        super().__init__()
        self.parts, self.stage_funcs, self.loss_fn = [0, 1], {0: [layer]}, loss_fn

    def stage_modules(self, stage: int) -> dict[int, nn.Module]:
        return {}


def test_the_last_layer_may_return_the_loss() -> None:
    module: Any = OneLayer(lambda x: (x.sum(), torch.tensor(x.numel())), None)
    slices = SlicedSequences(module, 2, "equal", 1)
    with slices.forward(0, 0, 0, (sample(),)):
        assert current_slice() is not None


def test_an_attention_of_the_slice_in_a_last_layer_that_returns_the_loss_is_refused() -> None:
    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        earlier = x.cumsum(1) / torch.arange(1, x.size(1) + 1)[:, None]
        return (x + 1e-3 * earlier).square().sum(), torch.tensor(x.numel())

    module: Any = OneLayer(layer, None)
    with pytest.raises(ConfigError, match="layer 0"):
        SlicedSequences(module, 2, "equal", 1).forward(0, 0, 0, (sample(),)).__enter__()


def rounding_by_length(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a function of every token with a rounding of bf16 that depends on the length of the slice."""
    return (x.to(dtype) * (1 + 2**-7 * (x.size(1) == TOKENS))).float()


@pytest.mark.parametrize(("dtype", "accepted"), [(torch.bfloat16, True), (torch.float32, False)])
def test_half_precision_inside_a_layer_or_a_loss_is_no_difference(dtype: torch.dtype, accepted: bool) -> None:
    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        return rounding_by_length(x.square(), dtype).sum(), torch.tensor(x.numel())

    def outcome() -> Any:
        return contextlib.nullcontext() if accepted else pytest.raises(ConfigError, match="layer 0")

    with torch.no_grad(), outcome():
        _try_layer(nn.Module(), lambda x: x + rounding_by_length(x, dtype), "layer 0", sample(), TOKENS)
    module: Any = OneLayer(loss, None)
    with outcome():
        SlicedSequences(module, 2, "equal", 1).forward(0, 0, 0, (sample(),)).__enter__()


def test_a_layer_may_change_its_slice_of_the_data_in_place() -> None:
    module: Any = OneLayer(in_place)
    data = sample()
    first, second = (SlicedSequences(module, 2, "equal", 1).cut((data,), j)[0] for j in range(2))
    product = second.requires_grad_() * second.detach()  # keeps the second slice for its backward
    first.mul_(2)
    product.sum().backward()
    assert torch.equal(data, sample())


@pytest.mark.parametrize(("tokens", "trains"), [(1, True), (TOKENS, False)])
def test_a_slice_of_one_token_and_an_evaluation_are_tried_too(tokens: int, trains: bool) -> None:
    module: Any = OneLayer(REFUSED["convolution"])
    slices = SlicedSequences(module, 2, "equal", 1)
    with pytest.raises(ConfigError, match="layer 0"), torch.set_grad_enabled(trains):
        slices.forward(0, 0, 0, (sample(tokens),)).__enter__()
