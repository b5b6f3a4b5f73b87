"""Slices of sequences on a GPU: attention as over the whole sequence, and training as without slices."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ds_ext.tensor_parallel import attend_slice, slice_attention
from tests.engine_runs import LLAMA, UNEQUAL, sliced
from tests.gpu.ranks import gpu_ranks, needs_gpu, train_on_gpu
from tests.gpu.test_precision import BF16

pytestmark = needs_gpu

LENGTHS = (128, 200, 57, 127)


@pytest.mark.parametrize("joined", [0, 300, 8192])
@pytest.mark.parametrize(
    ("dtype", "head_size", "limit"),
    [
        (torch.float32, 64, 1e-5),
        (torch.float32, 20, 1e-5),
        (torch.bfloat16, 64, 2e-2),
        (torch.bfloat16, 20, 2e-2),
    ],
    ids=["fp32", "fp32 odd", "bf16 flash", "bf16 odd"],
)
def test_attention_is_that_of_the_whole_sequence(
    dtype: torch.dtype, head_size: int, limit: float, joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_attention, "_JOINED_TOKENS", joined)
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    shapes = (2, 8, tokens, head_size), (2, 2, tokens, head_size), (2, 2, tokens, head_size)
    whole = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    grad = torch.randn(shapes[0], device="cuda").to(dtype)
    exact = [t.double().requires_grad_() for t in whole]
    q_exact, k_exact, v_exact = exact
    expected = F.scaled_dot_product_attention(q_exact, k_exact, v_exact, is_causal=True, enable_gqa=True)
    expected.backward(grad.double())
    found, earlier = [t.clone().requires_grad_() for t in whole], []
    outputs = []
    for q, k, v in zip(*(t.split(LENGTHS, 2) for t in found), strict=True):
        outputs.append(attend_slice(q, k, v, earlier))
        earlier.append((k, v))
    output = torch.cat(outputs, 2)
    output.backward(grad)
    for one, other in [(output, expected), *((a.grad, b.grad) for a, b in zip(found, exact, strict=True))]:
        assert one is not None and other is not None
        assert (one.double() - other).abs().max() <= limit * other.abs().max()


@pytest.mark.parametrize("section", [{}, BF16], ids=["fp32", "bf16"])
def test_slices_train_as_whole_sequences(section: dict[str, Any]) -> None:
    jobs = [
        sliced("1f1b", 4, (2, 1, 1), model=LLAMA, recompute="full", steps=5, deepspeed=section),
        sliced("zb_v", UNEQUAL, (2, 1, 1), steps=5, deepspeed=section),
    ]
    with gpu_ranks(2) as ranks:
        for job in jobs:
            whole = dataclasses.replace(job, slices=1)
            expected, found = (ranks.run(train_on_gpu, one, timeout_s=180)[0] for one in (whole, job))
            limit = 2e-2 if section else 1e-5
            assert found["losses"] == pytest.approx(expected["losses"], rel=limit)
            assert found["norms"] == pytest.approx(expected["norms"], rel=10 * limit)
            assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=limit)
