"""The chunked loss of a linear head equals torch's cross entropy of its logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_ext.errors import ConfigError
from ds_ext.recipes.models.gpt import GPTConfig, gpt_layer_specs, gpt_loss
from ds_ext.tensor_parallel import (
    IGNORE_INDEX,
    ChunkedHead,
    DropoutClock,
    TensorParallel,
    WeightGradients,
    chunked_loss,
    deferrable,
    deferring,
    linear_cross_entropy,
)
from tests.allocations import AllocatedBytes

ONE = TensorParallel()
VOCAB, PADDED, WIDTH = 11, 16, 5


@pytest.fixture(params=[1, 4, 1000])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(chunked_loss, "chunk_tokens", lambda *_: request.param)
    return request.param


def sample(
    dtype: torch.dtype = torch.float64, shape: tuple[int, int] = (2, 6)
) -> tuple[Tensor, nn.Parameter, Tensor]:
    """Hidden states, weight with padding rows, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(5)
    hidden_BSD = torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    weight_VD = torch.randn(PADDED, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    labels_BS = torch.randint(VOCAB, shape, generator=generator)
    if labels_BS.numel() > 1:
        labels_BS[0, :2] = labels_BS[-1, -1] = IGNORE_INDEX
    return hidden_BSD.requires_grad_(), nn.Parameter(weight_VD), labels_BS


def torch_loss(hidden_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor) -> Tensor:
    logits_BSV = F.linear(hidden_BSD, weight_VD[:VOCAB])
    return F.cross_entropy(
        logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum", ignore_index=IGNORE_INDEX
    )


def gradients(loss: Tensor, *tensors: Tensor, factor: float = 0.3) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss * factor, tensors)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize("shape", [(2, 6), (1, 1)])
def test_loss_and_gradients_equal_torch(
    dtype: torch.dtype, tolerance: float, shape: tuple[int, int], chunk: int
) -> None:
    hidden_BSD, weight_VD, labels_BS = sample(dtype, shape)
    loss = linear_cross_entropy(hidden_BSD, weight_VD, labels_BS, ONE, VOCAB)
    expected = torch_loss(hidden_BSD, weight_VD, labels_BS)
    assert loss.dtype == dtype
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(loss, expected, **close)
    found = gradients(loss, hidden_BSD, weight_VD)
    torch.testing.assert_close(found, gradients(expected, hidden_BSD, weight_VD), **close)
    assert torch.count_nonzero(found[1][VOCAB:]) == 0
    ignored_BS = labels_BS == IGNORE_INDEX
    assert torch.count_nonzero(found[0][ignored_BS]) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_fp32(dtype: torch.dtype, chunk: int) -> None:
    hidden_BSD, weight_VD, labels_BS = sample(dtype)
    loss = linear_cross_entropy(hidden_BSD, weight_VD, labels_BS, ONE, VOCAB)
    logits_BSV = F.linear(hidden_BSD, weight_VD[:VOCAB]).float()
    expected = F.cross_entropy(
        logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum", ignore_index=IGNORE_INDEX
    )
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    # The loss scale exceeds the range of fp16, the gradients do not.
    found = gradients(loss / 2**17, hidden_BSD, weight_VD, factor=2.0**17)
    for ours, reference in zip(found, gradients(expected, hidden_BSD, weight_VD, factor=1.0), strict=True):
        torch.testing.assert_close(ours, reference, rtol=0.02, atol=0.02)


def test_all_labels_may_be_ignored(chunk: int) -> None:
    hidden_BSD, weight_VD, labels_BS = sample()
    ignored_BS = torch.full_like(labels_BS, IGNORE_INDEX)
    loss = linear_cross_entropy(hidden_BSD, weight_VD, ignored_BS, ONE, VOCAB)
    assert loss.item() == 0.0
    assert not any(map(torch.count_nonzero, gradients(loss, hidden_BSD, weight_VD)))


@pytest.mark.parametrize("bad", [-1, VOCAB, PADDED])
def test_a_label_outside_the_vocabulary_is_an_error(bad: int) -> None:
    hidden_BSD, weight_VD, labels_BS = sample()
    labels_BS[1, 2] = bad
    with pytest.raises(IndexError, match=rf"ids: .*0\.\.{VOCAB - 1}"):
        linear_cross_entropy(hidden_BSD, weight_VD, labels_BS, ONE, VOCAB)


def test_the_second_half_computes_the_weight_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_BSD, weight_VD, labels_BS = sample()
    expected = gradients(torch_loss(hidden_BSD, weight_VD, labels_BS), hidden_BSD, weight_VD, factor=1.0)
    computed = []
    original = chunked_loss._weight_gradient
    monkeypatch.setattr(chunked_loss, "_weight_gradient", lambda *args: computed.append(1) or original(*args))
    with deferrable():
        loss = linear_cross_entropy(hidden_BSD, weight_VD, labels_BS, ONE, VOCAB)
    later = WeightGradients()
    with deferring(later):
        loss.backward()
    torch.testing.assert_close(hidden_BSD.grad, expected[0])
    assert weight_VD.grad is None and not computed and later.weights == {id(weight_VD)}
    later.compute()
    assert weight_VD.grad is not None and computed
    torch.testing.assert_close(weight_VD.grad, expected[1])


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_what_is_frozen_is_not_computed(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_BSD, weight_VD, labels_BS = sample()
    expected = torch_loss(hidden_BSD, weight_VD, labels_BS)
    (hidden_BSD if frozen == "hidden" else weight_VD).requires_grad_(False)
    trained = weight_VD if frozen == "hidden" else hidden_BSD
    products = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: products.append(1) or mm(*args, **kwargs))
    for context in (deferrable(), torch.enable_grad()):
        with context:
            loss = linear_cross_entropy(hidden_BSD, weight_VD, labels_BS, ONE, VOCAB)
        later = WeightGradients()
        trained.grad = None
        with deferring(later):
            loss.backward()
        later.compute()
        torch.testing.assert_close(loss.detach(), expected.detach())
        assert trained.grad is not None and (weight_VD.grad is None) == (frozen == "weight")
    assert len(products) == 2
    with torch.no_grad():
        linear_cross_entropy(hidden_BSD, weight_VD, labels_BS, ONE, VOCAB)
    assert len(products) == 2, "an evaluation computed gradients"


def test_a_changed_weight_is_found() -> None:
    hidden_BSD, weight_VD, labels_BS = sample()
    loss = linear_cross_entropy(hidden_BSD, weight_VD, labels_BS, ONE, VOCAB)
    with torch.no_grad():
        weight_VD.add_(1.0)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_autocast_computes_both_passes_in_its_dtype() -> None:
    hidden_BSD, weight_VD, labels_BS = sample(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden_BSD, weight_VD, labels_BS, ONE, VOCAB)
    found = gradients(loss, hidden_BSD, weight_VD)
    half = hidden_BSD.bfloat16(), weight_VD.bfloat16()
    expected = linear_cross_entropy(*half, labels_BS, ONE, VOCAB)
    assert torch.equal(loss, expected)
    assert all(map(torch.equal, found, gradients(expected, hidden_BSD, weight_VD)))


def test_no_tensor_has_all_logits() -> None:
    """The peak of a step is below the bytes of the logits."""
    hidden_BSD = torch.randn(4, 256, 8, requires_grad=True)
    weight_VD, labels_BS = nn.Parameter(torch.randn(4096, 8)), torch.randint(4096, (4, 256))
    with AllocatedBytes() as allocated:
        linear_cross_entropy(hidden_BSD, weight_VD, labels_BS, ONE, 4096).backward()
    assert allocated.peak < 4 * 256 * 4096 * 4 / 4


@pytest.mark.parametrize("untied", [False, True])
def test_the_head_of_a_gpt_needs_its_loss_function(untied: bool) -> None:
    sizes: dict[str, Any] = {"seq_length": 6, "vocab_size": VOCAB, "make_vocab_size_divisible_by": PADDED}
    config = GPTConfig(1, 8, 2, **sizes, chunked_loss=True, untie_embeddings_and_output_weights=untied)
    with pytest.raises(ValueError, match="chunked_loss"):
        gpt_layer_specs(config, ONE, DropoutClock())
    loss_fn = gpt_loss(config, ONE)
    spec = gpt_layer_specs(config, ONE, DropoutClock(), loss_fn.chunked)[-1]
    layer = spec.build()
    head = layer if untied else lambda x: spec.forward_fn(layer, x)
    weight_VD = layer.weight if untied else layer.word_embeddings.weight
    hidden_BSD, labels_BS = torch.randn(2, 6, 8), sample()[2]
    outputs = head(hidden_BSD)
    torch.testing.assert_close(loss_fn.return_logits(outputs), F.linear(hidden_BSD, weight_VD))
    total, count = loss_fn(outputs, labels_BS)
    torch.testing.assert_close(total, torch_loss(hidden_BSD, weight_VD, labels_BS))
    assert int(count) == 9


def test_a_head_without_a_forward_is_refused() -> None:
    hidden_BSD, labels_BS = torch.zeros(1, 2, 4), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ConfigError, match="chunked_loss"):
        ChunkedHead(TensorParallel()).loss(hidden_BSD, labels_BS, 3)
