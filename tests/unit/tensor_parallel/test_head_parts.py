"""The joined loss of the parts of a head, and its gradients, equal torch's cross entropy of the whole head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_ext.tensor_parallel import (
    IGNORE_INDEX,
    HeadPart,
    TensorParallel,
    chunked_loss,
    combine_losses,
    linear_cross_entropy,
)
from tests.allocations import AllocatedBytes

ONE = TensorParallel()
WIDTH = 5


def sample(vocab_size: int, padded: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight with padding rows, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(5)
    hidden_BSD = torch.randn(2, 6, WIDTH, generator=generator, dtype=torch.float64) * scale
    weight_VD = torch.randn(padded, WIDTH, generator=generator, dtype=torch.float64)
    labels_BS = torch.randint(vocab_size, (2, 6), generator=generator)
    labels_BS[0, :2] = labels_BS[-1, -1] = IGNORE_INDEX
    return hidden_BSD, weight_VD, labels_BS


def run_parts(
    hidden_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor, vocab_size: int, parts: int, factor_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of every token, gradient of the hidden states and of the whole weight."""
    heads = [
        HeadPart(nn.Parameter(rows.clone()), i, ONE, vocab_size)
        for i, rows in enumerate(weight_VD.chunk(parts))
    ]
    shares, kept = zip(*[head.partial_loss(hidden_BSD, labels_BS, True) for head in heads], strict=True)
    joined = combine_losses(shares)
    for head, logit_grads in zip(heads, kept, strict=True):
        head.weight_gradients(hidden_BSD, labels_BS, logit_grads, joined.log_sum_exp, factor_N).compute()
    gradient = heads[0].input_gradient(joined, factor_N)
    weight_gradients = [head.get_parameter("weight").grad for head in heads]
    assert all(grad is not None for grad in weight_gradients)
    return joined.loss, gradient, torch.cat([grad for grad in weight_gradients if grad is not None])


@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize(("vocab_size", "padded"), [(16, 16), (11, 16), (3, 16)])
def test_parts_equal_the_whole_head(
    vocab_size: int, padded: int, parts: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last parts have fewer tokens than rows, or only padding."""
    monkeypatch.setattr(chunked_loss, "chunk_tokens", lambda *_: chunk)
    hidden_BSD, weight_VD, labels_BS = sample(vocab_size, padded)
    factor_N = torch.rand(12, dtype=torch.float64).masked_fill(labels_BS.flatten() == IGNORE_INDEX, 0.0)
    found = run_parts(hidden_BSD, weight_VD, labels_BS, vocab_size, parts, factor_N)
    leaves = hidden_BSD.clone().requires_grad_(), weight_VD.clone().requires_grad_()
    logits_NV = F.linear(leaves[0].flatten(0, 1), leaves[1][:vocab_size])
    loss_N = F.cross_entropy(logits_NV, labels_BS.flatten(), reduction="none", ignore_index=IGNORE_INDEX)
    expected = loss_N, *torch.autograd.grad(loss_N @ factor_N, leaves)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_part_is_the_chunked_loss(dtype: torch.dtype) -> None:
    hidden_BSD, weight_VD, labels_BS = (x.to(dtype) if x.is_floating_point() else x for x in sample(11, 16))
    leaves = hidden_BSD.clone().requires_grad_(), weight_VD.clone().requires_grad_()
    total = linear_cross_entropy(*leaves, labels_BS, ONE, 11)
    factor = torch.tensor(0.7, dtype=total.dtype)
    expected = torch.autograd.grad(total * factor, leaves)
    factor_N = factor * (labels_BS.flatten() != IGNORE_INDEX)
    loss_N, *found = run_parts(hidden_BSD, weight_VD, labels_BS, 11, 1, factor_N)
    assert torch.equal(loss_N.sum(), total)
    assert torch.equal(found[0], expected[0])
    # The part rounds the gradients of its logits before they are multiplied by the factor.
    error = (found[1].double() - expected[1].double()).norm() / expected[1].double().norm()
    assert error < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_small_gradients_as_one_part_does(dtype: torch.dtype) -> None:
    """Tokens that are predicted almost surely: the sum of the rows of a part is almost the row of the label."""
    hidden_BSD, weight_VD, _ = sample(16, 16, scale=4.0)
    hidden_BSD, weight_VD = hidden_BSD.to(dtype), weight_VD.to(dtype)
    labels_BS = F.linear(hidden_BSD, weight_VD).argmax(-1)
    (_, *one), (_, *four) = (
        run_parts(hidden_BSD, weight_VD, labels_BS, 16, parts, torch.ones(12)) for parts in (1, 4)
    )
    leaves = hidden_BSD.double().requires_grad_(), weight_VD.double().requires_grad_()
    loss_N = F.cross_entropy(F.linear(*leaves).flatten(0, 1), labels_BS.flatten(), reduction="sum")
    exact = torch.autograd.grad(loss_N, leaves)
    assert exact[0].norm(dim=-1).min() < 2e-3
    for found, whole, expected in zip(four, one, exact, strict=True):
        error, error_of_one = (
            ((x.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max() for x in (found, whole)
        )
        assert error < 1.5 * error_of_one


def test_a_part_in_fp16_keeps_small_probabilities() -> None:
    """A token with a probability of 1e-8, which fp16 rounds to zero, and a loss scale."""
    hidden_BSD, labels_BS = torch.ones(1, 4, 1, dtype=torch.float16), torch.zeros(1, 4, dtype=torch.int64)
    weight_VD = torch.tensor([[0.0], [-18.0], [0.0], [-18.0]], dtype=torch.float16)
    found = run_parts(hidden_BSD, weight_VD, labels_BS, 4, 2, torch.full((4,), 1024.0))[2].double()
    leaf = weight_VD.double().requires_grad_()
    loss_N = F.cross_entropy(F.linear(hidden_BSD.double(), leaf)[0], labels_BS[0], reduction="sum")
    (expected,) = torch.autograd.grad(1024 * loss_N, leaf)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_seen(value: float) -> None:
    hidden_BSD, weight_VD, labels_BS = sample(16, 16)
    hidden_BSD[0, 0], hidden_BSD[1, 1] = value, value  # of an ignored token, and of another one
    loss_N = run_parts(hidden_BSD, weight_VD, labels_BS, 16, 4, torch.ones(12))[0]
    assert loss_N[0] == 0 and not loss_N[7].isfinite() and loss_N.isfinite().sum() == 11


def test_an_evaluation_has_only_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", _refuse)
    hidden_BSD, weight_VD, labels_BS = sample(16, 16)
    share, kept = HeadPart(nn.Parameter(weight_VD[:8]), 0, ONE, 16).partial_loss(hidden_BSD, labels_BS, False)
    assert (
        kept is None
        and share.gradient is None
        and share.label_rows is None
        and share.statistics.shape == (4, 12)
    )


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("an evaluation computed gradients")


def test_a_frozen_part_has_no_weight_gradient() -> None:
    hidden_BSD, weight_VD, labels_BS = sample(16, 16)
    head = HeadPart(nn.Parameter(weight_VD, requires_grad=False), 0, ONE, 16)
    share, kept = head.partial_loss(hidden_BSD, labels_BS, True)
    later = head.weight_gradients(
        hidden_BSD, labels_BS, kept, combine_losses([share]).log_sum_exp, torch.ones(12)
    )
    later.compute()
    assert kept is None and not later.weights and head.weight.grad is None


@pytest.mark.parametrize("step", ["share", "weight"])
def test_a_part_keeps_its_logits_in_half_precision_and_no_copy(step: str) -> None:
    hidden_BSD, labels_BS = torch.randn(4, 256, 8).bfloat16(), torch.randint(4096, (4, 256))
    head = HeadPart(nn.Parameter(torch.randn(2048, 8).bfloat16()), 1, ONE, 4096)
    logits = 4 * 256 * 2048 * 2
    if step == "share":
        with AllocatedBytes() as allocated:
            share, kept = head.partial_loss(hidden_BSD, labels_BS, True)
        assert kept is not None and kept.values.nbytes == logits
    else:
        share, kept = head.partial_loss(hidden_BSD, labels_BS, True)
        joined = combine_losses([share])
        with AllocatedBytes() as allocated:
            head.weight_gradients(hidden_BSD, labels_BS, kept, joined.log_sum_exp, torch.ones(1024)).compute()
        logits = 0
    assert logits <= allocated.peak < logits + 4 * 256 * 2048 * 4 / 4
