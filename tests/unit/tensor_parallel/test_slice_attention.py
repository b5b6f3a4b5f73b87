"""Memory of the attention of slices."""

from __future__ import annotations

import torch

from ds_ext.tensor_parallel import attend_slice
from tests.allocations import AllocatedBytes


def test_the_backward_has_gradients_of_one_block_at_a_time() -> None:
    """Besides the gradients of keys and values: those of the context, the queries, and a block with copied heads."""
    heads, tokens, size, earlier = 8, 64, 8, 6
    q = torch.ones(1, heads, tokens, size, requires_grad=True)
    pairs = [
        tuple(torch.ones(1, 1, tokens, size, requires_grad=True) for _ in range(2))
        for _ in range(earlier + 1)
    ]
    k, v = pairs.pop()
    context = attend_slice(q, k, v, pairs)
    with AllocatedBytes() as allocated:
        context.sum().backward()
    queries, keys = q.nbytes, k.nbytes + v.nbytes
    assert allocated.peak <= 7.5 * queries + (earlier + 1) * keys
    assert allocated.peak >= 6 * queries
