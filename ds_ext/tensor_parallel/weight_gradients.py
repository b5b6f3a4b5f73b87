"""Weight gradients at leisure: a backward in two halves (Qi et al. 2024, arXiv 2401.10241, section 2).

The first half gives the gradient of a stage's input, which the previous stage waits for; the second half the
gradients of its weights, which nobody waits for. Linear layers and embeddings whose forward ran under
:func:`deferrable` leave theirs in a :class:`WeightGradients` when the backward runs under :func:`deferring`: those of
this package, and torch's own after :func:`let_defer`. All others (norms, biases added by hand, ...) give theirs at
once, in the first half. Either way every gradient is the same product of the same tensors as in a whole backward.

    with deferrable():
        y = layers(x)
    later = WeightGradients()
    with deferring(later):
        torch.autograd.backward([y], [grad])  # x.grad is there
    later.compute()           # and now the weights' gradients
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from ..errors import ConfigError

Gradient = Callable[[], Tensor]


class WeightGradients:
    """The weight gradients that one backward left for later."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Gradient]] = []

    def add(self, weight: Tensor, gradient: Gradient) -> None:
        """Remember how the gradient of ``weight`` is computed."""
        self._parts.append((weight, gradient))

    @property
    def weights(self) -> set[int]:
        """The ``id`` of every parameter that has a gradient to come."""
        return {id(weight) for weight, _ in self._parts}

    def compute(self) -> None:
        """Compute and accumulate them, through autograd, so that the hooks of parameters see them; then forget."""
        parts, self._parts = self._parts, []
        with torch.no_grad():
            gradients = [gradient() for _, gradient in parts]
        if parts:
            backward([weight for weight, _ in parts], gradients)


# Of the process and not of a thread: on a GPU a thread of autograd's own runs the backward.
_deferrable = False
_later: WeightGradients | None = None


class deferrable:
    """Make the layers whose forward runs here able to defer."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        global _deferrable
        self._before, _deferrable = _deferrable, True

    def __exit__(self, *_: object) -> None:
        global _deferrable
        _deferrable = self._before


class deferring:
    """Leave weight gradients in ``later`` during a backward, also of forwards that it recomputes."""

    __slots__ = ("_before", "_to")

    def __init__(self, later: WeightGradients) -> None:
        self._to = later

    def __enter__(self) -> None:
        global _later, _deferrable
        self._before = _later, _deferrable
        _later, _deferrable = self._to, True

    def __exit__(self, *_: object) -> None:
        global _later, _deferrable
        _later, _deferrable = self._before


def backward(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """``torch.autograd.backward``; where every gradient is given and fits, without the cost of its checks.

    They take as long as autograd itself needs for a small graph, and this is called for every micro-batch.
    """
    if all(g is not None and g.shape == t.shape for t, g in zip(tensors, gradients, strict=True)):
        _engine_run_backward(
            tuple(tensors), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    else:
        torch.autograd.backward(list(tensors), list(gradients))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` whose weight gradient can be deferred: (..., in), (out, in), (out,) to (..., out)."""
    late = _deferrable and _is_trained(weight) and (bias is None or _is_trained(bias))
    if not late or not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, _anchor(x.dtype, x.device), (weight, bias))


def embedding(ids: Tensor, weight: Tensor, padding_idx: int = -1) -> Tensor:
    """``F.embedding`` whose weight gradient can be deferred: ids (...), table (rows, columns) to (..., columns)."""
    if not (_deferrable and _is_trained(weight) and torch.is_grad_enabled()):
        return torch.embedding(weight, ids, padding_idx)
    return _Embedding.apply(_anchor(weight.dtype, weight.device), ids, (weight,), padding_idx)


def _is_trained(weight: Tensor) -> bool:
    """A parameter; what is computed from one passes its gradient on, and so cannot wait."""
    return weight.is_leaf and weight.requires_grad


@functools.cache
def _anchor(dtype: torch.dtype, device: torch.device) -> Tensor:
    # To the functions below parameters come in a tuple, so that autograd does not see them: it would run their hooks in
    # the first half, with no gradient. Something else has to say that the result needs one.
    return torch.empty(0, dtype=dtype if dtype.is_floating_point else None, device=device).requires_grad_()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, parameters: tuple[Tensor, Tensor | None]) -> Tensor:
        # The weight too: so autograd notices when somebody changes it in the meantime.
        ctx.save_for_backward(x, parameters[0])
        ctx.parameters = parameters
        return F.linear(x, *parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, _), (weight, bias) = ctx.saved_tensors, ctx.parameters
        rows = grads[0].reshape(-1, grads[0].shape[-1])
        grad_x = (rows @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        _leave(weight, lambda: rows.t() @ x.reshape(-1, x.shape[-1]))
        if bias is not None:
            _leave(bias, lambda: rows.sum(0))
        return grad_x, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, parameters: tuple[Tensor], padding_idx: int) -> Tensor:
        ctx.save_for_backward(ids)
        (ctx.weight,), ctx.padding_idx = parameters, padding_idx
        return torch.embedding(ctx.weight, ids, padding_idx)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        (ids,), weight, padding_idx = ctx.saved_tensors, ctx.weight, ctx.padding_idx

        def gradient() -> Tensor:
            return torch.ops.aten.embedding_dense_backward(grads[0], ids, len(weight), padding_idx, False)

        _leave(weight, gradient)
        return None, None, None, None


def _leave(weight: Tensor, gradient: Gradient) -> None:
    """Leave the gradient of a parameter for later.

    Autograd does not see the parameter, so a backward of anybody else's would miss it.
    """
    if _later is None or torch.is_grad_enabled():
        raise ConfigError(
            "a layer computes gradients in its own forward (torch.autograd.grad) through a linear layer or an "
            "embedding whose weight gradient this schedule computes later: it would be lost. Use a schedule with whole "
            "backwards (1f1b, interleaved, bitpipe), or let that layer call torch.nn.functional.linear itself."
        )
    _later.add(weight, gradient)


class DeferralWatch:
    """Record of the parameters whose gradients split backwards deferred, and of those computed at once.

    A parameter that two layers use may be both: a table whose embedding defers and whose head does not.

    Args:
        parameters: the trained parameters of this rank; they get a hook until :meth:`close`.
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
        """Record the parameters that a first half deferred; call it before ``later.compute()``."""
        self._deferred |= later.weights

    def _accumulated(self, parameter: Tensor) -> None:
        if _later is not None:
            self._at_once.add(id(parameter))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def deferral(self, named: Iterable[tuple[str, Tensor]]) -> Deferral:
        """Return what was recorded of the parameters that ``named`` gives with the names to report."""
        parameters = {id(parameter): (name, parameter.numel()) for name, parameter in named}
        at_once = Counter({name: numel for i, (name, numel) in parameters.items() if i in self._at_once})
        deferred = parameters.keys() & self._deferred - self._at_once
        return Deferral(sum(parameters[i][1] for i in deferred), at_once)


@dataclass(frozen=True)
class Deferral:
    """Result of a :class:`DeferralWatch`.

    Attributes:
        deferred: elements of the parameters with deferred gradients only.
        at_once: name -> elements of each parameter with gradients in the first half.
    """

    deferred: int
    at_once: Counter[str]

    def __add__(self, other: Deferral) -> Deferral:
        return Deferral(self.deferred + other.deferred, self.at_once + other.at_once)

    @property
    def share(self) -> float:
        """Deferred elements / all elements with a gradient, from 0 to 1; 1 without any."""
        total = self.deferred + self.at_once.total()
        return self.deferred / total if total else 1.0

    @property
    def largest_at_once(self) -> list[str]:
        """Names of the parameters computed at once, the largest first."""
        return sorted(self.at_once, key=lambda name: (-self.at_once[name], name))


def let_defer(module: nn.Module) -> None:
    """Let torch's own nn.Linear and nn.Embedding below ``module`` defer their weight gradients as ours do.

    Subclasses, and layers whose forward was replaced, stay as they are: they may compute something else.
    """
    for layer in module.modules():
        if "forward" not in vars(layer):
            if type(layer) is nn.Linear:
                _replace_forward(layer, _forward_linear)
            elif type(layer) is nn.Embedding and not _is_special(layer):
                _replace_forward(layer, _forward_embedding)


def _replace_forward(layer: Any, forward: Callable[..., Tensor]) -> None:
    layer.forward = functools.partial(forward, layer)


def _is_special(layer: nn.Embedding) -> bool:
    return layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse


def _forward_linear(layer: nn.Linear, input: Tensor) -> Tensor:
    return linear(input, layer.weight, layer.bias)


def _forward_embedding(layer: nn.Embedding, input: Tensor) -> Tensor:
    return embedding(input, layer.weight, -1 if layer.padding_idx is None else layer.padding_idx)
