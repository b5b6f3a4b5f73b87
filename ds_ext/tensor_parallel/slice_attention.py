"""Causal attention of a slice: a query reads the keys of earlier slices, and those of its slice up to its token.

Each block of keys is one call of the kernel that torch would choose, without a mask. The outputs are merged by their
log-sum-exp, as in FlashAttention-2 (arXiv 2307.08691, section 3.1). No joined keys outlive the call, so the keys and
values that later slices read are stored once. A backward passes the merged output and log-sum-exp to the kernel of
every block.

Shapes: B samples, N heads, G key and value heads, S tokens of the slice, T tokens of a block, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

_aten = torch.ops.aten
_Three = tuple[Tensor, Tensor, Tensor]
_GROUPED = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
)  # kernels for fewer heads of keys than of queries
_JOINED_TOKENS = 8192  # of a block: with fewer, GPUs wait for the kernels' launches
_LSE_ALIGNMENT = 32  # of the memory-efficient kernel's log-sum-exp
_HEAD_ALIGNMENT = 8  # of the head size, in elements, for the kernels of GPUs


def attend_slice(q_BNSH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, earlier: list[tuple[Tensor, ...]]) -> Tensor:
    """Return context_BNSH of a slice.

    Args:
        q_BNSH: queries of this slice.
        k_BGSH: keys of this slice; G divides N.
        v_BGSH: values of this slice.
        earlier: (k_BGTH, v_BGTH) of every earlier slice.
    """
    size = q_BNSH.size(-1)
    tensors = [q_BNSH, k_BGSH, v_BGSH, *(tensor for pair in earlier for tensor in pair)]
    padding = -size % _HEAD_ALIGNMENT
    if padding and q_BNSH.device.type != "cpu":
        tensors = [torch.nn.functional.pad(tensor, (0, padding)) for tensor in tensors]
    return _SliceAttention.apply(size**-0.5, *tensors)[..., :size]


class _SliceAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: float, q: Tensor, *keys_and_values: Tensor) -> Tensor:
        blocks = _blocks(keys_and_values)
        ctx.kernel = kernel = _kernel(q)
        ctx.scale = scale
        out, lse, *ctx.random = _forward(kernel, _inputs(kernel, q, blocks[0]), True, scale)
        if len(blocks) > 1:
            out = out.to(lse.dtype)
        for block in blocks[1:]:
            block_out, block_lse, *_ = _forward(kernel, _inputs(kernel, q, block), False, scale)
            merged = torch.logaddexp(lse, block_lse)
            out = out * (lse - merged).exp_().unsqueeze(-1)
            out += block_out * (block_lse - merged).exp_().unsqueeze(-1)
            lse = merged
        out = out.to(q.dtype)
        ctx.save_for_backward(q, out, lse, *keys_and_values)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, out, lse, *keys_and_values = ctx.saved_tensors
        merged = grads[0].contiguous(), out, lse
        grad_q: Tensor | None = None
        grads_kv: list[Tensor] = []
        for block in _blocks(keys_and_values):
            is_own = grad_q is None  # the first block is this slice, with causal attention
            block_grad_q, *block_grads_kv = _block_gradients(ctx, q, block, merged, is_own)
            grad_q = block_grad_q if grad_q is None else grad_q.add_(block_grad_q)
            grads_kv += block_grads_kv
            del block_grad_q, block_grads_kv  # before those of the next block exist
        assert grad_q is not None
        return None, grad_q, *grads_kv


def _block_gradients(
    ctx: Any, q: Tensor, block: list[tuple[Tensor, Tensor]], merged: _Three, causal: bool
) -> list[Tensor]:
    """Return the gradients of q, and of k and v of every pair in a block. Arguments as for :func:`_backward`."""
    inputs = _inputs(ctx.kernel, q, block)
    grad_q, *grads_kv = _backward(ctx.kernel, inputs, merged, ctx.random, causal, ctx.scale)
    grad_k, grad_v = (_reduced(grad, block[0][0]) for grad in grads_kv)
    grads, lengths = [grad_q], [k.size(2) for k, _ in block]
    for pair in zip(grad_k.split(lengths, 2), grad_v.split(lengths, 2), strict=True):
        grads += [grad.clone() for grad in pair] if len(block) > 1 else pair
    return grads


def _blocks(keys_and_values: Sequence[Tensor]) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the pairs (k, v) of every block: this slice, then earlier slices, on GPUs several short ones together."""
    own, *earlier = zip(keys_and_values[::2], keys_and_values[1::2], strict=True)
    limit = 0 if own[0].device.type == "cpu" else _JOINED_TOKENS
    blocks, tokens = [[own]], limit
    for pair in earlier:
        if tokens + pair[0].size(2) > limit:
            blocks.append([])
            tokens = 0
        blocks[-1].append(pair)
        tokens += pair[0].size(2)
    return blocks


def _inputs(kernel: SDPBackend | None, q: Tensor, block: Sequence[tuple[Tensor, Tensor]]) -> _Three:
    """Return q, k and v of a block, with heads as the kernel needs them."""
    k, v = block[0] if len(block) == 1 else (torch.cat(tensors, 2) for tensors in zip(*block, strict=True))
    copies = q.size(1) // k.size(1)
    if copies == 1 or kernel in _GROUPED:
        return q, k, v
    return q, k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)


def _reduced(grad: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of a tensor whose heads :func:`_inputs` has copied."""
    return grad if grad.size(1) == like.size(1) else grad.unflatten(1, (like.size(1), -1)).sum(2)


def _kernel(q: Tensor) -> SDPBackend | None:
    """Return the kernel that torch chooses for these queries without a mask; None: the one of CPUs."""
    if q.device.type == "cpu":
        return None
    chosen = _aten._fused_sdp_choice(q, q, q, None, 0.0, True)
    return next((kernel for kernel in _GROUPED if kernel.value == chosen), SDPBackend.EFFICIENT_ATTENTION)


def _forward(kernel: SDPBackend | None, block: _Three, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Return (out_BNSH, lse_BNS) of one block, and on GPUs the state of a dropout that draws nothing.

    ``block`` has queries, keys and values; ``causal``: the keys are those of the queries' tokens.
    """
    if kernel is None:
        return _aten._scaled_dot_product_flash_attention_for_cpu(*block, 0.0, causal, scale=scale)
    if kernel == SDPBackend.EFFICIENT_ATTENTION:
        out, lse, *random = _aten._scaled_dot_product_efficient_attention(
            *block, None, True, 0.0, causal, scale=scale
        )
        return out, lse[..., : out.size(2)], *random
    if kernel == SDPBackend.FLASH_ATTENTION:
        outputs = _aten._scaled_dot_product_flash_attention(*block, 0.0, causal, scale=scale)
    else:
        outputs = _aten._scaled_dot_product_cudnn_attention(*block, None, True, 0.0, causal, scale=scale)
    out, lse, _, _, _, _, *random, _ = outputs
    return out, lse.view(out.shape[:3]), *random


def _backward(
    kernel: SDPBackend | None, block: _Three, merged: _Three, random: list[Tensor], causal: bool, scale: float
) -> _Three:
    """Return the gradients of a block of :func:`_forward`, from (grad_BNSH, out_BNSH, lse_BNS) of all blocks."""
    grad, out, lse = merged
    if kernel is None:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *block, out, lse, 0.0, causal, scale=scale
        )
    if kernel == SDPBackend.EFFICIENT_ATTENTION:
        padding = -lse.size(2) % _LSE_ALIGNMENT
        lse = torch.nn.functional.pad(lse, (0, padding), value=float("inf"))
        grad_q, grad_k, grad_v, _ = _aten._scaled_dot_product_efficient_attention_backward(
            grad, *block, None, out, lse, *random, 0.0, (True, True, True, False), causal, scale=scale
        )
        return grad_q, grad_k, grad_v
    lengths = (None, None, block[0].size(2), block[1].size(2))
    if kernel == SDPBackend.FLASH_ATTENTION:
        return _aten._scaled_dot_product_flash_attention_backward(
            grad, *block, out, lse, *lengths, 0.0, causal, *random, scale=scale
        )
    return _aten._scaled_dot_product_cudnn_attention_backward(
        grad, *block, out, lse.unsqueeze(-1), *random, None, *lengths, 0.0, causal, scale=scale
    )
