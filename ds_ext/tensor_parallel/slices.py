"""Slices of sequences: the slice of the current pass, and the keys and values of the slices before it.

With slices, a micro-batch passes through a stage in parts of its sequence. The attention of a slice reads the keys and
values of earlier slices as leaves of its graph, and stores its own. Its backward leaves gradients on these leaves. The
backward of an earlier slice starts from them and from the gradients of its outputs together (arXiv 2406.03488).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ds_ext.errors import ConfigError


@dataclass(frozen=True)
class _Entry:
    """Tensors that one attention has of one slice: leaves that later slices read, and their edges in its graph.

    ``versions`` are those of the leaves, which share the memory of the tensors.
    """

    leaves: tuple[Tensor, ...]
    edges: tuple[GradientEdge | None, ...]
    versions: tuple[int, ...]


class SliceStore:
    """Tensors that the later slices of a micro-batch need at a stage: keys and values, by attention and slice."""

    def __init__(self) -> None:
        self._entries: dict[object, list[_Entry]] = {}

    def extend(
        self, owner: object, index: int, tensors: tuple[Tensor, ...], copy: bool, repeats: bool
    ) -> list[tuple[Tensor, ...]]:
        """Store the tensors of slice ``index``, and return those of the slices before it as leaves.

        A repeated forward stores nothing. Arguments as for :func:`earlier_slices`.
        """
        entries = self._entries.setdefault(owner, [])
        if len(entries) == index:
            edges = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors]
            values = [tensor.detach().clone() if copy else tensor.detach() for tensor in tensors]
            leaves = [v.requires_grad_(t.requires_grad) for v, t in zip(values, tensors, strict=True)]
            entries.append(_Entry(tuple(leaves), tuple(edges), _versions(leaves)))
        elif not repeats:
            raise ConfigError(
                f"sequence_slices: {type(owner).__name__} calls earlier_slices() twice in a forward (got a layer "
                f"that a stage uses twice). Use a layer for each, or remove sequence_slices."
            )
        if any(entry.versions != _versions(entry.leaves) for entry in entries[:index]):
            raise ConfigError(
                f"sequence_slices: tensors of {type(owner).__name__} were changed in place after earlier_slices(). "
                f"Pass copies to it, such as k.clone()."
            )
        return [entry.leaves for entry in entries[:index]]

    def roots(self, index: int) -> list[tuple[GradientEdge, Tensor]]:
        """Return the edges of the tensors of slice ``index`` with the gradients that later slices left, and drop these.

        Slices from ``index`` + 1 on must have been released.
        """
        found = []
        for entries in self._entries.values():
            for leaf, edge in zip(entries[index].leaves, entries[index].edges, strict=True):
                if edge is not None and leaf.grad is not None:
                    found.append((edge, leaf.grad))
                    leaf.grad = None
        return found

    def release(self, index: int) -> None:
        """Drop the tensors of slice ``index``, the last one that is stored."""
        for entries in self._entries.values():
            del entries[index:]

    @property
    def leaves(self) -> list[Tensor]:
        return [leaf for entries in self._entries.values() for entry in entries for leaf in entry.leaves]


def _versions(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple([tensor._version for tensor in tensors])


@dataclass(frozen=True)
class Slice:
    """Slice of a sequence: tokens ``start`` to ``stop`` of the ``total`` of a sample.

    Attributes:
        store: tensors that later slices need.
        trains: a backward follows.
        repeats: this is a backward, in which forwards are recomputed.
    """

    index: int
    start: int
    stop: int
    total: int
    store: SliceStore = field(default_factory=SliceStore, compare=False)
    trains: bool = False
    repeats: bool = False

    @property
    def length(self) -> int:
        return self.stop - self.start


# Not a context variable: autograd also recomputes in other threads.
_current: Slice | None = None


def current_slice() -> Slice | None:
    """Return the slice that the current forward or backward computes; None without slices."""
    return _current


@contextmanager
def computing(slice_: Slice | None) -> Iterator[None]:
    global _current
    previous, _current = _current, slice_
    try:
        yield
    finally:
        _current = previous


def earlier_slices(owner: object, *tensors: Tensor, copy: bool = False) -> list[tuple[Tensor, ...]]:
    """Return the tensors of the earlier slices of this sample, and keep ``tensors`` for the later ones.

    A layer whose tokens read earlier tokens calls it once per forward, for example with keys and values. The result has
    one tuple per earlier slice, in order; it is empty without slices. Gradients reach the slices that the tensors are
    from.

    Args:
        owner: the layer.
        tensors: tensors of this slice, with their graph.
        copy: store copies. With recomputation, a view would keep memory that the graph does not.

    Raises:
        ConfigError: the forward runs without the graph that its backward needs, as in reentrant recomputation; or the
            layer runs twice in a forward, or the tensors were changed afterwards.
    """
    current = _current
    if current is None:
        return []
    if current.trains and not torch.is_grad_enabled():
        raise ConfigError(
            "sequence_slices: earlier_slices() needs the graph of its tensors (got a forward without gradients: of "
            'reentrant recomputation, or in torch.no_grad()). Remove activation_checkpoint_func, set "pipeline": '
            '{"use_reentrant": false}, or freeze parameters with requires_grad_(False) instead.'
        )
    return current.store.extend(owner, current.index, tensors, copy, current.repeats)


def slice_start() -> int:
    """Return the position of the first token of this slice in its sample; 0 without slices."""
    return 0 if _current is None else _current.start
