"""Split backwards give bitwise the gradients of a whole backward, and the first half defers weight gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_ext.errors import ConfigError
from ds_ext.recipes.models.gpt import GPTConfig, gpt_layer_specs, gpt_loss
from ds_ext.tensor_parallel import (
    ColumnParallelLinear,
    DeferralWatch,
    DropoutClock,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    WeightGradients,
    deferrable,
    deferring,
    let_defer,
    linear,
)
from tests.allocations import AllocatedBytes
from tests.losses import mean
from tests.reference import assert_close_gradients

TP = TensorParallel()


def fill(weight: Tensor) -> None:
    nn.init.normal_(weight, generator=torch.Generator().manual_seed(weight.numel()))


class Recomputed(nn.Module):
    """Module that recomputes its layer in the backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


class Twice(nn.Module):
    """Module that uses a weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


def hidden() -> Tensor:
    return torch.randn(3, 5, 6)


def ids() -> Tensor:
    return torch.randint(0, 11, (3, 5))


MODULES: list[tuple[str, Callable[[], nn.Module], Callable[[], Tensor], int]] = [
    ("linear", lambda: nn.Linear(6, 4), hidden, 2),
    ("linear without bias", lambda: nn.Linear(6, 4, bias=False), hidden, 1),
    ("column", lambda: ColumnParallelLinear(6, 4, TP, init=fill), hidden, 2),
    ("row", lambda: RowParallelLinear(6, 4, TP, init=fill), hidden, 1),  # adds its bias separately
    ("embedding", lambda: nn.Embedding(11, 6), ids, 1),
    ("embedding with padding", lambda: nn.Embedding(11, 6, padding_idx=-1), ids, 1),
    ("vocabulary", lambda: VocabParallelEmbedding(11, 6, TP, init=fill), ids, 1),
    ("norm", lambda: nn.LayerNorm(6), hidden, 0),
    ("embedding with a norm limit", lambda: nn.Embedding(11, 6, max_norm=1.0), ids, 0),
    ("recomputed", lambda: Recomputed(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))), hidden, 4),
    ("twice", Twice, hidden, 2),
    ("frozen", lambda: nn.Linear(6, 4).requires_grad_(False), hidden, 0),
    ("one row", lambda: nn.Linear(6, 4), lambda: torch.randn(6), 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "inputs", "deferred"), [m[1:] for m in MODULES], ids=[m[0] for m in MODULES]
)
def test_halves_make_the_whole(
    make: Callable[[], nn.Module], inputs: Callable[[], Tensor], deferred: int
) -> None:
    torch.manual_seed(0)
    whole = make()
    halves = copy.deepcopy(whole)
    let_defer(halves)
    x = inputs()
    xs = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
    expected = whole(xs[0])
    with deferrable():
        output = halves(xs[1])
    assert torch.equal(output, expected)
    grad = torch.randn_like(expected)
    if expected.requires_grad:
        expected.backward(grad)
    later = WeightGradients()
    with deferring(later):
        if output.requires_grad:
            torch.autograd.backward([output], [grad])
    if x.is_floating_point():
        torch.testing.assert_close(xs[1].grad, xs[0].grad, rtol=0, atol=0)
    assert len(later.weights) == deferred
    assert sum(p.grad is None for p in halves.parameters() if p.requires_grad) == deferred
    later.compute()
    assert later.weights == set()
    for split, full in zip(halves.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(split.grad, full.grad, rtol=0, atol=0)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_gpt_defers_all_its_matrices(recompute: Literal["none", "full"]) -> None:
    config = GPTConfig(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=32,
                       hidden_dropout=0.1, attention_dropout=0.1, make_vocab_size_divisible_by=8,
                       recompute=recompute, seed=1)  # fmt: skip
    clock = DropoutClock()
    layers = nn.ModuleList(spec.build() for spec in gpt_layer_specs(config, TP, clock)[:-1])
    tokens = torch.randint(0, 32, (2, 8))
    loss_fn = gpt_loss(config, TP)

    def run(model: nn.ModuleList) -> Tensor:
        x = tokens
        for layer in model:
            x = layer(x)
        words: Tensor = model[0].word_embeddings.weight  # pyright: ignore[reportAssignmentType, reportAttributeAccessIssue]
        return mean(loss_fn(linear(x, words), tokens))

    halves = copy.deepcopy(layers)
    run(layers).backward()
    with deferrable():
        loss = run(halves)
    later = WeightGradients()
    with deferring(later):
        torch.autograd.backward([loss])
    named = {id(p): (name, p) for name, p in halves.named_parameters()}
    matrices = {
        i for i, (name, p) in named.items() if p.dim() == 2 and "position" not in name and name != "1.weight"
    }
    assert matrices <= later.weights
    later.compute()
    for split, full in zip(halves.parameters(), layers.parameters(), strict=True):
        assert_close_gradients(split.grad, full.grad)


def test_parameter_hooks_see_deferred_gradients() -> None:
    layer, seen = nn.Linear(3, 2), []
    let_defer(layer)
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    with deferrable():
        y = layer(torch.ones(1, 3))
    later = WeightGradients()
    with deferring(later):
        torch.autograd.backward([y.sum()])
    assert not seen
    later.compute()
    assert torch.equal(seen[0], torch.ones(2, 3)) and len(seen) == 1


def test_without_deferrable_layers_use_torchs_functions() -> None:
    y = ColumnParallelLinear(3, 2, TP, init=fill)(torch.ones(1, 3))
    assert y.grad_fn is not None and "AddmmBackward" in y.grad_fn.name()


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_layer_that_computes_gradients_in_its_forward_is_refused(create_graph: bool) -> None:
    # Autograd does not see a weight with a deferred gradient, so its gradient would be lost silently.
    layer, x = nn.Linear(3, 2), torch.ones(4, 3, requires_grad=True)
    let_defer(layer)
    with deferrable(), pytest.raises(ConfigError, match=r"^schedule: .*\(2, 3\).*1f1b"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=create_graph)
    assert layer.weight.grad is None


def test_a_replaced_forward_stays() -> None:
    layer = nn.Linear(3, 2)
    layer.forward = lambda x: x  # pyright: ignore[reportAttributeAccessIssue]
    let_defer(layer)
    x = torch.ones(1, 3)
    assert layer(x) is x


def test_a_weight_changed_before_the_backward_is_an_error() -> None:
    layer = nn.Linear(3, 2)
    let_defer(layer)
    with deferrable():
        y = layer(torch.ones(1, 3, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with deferring(WeightGradients()), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward([y.sum()])


@pytest.mark.parametrize(
    ("layer", "x"), [(nn.Linear(3, 2), torch.ones(1, 3)), (nn.Embedding(4, 2), torch.tensor([1, 2]))]
)
def test_an_input_changed_before_the_second_half_is_an_error(layer: nn.Module, x: Tensor) -> None:
    let_defer(layer)
    later = WeightGradients()
    with deferrable():
        y = layer(x)
    with deferring(later):
        torch.autograd.backward([y.sum()])
    x.add_(1)
    with pytest.raises(ConfigError, match=r"^schedule: .*2.*1f1b"):
        later.compute()


def test_under_autocast_layers_use_torchs_functions() -> None:
    layer = nn.Linear(3, 2)
    let_defer(layer)
    with deferrable(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch.ones(1, 3))
    assert y.dtype == torch.bfloat16
    later = WeightGradients()
    with deferring(later):
        torch.autograd.backward([y.sum()])
    assert not later.weights and layer.weight.grad is not None


@pytest.mark.parametrize("rare", [{"scale_grad_by_freq": True}, {"sparse": True}, {"max_norm": 1.0}])
def test_rare_embeddings_are_not_deferred(rare: dict) -> None:
    layer = nn.Embedding(11, 6, **rare)
    let_defer(layer)
    later = WeightGradients()
    with deferrable():
        y = layer(ids())
    with deferring(later):
        torch.autograd.backward([y.sum()])
    assert not later.weights and layer.weight.grad is not None


def test_deferred_gradients_have_no_graph() -> None:
    layer = nn.Linear(3, 2)
    let_defer(layer)
    later = WeightGradients()
    with deferrable():
        y = layer(torch.ones(1, 3, requires_grad=True))
    with deferring(later):
        torch.autograd.backward([y.sum()])
    later.compute()
    assert layer.weight.grad is not None and not layer.weight.grad.requires_grad


class TiedHead(nn.Module):
    """Embedding whose table is also the head: the lookup defers, the head defers only with linear()."""

    def __init__(self, head: Callable[..., Tensor]) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(11, 6), nn.LayerNorm(6), head

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.table(tokens)), self.table.weight)


@pytest.mark.parametrize(("head", "deferred"), [(F.linear, 0), (linear, 66)])
def test_share_of_deferred_elements(head: Callable[..., Tensor], deferred: int) -> None:
    layer = TiedHead(head)
    let_defer(layer)
    watch, later = DeferralWatch(layer.parameters()), WeightGradients()
    with deferrable():
        y = layer(ids())
    with deferring(later):
        y.sum().backward()
    watch.add(later)
    later.compute()
    watch.close()
    deferral = watch.deferral(layer.named_parameters())
    assert deferral.deferred == deferred
    assert deferral.at_once.total() == 12 + 66 - deferred
    assert deferral.share == pytest.approx(deferred / 78)
    assert (deferral.largest_at_once[0] == "table.weight") is (deferred == 0)
    assert (deferral + deferral).share == deferral.share
    y = layer(ids())
    y.sum().backward()  # close() has removed the hooks
    assert watch.deferral(layer.named_parameters()) == deferral


def test_share_without_trained_parameters() -> None:
    assert DeferralWatch([]).deferral([]).share == 1.0


@pytest.mark.parametrize(("size", "together"), [(1056, 1), (724, 2), (64, 8)])
def test_gradients_of_few_parameters_at_a_time(size: int, together: int) -> None:
    """Eight equal weights with gradients: a ninth gradient is all that their weight gradients need, if it is large."""
    layers = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(8)))
    let_defer(layers)
    for layer in layers.parameters():
        layer.grad = torch.zeros_like(layer)
    later = WeightGradients()
    with deferrable():
        output = layers(torch.ones(2, size))
    with deferring(later):
        output.sum().backward()
    del output
    with AllocatedBytes() as allocated:
        later.compute()
    assert together * size**2 * 4 <= allocated.peak <= (together + 1) * size**2 * 4
