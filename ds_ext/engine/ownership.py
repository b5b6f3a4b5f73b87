"""Whether what a stage gives is out of everybody's reach, so that it can be sent while this rank computes on.

A gradient may share its memory with that of a parameter, an output with a batch that its reader fills anew, and a
module may keep what it has returned. Nothing of that can be seen by looking at the stage; references can be counted.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Smaller messages are copied at once anyway.
_LARGE_BYTES = 4 << 20


def out_of_reach(tensors: Sequence[Tensor]) -> bool:
    """Whether only this sequence leads to the memory of its tensors, one of which is large; False where unknown.

    Memory that torch did not take for itself (of numpy, of another process, of a received message) is within reach of
    others, and what autograd or a module has kept counts as well. The caller may have the sequence, but none of its
    tensors.
    """
    if any(tensor.layout != torch.strided or tensor.device.type != "cpu" for tensor in tensors):
        return False
    if all(tensor.nbytes < _LARGE_BYTES for tensor in tensors) or _ALONE is None:
        return False
    owned = all(tensor.untyped_storage().resizable() and not tensor.is_shared() for tensor in tensors)
    return owned and all(references == _ALONE for references in _references(tensors))


def _references(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """By tensor, the references to it and to its storage: Python's, weak ones, and torch's own."""
    return [(sys.getrefcount(tensor), weakref.getweakrefcount(tensor), *_uses(tensor)) for tensor in tensors]


def _uses(tensor: Any) -> tuple[int, ...]:
    storage = tensor.untyped_storage()
    uses = torch._C._storage_Use_Count(storage._cdata)
    return tensor._use_count(), uses, sys.getrefcount(storage), weakref.getweakrefcount(storage)


_ALONE: tuple[int, ...] | None = None
with contextlib.suppress(AttributeError):  # of a torch that does not tell
    # As this torch and this Python count a tensor that nobody else has.
    _ALONE = _references((torch.empty(1),))[0]
