"""Exact peak of allocated tensor memory on the CPU, for which torch keeps no statistics."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class AllocatedBytes(TorchDispatchMode):
    """Peak of the bytes in storages that operations of this thread allocated in this context and that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Older storages, of which the result may be a view. Tensors of messages are resized; nothing allocates them.
        self._see((args, kwargs), counts=func is torch.ops.aten.resize_.default)
        result = func(*args, **(kwargs or {}))
        self._see(result, counts=True)
        return result

    def _see(self, tree: Any, counts: bool) -> None:
        for tensor in pytree.tree_leaves(tree):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._seen:
                storage = tensor.untyped_storage()
                size = storage.nbytes() if counts and not tensor.is_meta else 0
                self._seen.add(storage._cdata)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, storage._cdata, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size
