"""Causal attention of a slice: a query reads the keys of earlier slices, and those of its slice up to its token.

Each block of keys is one call of a flash kernel, without a mask. The outputs are merged by their log-sum-exp, as in
FlashAttention-2 (arXiv 2307.08691, section 3.1). Nothing is concatenated, so the keys and values that later slices read
are stored once. A backward passes the merged output and log-sum-exp to the kernel of every block.

Shapes: B samples, N heads, G key and value heads, S tokens of the slice, T tokens of a block, H head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_aten = torch.ops.aten
_LSE_ALIGNMENT = 32  # of the memory-efficient kernel's log-sum-exp


def attend_slice(q_BNSH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, earlier: list[tuple[Tensor, ...]]) -> Tensor:
    """Return context_BNSH of a slice.

    Args:
        q_BNSH: queries of this slice.
        k_BGSH: keys of this slice; G divides N.
        v_BGSH: values of this slice.
        earlier: (k_BGTH, v_BGTH) of every earlier slice.
    """
    return _SliceAttention.apply(q_BNSH, k_BGSH, v_BGSH, *(tensor for pair in earlier for tensor in pair))


class _SliceAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *earlier: Tensor) -> Tensor:
        blocks = [(k, v), *zip(earlier[::2], earlier[1::2], strict=True)]
        out, lse, *ctx.random = _forward(q, *_expanded(q, k, v), causal=True)
        if len(blocks) > 1:
            out = out.to(lse.dtype)
        for block in blocks[1:]:
            block_out, block_lse, *_ = _forward(q, *_expanded(q, *block), causal=False)
            merged = torch.logaddexp(lse, block_lse)
            out = out * (lse - merged).exp_().unsqueeze(-1)
            out += block_out * (block_lse - merged).exp_().unsqueeze(-1)
            lse = merged
        out = out.to(q.dtype)
        ctx.save_for_backward(q, out, lse, *(tensor for block in blocks for tensor in block))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, out, lse, *tensors = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_q: Tensor | None = None
        of_blocks: list[Tensor] = []
        for k, v in zip(tensors[::2], tensors[1::2], strict=True):
            expanded = _expanded(q, k, v)
            of_q, of_k, of_v = _backward(grad, q, *expanded, out, lse, ctx.random, causal=not of_blocks)
            grad_q = of_q if grad_q is None else grad_q.add_(of_q)
            of_blocks += (_reduced(of_k, k), _reduced(of_v, v))
        assert grad_q is not None
        return grad_q, *of_blocks


def _expanded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v with the heads of q."""
    copies = q.size(1) // k.size(1)
    return (k, v) if copies == 1 else (k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1))


def _reduced(grad: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of a tensor whose heads :func:`_expanded` has copied."""
    return grad if grad.size(1) == like.size(1) else grad.unflatten(1, (like.size(1), -1)).sum(2)


def _is_flash(q: Tensor) -> bool:
    """Return whether a GPU's flash kernel supports the queries; its memory-efficient one supports the others."""
    return q.dtype in (torch.float16, torch.bfloat16) and q.size(-1) % 8 == 0


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """Return (out_BNSH, lse_BNS) of one block, and on GPUs the state of a dropout that draws nothing."""
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if _is_flash(q):
        out, lse, _, _, _, _, *random, _ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse, *random
    out, lse, *random = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return out, lse[..., : q.size(2)], *random


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    random: list[Tensor],
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of one block, for the output and log-sum-exp of all blocks."""
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal
        )
    if _is_flash(q):
        lengths = (None, None, q.size(2), k.size(2))
        return _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, *lengths, 0.0, causal, *random
        )
    tokens = -(-q.size(2) // _LSE_ALIGNMENT) * _LSE_ALIGNMENT
    padded = torch.nn.functional.pad(lse, (0, tokens - q.size(2)), value=float("inf"))
    of_q, of_k, of_v, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, padded, *random, 0.0, (True, True, True, False), causal
    )
    return of_q, of_k, of_v
