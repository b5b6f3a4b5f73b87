"""Split backward with deferred weight gradients (Qi et al. 2024, arXiv 2401.10241, section 2).

The first half computes the gradient of a stage's input, which the previous stage needs. The second half computes the
weight gradients. Linear layers and embeddings defer their weight gradients to a :class:`WeightGradients` if their
forward ran under :func:`deferrable` and their backward runs under :func:`deferring`. This holds for the layers of this
package, and for torch's layers after :func:`let_defer`. Other layers (norms, separate biases, ...) compute their weight
gradients in the first half. Every gradient is the same product of the same tensors as in a whole backward.

    with deferrable():
        y = layers(x)
    later = WeightGradients()
    with deferring(later):
        torch.autograd.backward([y], [grad])  # sets x.grad
    later.compute()                           # sets the weight gradients
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge

from ..errors import ConfigError

try:
    from torch.autograd.graph import _engine_run_backward
except ImportError:  # private: a later torch may not have it
    _engine_run_backward = None

Gradient = Callable[[], Tensor]
_MOST_TOGETHER = 2**20  # elements of gradients that are accumulated in one run of autograd


@dataclass(frozen=True, slots=True)
class _Deferred:
    """Deferred gradient of a weight, and the tensors it reads with their versions, which in-place changes increase."""

    weight: Tensor
    gradient: Gradient
    reads: tuple[Tensor, ...]
    versions: tuple[int, ...]

    def compute(self) -> Tensor:
        if any(tensor._version != version for tensor, version in zip(self.reads, self.versions, strict=True)):
            raise ConfigError(
                "schedule: split backwards do not support an in-place change of the input or the output gradient of a "
                "linear layer or an embedding before its weight gradient is computed (got a weight of shape "
                f"{tuple(self.weight.shape)}). Change a copy, or use a schedule with whole backwards (1f1b, "
                "interleaved, bitpipe)."
            )
        return self.gradient()


class WeightGradients:
    def __init__(self) -> None:
        self._deferred: list[_Deferred] = []

    def add(self, weight: Tensor, gradient: Gradient, *reads: Tensor) -> None:
        self._deferred.append(_Deferred(weight, gradient, reads, tuple(tensor._version for tensor in reads)))

    @property
    def weights(self) -> set[int]:
        """Set of the ``id`` of every parameter with a deferred gradient."""
        return {id(one.weight) for one in self._deferred}

    @property
    def memory(self) -> set[int]:
        """Addresses of the memory that the deferred gradients read."""
        return {address(tensor) for one in self._deferred for tensor in one.reads}

    def compute(self) -> None:
        """Compute and accumulate all gradients through autograd, so that parameter hooks run, and clear the list.

        Only the gradients of one parameter exist at a time, or of several small ones, because each run of autograd
        takes as long as a small product. The tensors they need are freed one by one. Autograd sums the gradients of a
        parameter before its hooks run, so all gradients of a parameter pass together.
        """
        deferred, self._deferred = self._deferred, []
        by_weight: dict[int, list[_Deferred]] = {}
        for one in deferred:
            by_weight.setdefault(id(one.weight), []).append(one)
        deferred.clear()
        del deferred
        weights: list[Tensor] = []
        gradients: list[Tensor] = []
        for key in list(by_weight):
            of_weight = by_weight.pop(key)[::-1]
            while of_weight:
                one = of_weight.pop()
                with torch.no_grad():
                    gradients.append(one.compute())
                weights.append(one.weight)
                del one
            if not by_weight or sum(g.numel() for g in gradients) > _MOST_TOGETHER:
                backward(weights, gradients)
                weights, gradients = [], []


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which is the address of its views too."""
    return tensor.untyped_storage().data_ptr()


# Process-wide and not per thread: on a GPU, a thread of autograd runs the backward.
_deferrable = False
_later: WeightGradients | None = None


class deferrable:
    """Context in which the forward of a layer prepares it to defer its weight gradients."""

    __slots__ = ("_previous",)

    def __enter__(self) -> None:
        global _deferrable
        self._previous, _deferrable = _deferrable, True

    def __exit__(self, *_: object) -> None:
        global _deferrable
        _deferrable = self._previous


class deferring:
    """Context in which a backward defers weight gradients to ``later``, including those of recomputed forwards."""

    __slots__ = ("_later", "_previous")

    def __init__(self, later: WeightGradients) -> None:
        self._later = later

    def __enter__(self) -> None:
        global _later, _deferrable
        self._previous = _later, _deferrable
        _later, _deferrable = self._later, True

    def __exit__(self, *_: object) -> None:
        global _later, _deferrable
        _later, _deferrable = self._previous


def backward(tensors: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor | None]) -> None:
    """Run ``torch.autograd.backward``, without its checks if every gradient has its tensor's shape.

    For a small graph the checks take as long as the backward, and this function runs for every micro-batch. A missing
    gradient is that of a real scalar, 1. The gradient of an edge must have the shape of its tensor.
    """
    run = _engine_run_backward
    seeds = [_seed(t) if g is None else g for t, g in zip(tensors, gradients, strict=True)]
    if run is not None and all(
        g is not None and (isinstance(t, GradientEdge) or g.shape == t.shape)
        for t, g in zip(tensors, seeds, strict=True)
    ):
        run(tuple(tensors), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        torch.autograd.backward(cast(Sequence[Tensor], tensors), gradients)


def _seed(tensor: Tensor | GradientEdge) -> Tensor | None:
    if isinstance(tensor, GradientEdge) or tensor.shape or not tensor.is_floating_point():
        return None
    return torch.ones_like(tensor)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``F.linear`` with a deferrable weight gradient: (..., in), (out, in), (out,) to (..., out)."""
    return deferred_linear(x, weight, bias) if is_deferrable(x, weight, bias) else F.linear(x, weight, bias)


def is_deferrable(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether a linear layer may defer the gradients of its parameters: x (..., in), (out, in), (out,)."""
    deferred = _deferrable and _is_trained(weight) and (bias is None or _is_trained(bias))
    return deferred and not _is_transformed() and not torch.is_autocast_enabled(x.device.type)


@dataclass(frozen=True)
class Rows:
    """Rows of a weight and a bias that a linear layer uses.

    ``full_gradient`` returns the gradient of a whole parameter for (gradient of the rows, parameter).
    """

    index: slice
    full_gradient: Callable[[Tensor, Tensor], Tensor]


def deferred_linear(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows | None = None) -> Tensor:
    return _Linear.apply(x, anchor(x.dtype, x.device), (weight, bias), rows)


def embedding(ids: Tensor, weight: Tensor, padding_idx: int = -1) -> Tensor:
    """Compute ``F.embedding`` with a deferrable weight gradient: ids (...), (rows, columns) to (..., columns)."""
    if not (_deferrable and _is_trained(weight)) or _is_transformed():
        return torch.embedding(weight, ids, padding_idx)
    return _Embedding.apply(anchor(weight.dtype, weight.device), ids, (weight,), padding_idx, None)


def embedding_rows(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """Look up ids in a weight with the rows from ``first`` on of a table; zeros for those of other rows."""
    if not (_deferrable and _is_trained(weight)) or _is_transformed():
        return _look_up(ids, weight, first)
    return _Embedding.apply(anchor(weight.dtype, weight.device), ids, (weight,), -1, first)


def _look_up(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    local, is_other = _local_ids(ids, first, len(weight))
    return torch.embedding(weight, local).masked_fill(is_other, 0.0)


def _local_ids(ids: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the row of each id, 0 for those of other weights, and (..., 1) whether it is one of them."""
    is_other = (ids < first) | (ids >= first + rows)
    return (ids - first).masked_fill(is_other, 0), is_other.unsqueeze(-1)


def _is_trained(weight: Tensor) -> bool:
    """Return whether a weight is a trained parameter. Other tensors must pass their gradients on immediately.

    Hooks must see the whole gradient of a weight, which other operations than linear layers may use too, unless they
    have the attribute ``only_observes``.
    """
    hooks = weight._backward_hooks or {}
    return (
        weight.is_leaf and weight.requires_grad and all(hasattr(h, "only_observes") for h in hooks.values())
    )


def _is_transformed() -> bool:
    """Return whether a forward computes no gradients, or computes them by ``torch.func`` or forward-mode autograd."""
    transforms = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return transforms or not torch.is_grad_enabled()


@functools.cache
def anchor(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an input that makes the result of a function with deferred gradients require a gradient."""
    # These functions get their parameters in a tuple, which hides them from autograd: otherwise it would run the
    # parameters' hooks in the first half, without a gradient.
    return torch.empty(0, dtype=dtype if dtype.is_floating_point else None, device=device).requires_grad_()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, parameters: tuple[Tensor, Tensor | None], rows: Rows | None
    ) -> Tensor:
        weight, bias = parameters
        ctx.parameters = parameters
        ctx.rows = rows
        if rows is not None:
            weight = weight[rows.index]
            bias = None if bias is None else bias[rows.index]
        # Save the weight if the backward uses it: autograd then reports an in-place change. Its alias keeps the values
        # if the script assigns other ones to weight.data.
        ctx.save_for_backward(x, weight.detach() if ctx.needs_input_grad[0] else None)
        # F.linear may return a view, on which autograd would not allow in-place operations.
        return F.linear(x, weight, bias).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, used_weight = ctx.saved_tensors  # its used rows; None if x needs no gradient
        x = x.detach()  # without the graph, which has the inputs of the stage
        weight, bias = ctx.parameters
        rows = ctx.rows
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        grad_x = None if used_weight is None else (grad @ used_weight.conj()).view_as(x)

        def full_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
            return gradient if rows is None else rows.full_gradient(gradient, parameter)

        defer(weight, lambda: full_gradient(grad.t() @ x.reshape(-1, x.shape[-1]).conj(), weight), grad, x)
        if bias is not None:
            defer(bias, lambda: full_gradient(grad.sum(0), bias), grad)
        return grad_x, None, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        ids: Tensor,
        parameters: tuple[Tensor],
        padding_idx: int,
        first: int | None,  # row of the weight in the table; None: it is the whole table
    ) -> Tensor:
        ctx.save_for_backward(ids)
        (ctx.weight,) = parameters
        ctx.padding_idx, ctx.first = padding_idx, first
        if first is not None:
            return _look_up(ids, ctx.weight, first)
        return torch.embedding(ctx.weight, ids, padding_idx)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        weight, padding_idx, first = ctx.weight, ctx.padding_idx, ctx.first

        def gradient() -> Tensor:
            grad, rows = grads[0], ids
            if first is not None:  # masked here: the parts of a table keep one gradient of its outputs
                rows, is_other = _local_ids(ids, first, len(weight))
                grad = grad.masked_fill(is_other, 0.0)
            return torch.ops.aten.embedding_dense_backward(grad, rows, len(weight), padding_idx, False)

        defer(weight, gradient, grads[0], ids)
        return None, None, None, None, None


def defer(weight: Tensor, gradient: Gradient, *reads: Tensor) -> None:
    # Grad mode is on in a backward only with create_graph=True.
    if _later is None or torch.is_grad_enabled():
        raise ConfigError(
            "schedule: split backwards do not support layers that call torch.autograd.grad in their forward through a "
            f"linear layer or an embedding (got a weight of shape {tuple(weight.shape)}). Use a schedule with whole "
            "backwards (1f1b, interleaved, bitpipe), or call torch.nn.functional.linear in that layer."
        )
    _later.add(weight, gradient, *reads)


class DeferralWatch:
    """Record of the parameters whose gradients were deferred and of those computed in the first half.

    A parameter that two layers share may be both: a tied table whose embedding defers and whose head does not. The
    parameters have a hook until :meth:`close`.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._deferred: set[int] = set()
        self._at_once: set[int] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)
            for parameter in parameters
            if parameter.requires_grad
        ]

    def add(self, later: WeightGradients) -> None:
        """Record the parameters in ``later``. Call this before ``later.compute()``."""
        self._deferred |= later.weights

    def _accumulated(self, parameter: Tensor) -> None:
        if _later is not None:
            self._at_once.add(id(parameter))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def deferral(self, named: Iterable[tuple[str, Tensor]]) -> Deferral:
        parameters = {id(parameter): (name, parameter.numel()) for name, parameter in named}
        at_once = Counter({name: numel for i, (name, numel) in parameters.items() if i in self._at_once})
        deferred = parameters.keys() & self._deferred - self._at_once
        return Deferral(sum(parameters[i][1] for i in deferred), at_once)


@dataclass(frozen=True)
class Deferral:
    """Result of a :class:`DeferralWatch`.

    Attributes:
        deferred: elements of the parameters whose gradients were all deferred.
        at_once: name -> elements of each parameter with a gradient in the first half.
    """

    deferred: int
    at_once: Counter[str]

    def __add__(self, other: Deferral) -> Deferral:
        return Deferral(self.deferred + other.deferred, self.at_once + other.at_once)

    @property
    def share(self) -> float:
        """Ratio of deferred elements to all elements with a gradient; 1 if there are none."""
        total = self.deferred + self.at_once.total()
        return self.deferred / total if total else 1.0

    @property
    def largest_at_once(self) -> list[str]:
        return sorted(self.at_once, key=lambda name: (-self.at_once[name], name))


def let_defer(module: nn.Module) -> None:
    """Replace the forwards of nn.Linear and nn.Embedding in ``module`` by ones that can defer weight gradients.

    Subclasses and layers with a replaced forward are skipped, because they may compute something else. Embeddings with
    ``max_norm``, ``scale_grad_by_freq`` or ``sparse`` are skipped too. A second call changes nothing.
    """
    for layer in module.modules():
        if "forward" not in vars(layer):
            if type(layer) is nn.Linear:
                _replace_forward(layer, _forward_linear)
            elif type(layer) is nn.Embedding and not _has_special_gradient(layer):
                _replace_forward(layer, _forward_embedding)


def _replace_forward(layer: Any, forward: Callable[..., Tensor]) -> None:
    layer.forward = functools.partial(forward, layer)


def _has_special_gradient(layer: nn.Embedding) -> bool:
    return layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse


def _forward_linear(layer: nn.Linear, input: Tensor) -> Tensor:
    return linear(input, layer.weight, layer.bias)


def _forward_embedding(layer: nn.Embedding, input: Tensor) -> Tensor:
    return embedding(input, layer.weight, -1 if layer.padding_idx is None else layer.padding_idx)
