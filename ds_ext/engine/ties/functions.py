"""Parameters that functions in the layer list refer to."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType

from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ...errors import ConfigError
from ..types import Function, Layer


def require_visible_parameters(layers: Sequence[Layer], loss_fn: Function | None) -> None:
    """Raise ConfigError for a function with trainable parameters, which no optimizer would train.

    This includes a module's method used as a layer. A module's method is accepted as a loss function, because it may
    not use the parameters.
    """
    functions: list[tuple[str, object]] = []
    for index, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec):
            functions.append(
                (f"layer {index} (forward_fn of the tied layer {layer.key!r})", layer.forward_fn)
            )
        elif not isinstance(layer, LayerSpec | nn.Module):
            functions.append((f"layer {index} ({_name(layer)})", layer))
    if isinstance(loss_fn, nn.Module):
        functions.append((f"loss_fn ({_name(loss_fn)})", loss_fn))
    for place, function in functions:
        for owner in _references(function):
            trained = [owner] if isinstance(owner, nn.Parameter) else list(owner.parameters())
            if any(parameter.requires_grad for parameter in trained):
                raise ConfigError(
                    f"{place}: parameters in functions are not trained (got a reference to {type(owner).__name__}). "
                    f"Use the nn.Module itself as the layer. For a weight of another layer, use "
                    f"deepspeed.pipe.TiedLayerSpec with a forward_fn. If it only needs settings of the module, copy "
                    f"them to variables."
                )


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _references(function: object) -> Iterator[nn.Module | nn.Parameter]:
    """Yield the modules and parameters that a function, method, partial or callable object refers to."""
    if isinstance(function, nn.Module | nn.Parameter):
        yield function
    elif isinstance(function, MethodType):
        yield from _references(function.__self__)
    elif isinstance(function, partial):
        for value in (function.func, *function.args, *function.keywords.values()):
            yield from _references(value)
    elif isinstance(function, FunctionType):
        used = inspect.getclosurevars(function)
        for value in (*used.nonlocals.values(), *used.globals.values(), *(function.__defaults__ or ())):
            if isinstance(value, nn.Module | nn.Parameter | MethodType | partial):
                yield from _references(value)
    elif callable(function) and not isinstance(function, type):
        for value in getattr(function, "__dict__", {}).values():
            if isinstance(value, nn.Module | nn.Parameter):
                yield value
