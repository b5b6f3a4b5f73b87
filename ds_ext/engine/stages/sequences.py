"""Sequences of the micro-batches in flight: whole, or in slices whose earlier ones keep tensors for the later ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...parallel.slices import slice_bounds
from ...planner.job_plan import JobPlan
from ...tensor_parallel import Slice, SliceStore, computing
from ..losses.local import Loss, require_pairs
from ..module import PipelineModule
from ..types import Batch
from .slice_trial import copies, cut, num_tokens, try_layers, try_loss

Labels = tuple[Tensor, ...] | None
Start = tuple[list[tuple[GradientEdge, Tensor]], list[Tensor]]  # of a backward, and leaves
Compute = Callable[[Batch, Labels], Loss]
Shift = Callable[[Batch], Batch]


class Sequences:
    """Sequences of the micro-batches of a step, cut into ``count`` slices: here into one."""

    count = 1

    def clear(self) -> None:
        """Drop the slices of a step that failed."""

    def copy_empty(self) -> Sequences:
        """Return the same for other micro-batches in flight, whose layers were tried."""
        return self

    def cut(self, tensors: tuple[Tensor, ...], slice_index: int) -> tuple[Tensor, ...]:
        """Return a slice of the data of a micro-batch: of the tensors whose dimension 1 is the sequence."""
        return tensors

    def shift_before_cut(self, shift: Shift, labels: Batch) -> Batch:
        """Return the labels to cut slices from. Those of whole sequences are not shifted here: the loss does it."""
        return labels

    def shift_after_cut(self, shift: Shift, labels: Tensor) -> Tensor:
        return shift(labels)

    def forward(
        self, stage: int, micro_batch: int, slice_index: int, inputs: tuple[Tensor, ...]
    ) -> AbstractContextManager[None]:
        """Context of the forward of a slice, and of its loss."""
        return nullcontext()

    def loss(self, compute: Compute, outputs: Batch, labels: Labels) -> Loss:
        return compute(outputs, labels)

    def computing(self, tokens: int, slice_index: int) -> AbstractContextManager[None]:
        """Context of the loss of a slice, of ``tokens`` tokens, outside of :meth:`forward`."""
        return nullcontext()

    def backward(self, stage: int, micro_batch: int, slice_index: int) -> AbstractContextManager[Start]:
        """Context of the backward of a slice: what it starts from beside its outputs, and the leaves of its graph."""
        return _NOTHING_MORE


WholeSequences = Sequences
_NOTHING_MORE: AbstractContextManager[Start] = nullcontext(([], []))


def sequences_of(module: PipelineModule, plan: JobPlan) -> Sequences:
    settings = plan.settings
    if settings.sequence_slices == 1:
        return Sequences()
    shards = plan.layout.tensor_parallel_size if settings.sequence_parallel else 1
    return SlicedSequences(module, settings.sequence_slices, settings.slice_lengths, shards)


class SlicedSequences(Sequences):
    """Sequences in several slices.

    Args:
        lengths: tokens of every slice; "equal": those of any sequence.
        shards: ranks over which sequence parallelism distributes the tokens between stages.
    """

    def __init__(self, module: PipelineModule, count: int, lengths: str | Sequence[int], shards: int) -> None:
        self.count, self._module, self._lengths, self._shards = count, module, lengths, shards
        self._live: dict[tuple[int, int], list[Slice]] = {}  # (stage, micro-batch) -> slices, with one store
        self._tried: set[int] = set()
        self._loss_tried = False

    def clear(self) -> None:
        self._live.clear()

    def copy_empty(self) -> SlicedSequences:
        copy = SlicedSequences(self._module, self.count, self._lengths, self._shards)
        copy._tried, copy._loss_tried = self._tried, True
        return copy

    def cut(self, tensors: tuple[Tensor, ...], slice_index: int) -> tuple[Tensor, ...]:
        # Copies, because a layer that changes one in place would change what other slices read.
        tokens = num_tokens(tensors)
        return copies(cut(tensors, tokens, *self._bounds(tokens)[slice_index]))

    def _bounds(self, tokens: int) -> list[tuple[int, int]]:
        return slice_bounds(tokens, self.count, self._lengths, self._shards)

    def shift_before_cut(self, shift: Shift, labels: Batch) -> Batch:
        return shift(labels)

    def shift_after_cut(self, shift: Shift, labels: Tensor) -> Tensor:
        return labels  # those of the whole sample were shifted before the cut

    @contextmanager
    def forward(
        self, stage: int, micro_batch: int, slice_index: int, inputs: tuple[Tensor, ...]
    ) -> Iterator[None]:
        live = self._live.setdefault((stage, micro_batch), [])
        if not live:
            live += self.slices_of(num_tokens(inputs) * (self._shards if stage else 1))
            if stage not in self._tried:
                self._tried.add(stage)
                try_layers(self._module, stage, inputs, self._shards)
        with computing(live[slice_index]):
            yield
        if not torch.is_grad_enabled() and slice_index == self.count - 1:
            del self._live[stage, micro_batch]

    def slices_of(self, tokens: int) -> list[Slice]:
        """Return the slices of a sample, with one store, of which one has this number of tokens."""
        total = tokens * self.count if isinstance(self._lengths, str) else sum(self._lengths)
        store, trains = SliceStore(), torch.is_grad_enabled()
        return [Slice(i, *bounds, total, store, trains) for i, bounds in enumerate(self._bounds(total))]

    def loss(self, compute: Compute, outputs: Batch, labels: Labels) -> Loss:
        if not self._loss_tried and labels is not None:
            self._loss_tried = try_loss(self._module, compute, outputs, labels)
        loss = compute(outputs, labels)
        require_pairs(loss)
        return loss

    def computing(self, tokens: int, slice_index: int) -> AbstractContextManager[None]:
        return computing(self.slices_of(tokens)[slice_index])

    @contextmanager
    def backward(self, stage: int, micro_batch: int, slice_index: int) -> Iterator[Start]:
        current = self._live[stage, micro_batch][slice_index]
        roots = current.store.roots(slice_index)
        with computing(replace(current, repeats=True)):
            yield roots, current.store.leaves
        current.store.release(slice_index)
        if slice_index == 0:
            del self._live[stage, micro_batch]
