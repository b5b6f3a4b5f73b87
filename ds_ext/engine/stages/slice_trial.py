"""Trial of layers and losses in slices of a sequence, and cuts of its tensors."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...errors import ConfigError
from ...tensor_parallel import Slice, SliceStore, computing
from ..contracts import AdaptedLayer
from ..deepspeed_api.recompute import preserve_buffers
from ..losses.local import Loss, require_pairs, terms_of
from ..messages import pack, unpack
from ..modes import evaluating
from ..module import PipelineModule
from ..types import Batch, Function, Record

# Largest difference between a layer's outputs for a sequence and for its slices, relative to the largest output.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-5}
_TF32_TOLERANCE = 1e-3
_HALF_TOLERANCE = 5e-2
# Largest effect of earlier tokens on a layer that does not read them, such as one with experts: it changes the shapes
# of matrices and so their rounding. In half precision it would hide that of an attention.
_ROUNDING = {torch.float64: 1e-14, torch.float32: 2e-6}
_SMALL = 1e-3  # elements of parameters
_LARGEST_TOLERANCE = 1e-2  # of a sum of losses; without one of its last few labels it differs by more


def try_loss(
    module: PipelineModule,
    compute: Callable[[Batch, tuple[Tensor, ...] | None], Loss],
    outputs: Batch,
    labels: tuple[Tensor, ...],
) -> bool:
    """Try the loss function on a slice, and return whether the slice has counted labels."""
    tokens = num_tokens(labels)
    tensors, _ = _at_least_two(pack(outputs, "the outputs"), tokens)
    targets, tokens = _at_least_two(labels, tokens)

    def loss(start: int, stop: int) -> Loss:
        slice_, slice_labels = (copies(cut(t, tokens, start, stop)) for t in (tensors, targets))
        return compute(unpack(slice_), slice_labels)

    loss_fn = module.loss_fn
    tried = [loss_fn] if isinstance(loss_fn, nn.Module) else []
    with _trying(tried), evaluating(module):
        return _try_sums(loss, "loss_fn", tokens)


def try_layers(module: PipelineModule, stage: int, inputs: tuple[Tensor, ...], shards: int) -> None:
    """Raise ConfigError for a layer that does not compute in slices what it computes for a sequence.

    The first slice is tried as a sequence of two slices. A layer whose later tokens depend on earlier ones must keep
    what the next slice needs. Sequence parallelism distributes the tokens over ``shards`` ranks.
    """
    first = module.parts[stage]
    modules = module.stage_modules(stage)
    tensors, tokens = _at_least_two([tensor.detach() for tensor in inputs], num_tokens(inputs))
    x = unpack(tensors)
    with _trying(modules.values()):
        for index, layer in enumerate(module.stage_funcs[stage], first):
            name = f"layer {index} ({type(modules.get(index, layer)).__name__})"
            if shards > 1:
                _require_own(name, modules.get(index, layer))
            elif module.loss_fn is None and index == module.parts[-1] - 1:
                with evaluating(module):
                    _try_sums(functools.partial(_loss_of, layer, pack(x, name), tokens), name, tokens)
            else:
                x = _try_layer(module, layer, name, x, tokens)
                if index + 1 == module.parts[stage + 1] < module.parts[-1]:
                    _require_tokens(pack(x, name), tokens, name)


def _require_tokens(outputs: Sequence[Tensor], tokens: int, name: str) -> None:
    """Raise ConfigError for outputs of which another stage would take another dimension for the sequence."""
    if num_tokens(outputs) != tokens:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in outputs)
        raise ConfigError(
            f"sequence_slices: {name} passes on tensors without the sequence in dimension 1, to another stage (got "
            f"{shapes} for {tokens} tokens). Transpose them in the last layer of a stage, or remove sequence_slices."
        )


def _require_own(name: str, layer: object) -> None:
    """Raise ConfigError for a layer outside ds_ext, which cannot be tried on tokens of several ranks."""
    if not type(layer).__module__.startswith(("ds_ext.", "functools", "builtins")):
        raise ConfigError(
            f"sequence_slices: {name} cannot be checked with sequence_parallel. Remove one of them."
        )


@contextlib.contextmanager
def _trying(tried: Iterable[nn.Module]) -> Iterator[None]:
    """Context of a trial of modules, which leaves their parameters and buffers and the random numbers as they are.

    Parameters that are almost 0, such as those of an output at the start of training, get larger values: they would
    hide an attention.
    """
    tried = list(tried)
    parameters = dict.fromkeys(p for one in tried for p in one.parameters() if _is_real_or_complex(p))
    with torch.no_grad(), torch.random.fork_rng(_gpus(parameters)), preserve_buffers(tried, {}):
        small = [p.data for p in parameters if p.numel() and p.abs().max() < _SMALL]
        originals = [data.clone() for data in small]
        try:
            for data in small:
                data.normal_(std=0.1)
            yield
        finally:
            for data, original in zip(small, originals, strict=True):
                data.copy_(original)


def _gpus(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.device.index for tensor in tensors if tensor.is_cuda}


def _try_layer(module: nn.Module, layer: Function, name: str, x: Batch, tokens: int) -> Batch:
    """Return the outputs of a layer for a sequence, after the check of :func:`try_layers`."""
    inputs, middle = pack(x, name), tokens // 2
    if tokens == 2:  # they may be equal
        inputs = [torch.cat((t[:, :1], t[:, 1:] / 2), 1) if _can_change(t, tokens) else t for t in inputs]
        x = unpack(inputs)

    def run(value: Sequence[Tensor], slice_: Slice) -> tuple[Tensor, ...]:
        # Copies, because a layer may change its inputs in place, and strides may change the rounding of its outputs.
        with computing(slice_):
            return pack(layer(unpack(copies(value))), name)

    def slice_of_inputs(start: int, stop: int) -> Sequence[Tensor]:
        own = AdaptedLayer(layer).cut_sequence
        return cut(inputs, tokens, start, stop) if own is None else pack(own(x, start, stop), name)

    pair: list[tuple[Tensor, ...]] = []
    for value in (inputs, [_with_other_start(tensor, middle, tokens) for tensor in inputs]):
        with torch.random.fork_rng(_gpus(inputs)):  # the same random numbers
            pair.append(run(value, Slice(0, 0, tokens, tokens)))
    mixes = any(
        _is_real_or_complex(a) and _has_tokens(a, tokens) and _differ(a[:, middle:], b[:, middle:], _ROUNDING)
        for a, b in zip(*pair, strict=True)
    )

    def uses_half() -> bool:
        with evaluating(module):
            return _uses_half(lambda: run(inputs, Slice(0, 0, tokens, tokens)))

    store = SliceStore()
    bounds = (0, middle), (middle, tokens)
    with evaluating(module):
        whole = run(inputs, Slice(0, 0, tokens, tokens))
        slice_outputs = [
            run(slice_of_inputs(*bound), Slice(j, *bound, tokens, store)) for j, bound in enumerate(bounds)
        ]
    if mixes and not store.leaves:
        raise ConfigError(
            f"sequence_slices: {name} mixes tokens, and keeps nothing for the next slice. Call "
            f"ds_ext.tensor_parallel.earlier_slices() in it (docs/long_sequences.md), or remove sequence_slices."
        )
    for i, expected in enumerate(whole):
        if expected.dtype == torch.bool or not expected.numel():  # masks
            continue
        pieces = [outputs[i] for outputs in slice_outputs]
        if _has_tokens(expected, tokens):
            pieces = [torch.cat(pieces, 1)]
        if pieces[0].shape != expected.shape:
            continue
        difference, largest = _difference(torch.stack(pieces), expected), _largest(expected)
        tolerance = max((_tolerance(t) for t in (*inputs, expected) if _is_real_or_complex(t)), default=0.0)
        if not _is_real_or_complex(expected):
            tolerance = 0.0
        elif not difference <= tolerance * largest and uses_half():
            tolerance = _HALF_TOLERANCE
        if not difference <= tolerance * largest:
            raise ConfigError(
                f"sequence_slices: {name} computes something else in slices (got a difference of {difference:.2g} in "
                f"outputs up to {largest:.2g}). Check its use of earlier_slices() and slice_start(), or "
                f"remove sequence_slices."
            )
    return unpack(whole)


def _try_sums(loss: Callable[[int, int], Loss], name: str, tokens: int) -> bool:
    """Return whether a slice has counted labels.

    The slice is halved down to one of its counted labels, so that one that a half loses matters. ``loss`` returns the
    loss of the tokens from start to stop.
    """
    start, stop = 0, tokens
    whole = loss(start, stop)
    require_pairs(whole)
    if not all(term.sum.isfinite() for term in whole.values()):
        return False  # a later slice shows it
    while stop - start > 1:
        middle = (start + stop) // 2
        halves = {bounds: loss(*bounds) for bounds in ((start, middle), (middle, stop))}
        for key, term in whole.items():
            sums, counts = zip(
                *((half[key].sum, half[key].count or 0.0) for half in halves.values()), strict=True
            )
            count, size = float(term.count or 0.0), sum(float(abs(part)) for part in sums)
            error = abs(float(term.sum) - float(sum(sums)))
            adds_up = error <= min(_tolerance(term.sum), _LARGEST_TOLERANCE) * size
            if not adds_up and error <= _LARGEST_TOLERANCE * size:
                adds_up = _uses_half(functools.partial(loss, start, stop))
            if not (adds_up and math.isclose(float(sum(counts)), count, rel_tol=1e-5)):
                raise ConfigError(
                    f"sequence_slices: {name} is not the sum of its parts (got sums of {float(term.sum):.6g} and "
                    f"{float(sum(sums)):.6g} over {count:g} and {float(sum(counts)):g} labels, for {stop - start} "
                    f"tokens and for their two halves). If it shifts labels, let a method shift_labels(labels) of the "
                    f"loss function do that for the whole sample (docs/long_sequences.md), or remove sequence_slices."
                )
        (start, stop), whole = max(
            halves.items(), key=lambda half: [float(t.count or 0) for t in half[1].values()]
        )
    return any(term.count for term in whole.values())


def _loss_of(layer: Function, inputs: Sequence[Tensor], tokens: int, start: int, stop: int) -> Loss:
    with computing(Slice(0, start, stop, tokens)):
        return terms_of(layer(unpack(copies(cut(inputs, tokens, start, stop)))))


def _at_least_two(tensors: Sequence[Tensor], tokens: int) -> tuple[Sequence[Tensor], int]:
    """Return tensors with at least two tokens, and their number: one is repeated."""
    if tokens > 1:
        return tensors, tokens
    return tuple([torch.cat((t, t), 1) if _has_tokens(t, 1) else t for t in tensors]), 2


def _can_change(tensor: Tensor, tokens: int) -> bool:
    return _is_real_or_complex(tensor) and _has_tokens(tensor, tokens)


class _HalfWatch(TorchDispatchMode):
    """Context that watches whether something is computed in half precision, as in autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(
        self, func: Function, types: object, args: Sequence[object] = (), kwargs: Record | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self.found = self.found or any(
            isinstance(leaf, Tensor) and leaf.dtype in (torch.bfloat16, torch.float16)
            for leaf in tree_leaves(result)
        )
        return result


def _uses_half(run: Callable[[], object]) -> bool:
    with _HalfWatch() as watch:
        run()
    return watch.found


def _tolerance(tensor: Tensor) -> float:
    """Return the largest accepted difference of outputs, relative to the largest output."""
    dtype = tensor.dtype.to_real()
    if dtype == torch.float32 and tensor.is_cuda:
        return _TF32_TOLERANCE
    return _TOLERANCE.get(dtype, _HALF_TOLERANCE)


def _is_real_or_complex(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _differ(a: Tensor, b: Tensor, tolerances: Mapping[torch.dtype, float]) -> bool:
    """Return whether tensors differ by more than a share of their largest element; without a tolerance, in any bit."""
    tolerance = tolerances.get(a.dtype.to_real())
    if tolerance is None:
        return not torch.equal(a, b)
    return a.numel() > 0 and not _difference(b, a) <= tolerance * _largest(a)


def _difference(found: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference of elements; equal ones may be infinite, as in masks."""
    return torch.where(found == expected, 0, found - expected).abs().max()


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest finite element."""
    return torch.where(tensor.abs().isinf(), 0, tensor).abs().max()


def _with_other_start(tensor: Tensor, middle: int, tokens: int) -> Tensor:
    """Return inputs with the opposite sign in the first half of the tokens; integers unchanged."""
    if not _can_change(tensor, tokens):
        return tensor
    return torch.cat((-tensor[:, :middle], tensor[:, middle:]), 1)


def num_tokens(tensors: Sequence[Tensor]) -> int:
    """Return the length of the sequence: dimension 1 of the first tensor that has one."""
    for tensor in tensors:
        if tensor.dim() > 1:
            return tensor.size(1)
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    raise ConfigError(
        f"sequence_slices: needs tensors with samples in dimension 0 and tokens in dimension 1 (got {shapes})."
    )


def _has_tokens(tensor: Tensor, tokens: int) -> bool:
    return tensor.dim() > 1 and tensor.size(1) == tokens


def cut(tensors: Sequence[Tensor], tokens: int, start: int, stop: int) -> tuple[Tensor, ...]:
    return tuple([t[:, start:stop] if _has_tokens(t, tokens) else t for t in tensors])


def copies(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple([tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors])
