"""Handlers that a script puts into an instruction map, as in DeepSpeed.

A script replaces a handler with ``PipelineEngine._INSTRUCTION_MAP[ReduceGrads] = function``, in the map of DeepSpeed's
class, of this package's class or of one engine. The engine calls the function if it accepts the arguments of the
instruction. Handlers that read DeepSpeed's buffers do not, because those buffers hold one stage.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.runtime.pipe import schedule as ds
from deepspeed.runtime.pipe.engine import PipelineEngine as DeepSpeedPipelineEngine

from ...errors import ConfigError
from ...pipe_schedules.bridge import SyncWeights
from ..executor import OWN_HANDLERS

Handler = Callable[..., None]
Handlers = Mapping[type[ds.PipeInstruction], Handler]

_PACKAGE = __name__.partition(".")[0]
_OF_BUFFERS = ("buffer_id", "stage", "micro_batch")
_OF_MESSAGES = (*_OF_BUFFERS, "peer")
# Keyword arguments of DeepSpeed's instructions in this engine. In DeepSpeed, those with a buffer have only buffer_id.
_ARGUMENTS: dict[type[ds.PipeInstruction], tuple[str, ...]] = {
    ds.OptimizerStep: (),
    ds.ReduceGrads: (),
    ds.ReduceTiedGrads: (),
    ds.LoadMicroBatch: _OF_BUFFERS,
    ds.ForwardPass: _OF_BUFFERS,
    ds.BackwardPass: _OF_BUFFERS,
    ds.SendActivation: _OF_MESSAGES,
    ds.RecvActivation: _OF_MESSAGES,
    ds.SendGrad: _OF_MESSAGES,
    ds.RecvGrad: _OF_MESSAGES,
}


def _own_handler(engine: Any, kind: type[ds.PipeInstruction]) -> Handler:
    """Return the handler of the engine's role, or else that of its executor."""
    return engine.role.handlers.get(kind) or getattr(engine.executor, OWN_HANDLERS[kind])


def _function_of_engine(kind: type[ds.PipeInstruction]) -> Handler:
    def handler(engine: Any, *arguments: Any, **named: Any) -> None:
        _own_handler(engine, kind)(*arguments, **named)

    return handler


# Handlers of the roles and the executor as functions of an engine, which a script may wrap.
OF_ENGINE = {kind: _function_of_engine(kind) for kind in (*OWN_HANDLERS, SyncWeights)}


def bound_to(engine: Any, handlers: Handlers) -> dict[type[ds.PipeInstruction], Handler]:
    """Return the handlers as functions of the arguments of their instructions."""
    own = {*OWN_HANDLERS, *engine.role.handlers}
    return {
        kind: _own_handler(engine, kind)
        if kind in own and handler is OF_ENGINE[kind]
        else functools.partial(handler, engine)
        for kind, handler in handlers.items()
    }


def with_patches(handlers: Handlers, *bases: Handlers) -> dict[type[ds.PipeInstruction], Handler]:
    """Return the handlers of an engine, including those that a script put into the maps of its base classes.

    Args:
        handlers: the engine's map.
        bases: maps of its base classes.

    Raises:
        ConfigError: a script's handler does not accept the arguments of its instruction.
    """
    patched = dict(handlers)
    for base in bases:
        for instruction, handler in base.items():
            is_ours = not is_patch(handler) or handler.__module__ == DeepSpeedPipelineEngine.__module__
            if not is_ours and instruction in patched and not is_patch(patched[instruction]):
                patched[instruction] = handler
    for instruction, arguments in _ARGUMENTS.items():
        if is_patch(patched[instruction]):
            _require_arguments(instruction, patched[instruction], arguments)
    return patched


def is_patch(handler: Any) -> bool:
    """Return whether a script, and not this package, defines a handler."""
    return getattr(handler, "__module__", "").partition(".")[0] != _PACKAGE


def _require_arguments(
    instruction: type[ds.PipeInstruction], handler: Handler, arguments: tuple[str, ...]
) -> None:
    try:
        inspect.signature(handler).bind(None, **dict.fromkeys(arguments))
    except TypeError:
        name = getattr(handler, "__qualname__", str(handler))
        raise ConfigError(
            f"_INSTRUCTION_MAP[{instruction.__name__}]: must accept (engine, {', '.join(arguments)}) (got {name}"
            f"{inspect.signature(handler)}). DeepSpeed's buffers hold one stage, so a handler of DeepSpeed's engine "
            f"cannot run here. Remove it, or write it for engine.pipe_buffers[buffer_id]."
        ) from None
