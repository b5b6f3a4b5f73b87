"""Sharded cross entropy in a group of one rank equals torch's without the padding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ds_ext.planner.activations import CHUNKS, LEAST_CHUNK
from ds_ext.recipes.models.gpt import GPTConfig, gpt_loss
from ds_ext.tensor_parallel import IGNORE_INDEX, TensorParallel, loss, vocab_parallel_cross_entropy
from tests.losses import mean

ONE = TensorParallel()
VOCAB, PADDED = 11, 16


def sample(scale: float = 3.0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits_BSV = (torch.randn(2, 6, PADDED, generator=generator) * scale).to(dtype).requires_grad_()
    return logits_BSV, torch.randint(VOCAB, (2, 6), generator=generator)


def torch_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    flat = logits_BSV[..., :VOCAB].float().reshape(-1, VOCAB)
    return F.cross_entropy(flat, labels_BS.reshape(-1), reduction="none").view_as(labels_BS)


@pytest.mark.parametrize("scale", [0.0, 3.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_equal_torch(scale: float, dtype: torch.dtype) -> None:
    logits_BSV, labels_BS = sample(scale, dtype)
    plain_BSV = logits_BSV.detach().clone().requires_grad_()
    token_weights_BS = torch.linspace(0.1, 2.0, 12).view(2, 6)
    loss = vocab_parallel_cross_entropy(logits_BSV, labels_BS, ONE, VOCAB)
    expected = torch_loss(plain_BSV, labels_BS)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    (loss * token_weights_BS).sum().backward()
    (expected * token_weights_BS).sum().backward()
    torch.testing.assert_close(logits_BSV.grad, plain_BSV.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 12])
def test_chunks_change_nothing(dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for chunk in (100, tokens):
        monkeypatch.setattr(loss, "chunk_tokens", lambda *_, chunk=chunk: chunk)
        logits_BSV, labels_BS = sample(dtype=dtype)
        losses_BS = vocab_parallel_cross_entropy(logits_BSV, labels_BS, ONE, VOCAB)
        (losses_BS * torch.arange(12.0).view(2, 6)).sum().backward()
        results.append((losses_BS.detach(), logits_BSV.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("tokens", "columns"), [(1 << 16, 1 << 13), (4096, 1000), (64, 128), (1000, 1 << 19)]
)
def test_the_planner_knows_the_chunks(tokens: int, columns: int) -> None:
    total = 4 * tokens * columns
    planned = max(total / CHUNKS, min(LEAST_CHUNK, total))
    chunk = 4 * columns * min(loss.chunk_tokens(tokens, columns), tokens)
    assert abs(chunk - planned) <= 4 * columns  # of one token


def test_padding_has_no_probability_and_no_gradient() -> None:
    logits_BSV, labels_BS = sample()
    louder_BSV = logits_BSV.detach().clone()
    louder_BSV[..., VOCAB:] = 50.0
    louder_BSV.requires_grad_()
    loss = vocab_parallel_cross_entropy(louder_BSV, labels_BS, ONE, VOCAB)
    assert torch.equal(loss, vocab_parallel_cross_entropy(logits_BSV, labels_BS, ONE, VOCAB))
    loss.sum().backward()
    assert louder_BSV.grad is not None
    assert torch.count_nonzero(louder_BSV.grad[..., VOCAB:]) == 0
    assert torch.count_nonzero(louder_BSV.grad[..., :VOCAB]) == 2 * 6 * VOCAB


def test_the_input_is_left_as_it_was() -> None:
    logits_BSV, labels_BS = sample()
    before = logits_BSV.detach().clone()
    vocab_parallel_cross_entropy(logits_BSV, labels_BS, ONE, VOCAB).sum().backward()
    assert torch.equal(logits_BSV, before)


def test_gpt_loss_sums_the_labels_that_count() -> None:
    config = GPTConfig(1, 8, 2, seq_length=6, vocab_size=VOCAB, make_vocab_size_divisible_by=PADDED)
    loss_fn = gpt_loss(config, ONE)
    logits_BSV, labels_BS = sample()
    torch.testing.assert_close(mean(loss_fn(logits_BSV, labels_BS)), torch_loss(logits_BSV, labels_BS).mean())

    labels_BS[0, :4] = IGNORE_INDEX
    plain_BSV = logits_BSV.detach().clone().requires_grad_()
    flat = plain_BSV[..., :VOCAB].reshape(-1, VOCAB)
    expected = F.cross_entropy(flat, labels_BS.reshape(-1), ignore_index=IGNORE_INDEX)
    loss = mean(loss_fn(logits_BSV, labels_BS))
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(logits_BSV.grad, plain_BSV.grad)

    total, count = loss_fn(logits_BSV, torch.full_like(labels_BS, IGNORE_INDEX))
    assert (total.item(), int(count)) == (0.0, 0)


@pytest.mark.parametrize("bad", [-1, VOCAB, PADDED])
def test_a_label_outside_the_vocabulary_is_an_error(bad: int) -> None:
    logits_BSV, labels_BS = sample()
    labels_BS[1, 2] = bad
    with pytest.raises(IndexError, match=rf"ids: .*0\.\.{VOCAB - 1}"):
        vocab_parallel_cross_entropy(logits_BSV, labels_BS, ONE, VOCAB)
