"""Recomputation of layers in the backward, with torch's function or the caller's ``activation_checkpoint_func``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...errors import ConfigError
from ..types import Batch, Function

CheckpointFunction = Function
Values = dict[tuple[nn.Module, str], Tensor]
_NON_REENTRANT: CheckpointFunction = partial(checkpoint, use_reentrant=False)


def checkpoint_function(function: CheckpointFunction | None) -> CheckpointFunction:
    return _NON_REENTRANT if function is None else function


def run_with_recompute(
    function: CheckpointFunction,
    modules: Sequence[nn.Module],
    run: Callable[[Batch], Batch],
    inputs: Batch,
    keep_random: bool,
) -> Batch:
    """Return ``run(inputs)``, which ``function`` runs again in the backward.

    Args:
        function: ``function(f, *tensors)``, for example ``deepspeed.checkpointing.checkpoint``.
        keep_random: let torch's function repeat the random numbers, because ``run`` does not.
    """
    if function is non_reentrant_checkpoint:  # set by "pipeline": {"use_reentrant": false}, or by the caller
        function = _NON_REENTRANT
    is_tuple = isinstance(inputs, tuple)
    tensors: tuple[Batch, ...] = inputs if is_tuple else (inputs,)
    if function is not _NON_REENTRANT and not any(map(_has_gradient, tensors)):
        tensors = tuple(map(_with_gradient, tensors))

    replayable = _Replayable(modules, run)

    def forward(*tensors: Batch) -> Batch:
        return replayable(tensors if is_tuple else tensors[0])

    if function is _NON_REENTRANT:
        return function(forward, *tensors, preserve_rng_state=keep_random)
    outputs = function(forward, *tensors)
    if not any(map(_has_gradient, outputs if isinstance(outputs, tuple | list) else (outputs,))):
        trained = [module for module in modules if _is_trained(module)]
        if trained:
            raise ConfigError(
                f"activation_checkpoint_func: {type(trained[0]).__name__} gets no gradient (got {function}). A "
                f"reentrant function loses it if the inputs are integers or the output is a list. Omit the function, "
                f"or exclude the layer with checkpointable_layers."
            )
    return outputs


class _Replayable:
    """Forward that returns the same values when it runs again in the backward.

    The first call records the initial values of the buffers that it changes. Later calls start from them, and leave the
    buffers as they are.
    """

    def __init__(self, modules: Sequence[nn.Module], run: Callable[[Batch], Batch]) -> None:
        self._modules, self._run = modules, run
        self._initial: Values | None = None  # None before the first call

    def __call__(self, inputs: Batch) -> Batch:
        if self._initial is not None:
            with preserve_buffers(self._modules, self._initial):
                return self._run(inputs)
        before = [(m, name, b, b.clone(), b._version) for m, name, b in all_buffers_of(self._modules)]
        result = self._run(inputs)
        self._initial = {
            (module, name): values
            for module, name, buffer, values, version in before
            if getattr(module, name) is not buffer or buffer._version != version
        }
        return result


@contextmanager
def preserve_buffers(modules: Iterable[nn.Module], values: Values) -> Iterator[None]:
    """Context in which modules change copies of their buffers. On exit, they have the original tensors again.

    ``values``: (module, name) -> initial value of the copy. Other copies start from the buffer.
    """
    originals = all_buffers_of(modules)
    # A graph may contain the copies, and the original tensors keep their versions.
    copies = {id(buffer): values.get((module, name), buffer).clone() for module, name, buffer in originals}
    for module, name, buffer in originals:
        setattr(module, name, copies[id(buffer)])
    try:
        yield
    finally:
        for module, name, buffer in originals:
            setattr(module, name, buffer)


def all_buffers_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, Tensor]]:
    """Return module, name and tensor of every buffer, in the same order on all replicas."""
    return [
        (module, name, buffer)
        for module in dict.fromkeys(part for layer in modules for part in layer.modules())
        for name, buffer in module.named_buffers(recurse=False)
    ]


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _has_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _with_gradient(value: Batch) -> Batch:
    """Return a leaf that requires grad, on the memory of a floating-point tensor; other values unchanged."""
    differentiable = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if differentiable else value
