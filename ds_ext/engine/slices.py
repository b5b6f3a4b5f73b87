"""Slices of sequences on a rank: cuts of the data, tensors that later slices need, and a trial of the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..errors import ConfigError
from ..planner.job_plan import JobPlan
from ..tensor_parallel import Slice, SliceStore, computing
from .evaluation import evaluating
from .messages import pack, unpack
from .module import PipelineModule

# Largest difference between a layer's outputs for a sequence and for its slices, relative to the largest output.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_HALF_TOLERANCE = 5e-2


class StageSlices:
    """Slices of the micro-batches in flight.

    Args:
        module: module of this rank.
        count: slices of a sequence.
        lengths: tokens of every slice; None: equal slices of any sequence.
        shards: ranks over which sequence parallelism distributes the tokens between stages.
    """

    def __init__(
        self, module: PipelineModule, count: int, lengths: Sequence[int] | None, shards: int
    ) -> None:
        self.count, self._module, self._lengths, self._shards = count, module, lengths, shards
        self._live: dict[tuple[int, int], list[Slice]] = {}  # (stage, micro-batch) -> slices, with one store
        self._tried: set[int] = set()

    @classmethod
    def from_plan(cls, module: PipelineModule, plan: JobPlan) -> StageSlices | None:
        """Return the slices of a job; None if it has none."""
        settings = plan.settings
        if settings.sequence_slices == 1:
            return None
        lengths = None if settings.slice_lengths == "equal" else settings.slice_lengths
        shards = plan.layout.tensor_parallel_size if settings.sequence_parallel else 1
        return cls(module, settings.sequence_slices, lengths, shards)

    def cut(self, tensors: tuple[Tensor, ...], index: int) -> tuple[Tensor, ...]:
        """Return slice ``index`` of the data of a micro-batch: of the tensors whose dimension 1 is the sequence.

        Raises ConfigError for a sequence that the slices do not divide.
        """
        tokens = _tokens(tensors)
        bounds = self._bounds(tokens)
        return _cut(tensors, tokens, *bounds[index])

    def _bounds(self, tokens: int) -> list[tuple[int, int]]:
        """Return start and stop of every slice of a sequence. Raises ConfigError if they do not fit it."""
        lengths = self._lengths or [tokens // self.count] * self.count
        if sum(lengths) != tokens:
            needed = (
                f"{sum(lengths)}, the sum of slice_lengths,"
                if self._lengths
                else f"a multiple of {self.count}"
            )
            raise ConfigError(
                f"sequence_slices: the tokens of a sample must be {needed} (got {tokens}). Change the samples, "
                f"sequence_slices or slice_lengths."
            )
        odd = next((length for length in lengths if length % self._shards), None)
        if odd is not None:
            raise ConfigError(
                f"sequence_slices: sequence parallelism needs slices of a multiple of {self._shards} tokens (got "
                f"{odd}). Change sequence_slices, or remove sequence_parallel."
            )
        return list(pairwise(accumulate(lengths, initial=0)))

    def forward(
        self,
        run: Callable[[], Any],
        stage: int,
        micro_batch: int,
        index: int,
        inputs: tuple[Tensor, ...],
    ) -> Any:
        """Return ``run()``, the forward of a slice with these inputs."""
        live = self._live.setdefault((stage, micro_batch), [])
        trains = torch.is_grad_enabled()
        if not live:
            tokens = _tokens(inputs) * (self._shards if stage else 1)
            total = sum(self._lengths) if self._lengths else tokens * self.count
            store = SliceStore()
            live += [Slice(i, *bounds, total, store, trains) for i, bounds in enumerate(self._bounds(total))]
            if trains and stage not in self._tried:
                self._tried.add(stage)
                self._try_layers(stage, inputs)
        with computing(live[index]):
            outputs = run()
        if not trains and index == self.count - 1:
            del self._live[stage, micro_batch]
        return outputs

    @contextmanager
    def backward(
        self, stage: int, micro_batch: int, index: int
    ) -> Iterator[tuple[list[tuple[GradientEdge, Tensor]], list[Tensor]]]:
        """Context of the backward of a slice: what it starts from beside its outputs, and the leaves of its graph."""
        part = self._live[stage, micro_batch][index]
        roots = part.store.roots(index)
        with computing(part):
            yield roots, part.store.leaves
        part.store.release(index)
        if index == 0:
            del self._live[stage, micro_batch]

    def clear(self) -> None:
        """Drop the slices of a step that failed."""
        self._live.clear()

    # --- trial ---

    def _try_layers(self, stage: int, inputs: tuple[Tensor, ...]) -> None:
        """Raise ConfigError for a layer that does not compute in slices what it computes for a sequence.

        The first slice is tried as a sequence of two slices. A layer whose later tokens depend on earlier ones must
        keep what the next slice needs.
        """
        first = self._module.parts[stage]
        modules = self._module.stage_modules(stage)
        x = unpack([tensor.detach() for tensor in inputs])
        tokens = _tokens(pack(x, ""))
        for index, layer in enumerate(self._module.stage_funcs[stage], first):
            name = f"layer {index} ({type(modules.get(index, layer)).__name__})"
            if self._shards > 1 and stage:
                self._require_own(name, modules.get(index, layer))
                continue
            if tokens < 2:
                return
            with torch.no_grad(), evaluating(self._module):
                x = _try_layer(layer, name, x, tokens)

    def _require_own(self, name: str, layer: object) -> None:
        """Raise ConfigError for a layer of others, which cannot be tried on tokens of several ranks."""
        if not type(layer).__module__.startswith(("ds_ext.", "functools", "builtins")):
            raise ConfigError(
                f"sequence_slices: {name} cannot be checked with sequence_parallel. Remove one of them."
            )


def _try_layer(layer: Callable[[Any], Any], name: str, x: Any, tokens: int) -> Any:
    """Return the outputs of a layer for a sequence. Raises ConfigError; see :meth:`StageSlices._try_layers`."""
    inputs, middle = pack(x, name), tokens // 2

    def run(value: Any, part: Slice) -> tuple[Tensor, ...]:
        with computing(part):
            return pack(layer(value), name)

    def part_of_inputs(start: int, stop: int) -> Any:
        cut = getattr(layer, "cut_sequence", None)  # of a layer whose inputs have masks
        return unpack(_cut(inputs, tokens, start, stop)) if cut is None else cut(x, start, stop)

    whole = run(x, Slice(0, 0, tokens, tokens))
    changed = run(unpack([_with_other_start(t, middle) for t in inputs]), Slice(0, 0, tokens, tokens))
    pairs = [
        (a, b)
        for a, b in zip(whole, changed, strict=True)
        if a.is_floating_point() and _has_tokens(a, tokens)
    ]
    if not pairs:
        return unpack(whole)
    mixes = not all(torch.equal(a[:, middle:], b[:, middle:]) for a, b in pairs)
    store = SliceStore()
    bounds = (0, middle), (middle, tokens)
    parts = [run(part_of_inputs(*bound), Slice(j, *bound, tokens, store)) for j, bound in enumerate(bounds)]
    if mixes and not store.leaves:
        raise ConfigError(
            f"sequence_slices: {name} mixes tokens, and keeps nothing for the next slice. Call "
            f"ds_ext.tensor_parallel.earlier_slices() in it (docs/long_sequences.md), or remove sequence_slices."
        )
    lengths = tokens, middle, tokens - middle
    for expected, *halves in zip(whole, *parts, strict=True):
        are_tokens = map(_has_tokens, (expected, *halves), lengths)
        if expected.dtype == torch.bool or not all(are_tokens):  # masks
            continue
        difference = (torch.cat(halves, 1) - expected).abs().max()
        limit = _TOLERANCE.get(expected.dtype, _HALF_TOLERANCE) * expected.abs().max()
        if not difference <= limit:
            raise ConfigError(
                f"sequence_slices: {name} computes something else in slices (got a difference of {difference:.2g} in "
                f"outputs up to {expected.abs().max():.2g}). Check its use of earlier_slices() and slice_start()."
            )
    return unpack(whole)


def _with_other_start(tensor: Tensor, middle: int) -> Tensor:
    """Return floating-point inputs with the opposite sign in the first half of the tokens; other tensors unchanged."""
    if not tensor.is_floating_point() or tensor.dim() < 2:
        return tensor
    return torch.cat((-tensor[:, :middle], tensor[:, middle:]), 1)


def _tokens(tensors: Sequence[Tensor]) -> int:
    """Return the length of the sequence: dimension 1 of the first tensor that has one. Raises ConfigError."""
    for tensor in tensors:
        if tensor.dim() > 1:
            return tensor.size(1)
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    raise ConfigError(
        f"sequence_slices: needs tensors with samples in dimension 0 and tokens in dimension 1 (got {shapes})."
    )


def _has_tokens(tensor: Tensor, tokens: int) -> bool:
    return tensor.dim() > 1 and tensor.size(1) == tokens


def _cut(tensors: Sequence[Tensor], tokens: int, start: int, stop: int) -> tuple[Tensor, ...]:
    # Contiguous, as loss functions expect of labels.
    return tuple([t[:, start:stop].contiguous() if _has_tokens(t, tokens) else t for t in tensors])
