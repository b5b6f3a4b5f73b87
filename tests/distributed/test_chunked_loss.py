"""A chunked loss trains to the losses and weights of whole logits, on all layouts, and evaluates to the same logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_ext.tensor_parallel import (
    IGNORE_INDEX,
    HeadPart,
    TensorParallel,
    combine_losses,
    enter_tensor_parallel,
    linear_cross_entropy,
    project_logits,
    vocab_parallel_cross_entropy,
)
from tests.engine_runs import MODEL, Job, StepBatches, batches_of, build, train
from tests.precisions import is_supported
from tests.ranks import Ranks
from tests.selection import EVERYTHING, cover

# --- function ---


def loss_equals_whole_logits(rank: int, vocab_size: int, padded: int, sequence_parallel: bool) -> None:
    """Loss, gradient of this rank's hidden states and of its weight, in fp64."""
    size = dist.get_world_size()
    tp = TensorParallel(rank, size, dist.group.WORLD)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 8, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(padded, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocab_size, (2, 8), generator=generator)
    labels[0, :3] = IGNORE_INDEX

    def leaves() -> tuple[Tensor, Tensor]:
        mine = tp.shard(hidden, 1) if sequence_parallel else hidden
        return mine.clone().requires_grad_(), tp.shard(weight, 0).clone().requires_grad_()

    x, w = leaves()
    total = linear_cross_entropy(enter_tensor_parallel(x, tp, sequence_parallel), w, labels, tp, vocab_size)
    (total * 0.7).backward()
    x0, w0 = leaves()
    logits = project_logits(x0, w0, tp, sequence_parallel)
    expected = vocab_parallel_cross_entropy(logits, labels, tp, vocab_size).sum()
    (expected * 0.7).backward()
    for ours, theirs in ((total, expected), (x.grad, x0.grad), (w.grad, w0.grad)):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("vocab_size", "padded"), [(32, 32), (27, 32), (5, 32)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_sharded_loss(ranks: Ranks, size: int, vocab_size: int, padded: int, sequence_parallel: bool) -> None:
    ranks(size).run(loss_equals_whole_logits, vocab_size, padded, sequence_parallel)


def parts_equal_whole_logits(rank: int, vocab_size: int, padded: int, sequence_parallel: bool) -> None:
    """Joined loss of four parts, gradients of this rank's hidden states and of its rows of every part, in fp64."""
    size, parts = dist.get_world_size(), 4
    tp = TensorParallel(rank, size, dist.group.WORLD)
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (
        torch.randn(*shape, 6, generator=generator, dtype=torch.float64) for shape in ((2, 8), (padded,))
    )
    labels = torch.randint(vocab_size, (2, 8), generator=generator)
    labels[0, :3] = IGNORE_INDEX
    factor = torch.rand(16, generator=generator, dtype=torch.float64)
    factor = factor.masked_fill(labels.flatten() == IGNORE_INDEX, 0.0)

    x = tp.shard(hidden, 1) if sequence_parallel else hidden
    heads = [
        HeadPart(nn.Parameter(tp.shard(rows, 0).clone()), part, tp, vocab_size, sequence_parallel)
        for part, rows in enumerate(weight.chunk(parts))
    ]
    shares, kept = zip(*[head.partial_loss(x, labels, True) for head in heads], strict=True)
    joined = combine_losses(shares)
    x_grad = heads[0].input_gradient(joined, factor)
    for head, logit_grads in zip(heads, kept, strict=True):
        head.weight_gradients(x, labels, logit_grads, joined.log_sum_exp, factor).compute()

    x0, w0 = x.clone().requires_grad_(), weight.clone().requires_grad_()
    whole = enter_tensor_parallel(x0, tp, sequence_parallel)
    logits = nn.functional.linear(whole.flatten(0, 1), w0[:vocab_size])
    expected = nn.functional.cross_entropy(
        logits, labels.flatten(), reduction="none", ignore_index=IGNORE_INDEX
    )
    (expected @ factor / size).backward()  # every rank adds the whole gradient
    torch.testing.assert_close(joined.loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x_grad, x0.grad, rtol=1e-12, atol=1e-12)
    assert w0.grad is not None
    for head, rows in zip(heads, w0.grad.chunk(parts), strict=True):
        torch.testing.assert_close(head.weight.grad, tp.shard(rows, 0) * size, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("vocab_size", "padded"), [(32, 32), (27, 32), (5, 32)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_sharded_parts(ranks: Ranks, vocab_size: int, padded: int, sequence_parallel: bool) -> None:
    ranks(2).run(parts_equal_whole_logits, vocab_size, padded, sequence_parallel)


# --- engine ---


@dataclass(frozen=True)
class Case:
    """Settings that the loss may depend on."""

    schedule: str
    tensor: str
    slices: int
    untied: bool
    recompute: Any
    precision: str

    def job(self, chunked: bool) -> Job:
        model = replace(
            MODEL,
            untie_embeddings_and_output_weights=self.untied,
            recompute=self.recompute,
            sequence_parallel=self.tensor == "sequence",
            chunked_loss=chunked,
        )
        half: dict[str, Any] = {} if self.precision == "fp32" else {self.precision: {"enabled": True}}
        if self.precision == "fp16":
            half["fp16"]["loss_scale"] = 1024
        tp = 1 if self.tensor == "none" else 2
        options: dict[str, Any] = {"deepspeed": half, "slices": self.slices}
        return Job(self.schedule, 2, tp, 1, 4, model, 3, **options)


def factors(case: Case) -> tuple[Any, ...]:
    return tuple(vars(case).values())


CASES = cover(
    [
        Case(*values)
        for values in product(
            ("1f1b", "zb_v", "bitpipe_zb"),
            ("none", "tensor", "sequence"),
            (1, 2),
            (False, True),
            ("none", "selective", "full"),
            ("fp32", *(name for name in ("bf16", "fp16") if is_supported(name))),
        )
        if values[2] == 1 or values[0] != "bitpipe_zb"
    ],
    2 if EVERYTHING else 1,
    factors,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, factors(case))))
def test_trains_as_with_whole_logits(ranks: Ranks, case: Case) -> None:
    pool = ranks(case.job(True).world_size)
    chunked, whole = (pool.run(train, case.job(one), timeout_s=120) for one in (True, False))
    tolerance = 1e-6 if case.precision == "fp32" else 1e-2
    for ours, theirs in zip(chunked, whole, strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=tolerance)
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=tolerance)
        assert ours["weights"].keys() == theirs["weights"].keys()
        for name, weight in ours["weights"].items():
            torch.testing.assert_close(weight, theirs["weights"][name], rtol=tolerance, atol=tolerance)


def logits_and_losses(rank: int, job: Job) -> Any:
    engine, _ = build(job)
    batches = batches_of(job)
    loss, logits = engine.eval_batch(StepBatches(batches), return_logits=True)
    outputs = engine.eval_batch(StepBatches(batches), compute_loss=False, reduce_output=None)
    engine.transport.close()
    return float(loss), logits, outputs


@pytest.mark.parametrize(("slices", "tensor"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_evaluations_return_logits(ranks: Ranks, slices: int, tensor: int) -> None:
    sequence = replace(MODEL, sequence_parallel=tensor > 1)
    jobs = [
        Job("1f1b", 2, tensor, 1, 4, replace(sequence, chunked_loss=chunked), 1, slices=slices)
        for chunked in (True, False)
    ]
    ours, theirs = (ranks(job.world_size).run(logits_and_losses, job) for job in jobs)
    for one, other in zip(ours, theirs, strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-6)
        torch.testing.assert_close(one[1:], other[1:])
    vocabulary = MODEL.vocab_size // tensor
    assert ours[-1][1][0].shape == (2, MODEL.seq_length, vocabulary)
