"""Handlers that a script puts into an instruction map, as in DeepSpeed.

A script replaces a handler with ``PipelineEngine._INSTRUCTION_MAP[ReduceGrads] = function``, in the map of DeepSpeed's
class, of this package's class or of one engine. The engine calls the function if it accepts the arguments of the
instruction. Handlers that read DeepSpeed's buffers do not, because those buffers hold one stage.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping

from deepspeed.runtime.pipe import schedule as ds
from deepspeed.runtime.pipe.engine import PipelineEngine as DeepSpeedPipelineEngine

from ...errors import ConfigError
from ...pipe_schedules.bridge import INSTRUCTIONS
from ..engine_state import EngineState
from ..executor import OWN_HANDLERS

Handler = Callable[..., None]
Handlers = Mapping[type[ds.PipeInstruction], Handler]

_PACKAGE = __name__.partition(".")[0]
_BUFFER_ARGUMENTS = ("buffer_id", "stage", "micro_batch")
_MESSAGE_ARGUMENTS = (*_BUFFER_ARGUMENTS, "peer")
# Keyword arguments of DeepSpeed's instructions in this engine. In DeepSpeed, those with a buffer have only buffer_id.
_ARGUMENTS: dict[type[ds.PipeInstruction], tuple[str, ...]] = {
    ds.OptimizerStep: (),
    ds.ReduceGrads: (),
    ds.ReduceTiedGrads: (),
    ds.LoadMicroBatch: _BUFFER_ARGUMENTS,
    ds.ForwardPass: _BUFFER_ARGUMENTS,
    ds.BackwardPass: _BUFFER_ARGUMENTS,
    ds.SendActivation: _MESSAGE_ARGUMENTS,
    ds.RecvActivation: _MESSAGE_ARGUMENTS,
    ds.SendGrad: _MESSAGE_ARGUMENTS,
    ds.RecvGrad: _MESSAGE_ARGUMENTS,
}


def _builtin_handler(engine: EngineState, kind: type[ds.PipeInstruction]) -> Handler:
    return engine.role.handlers.get(kind) or getattr(engine.executor, OWN_HANDLERS[kind])


def _make_engine_handler(kind: type[ds.PipeInstruction]) -> Handler:
    def handler(engine: EngineState, *arguments: object, **keyword_arguments: object) -> None:
        _builtin_handler(engine, kind)(*arguments, **keyword_arguments)

    return handler


# Handlers of the roles and the executor as functions of an engine, which a script may wrap. The engine's class has
# others for the instructions of the weights.
ENGINE_HANDLERS = {kind: _make_engine_handler(kind) for kind in INSTRUCTIONS.values()}


def bind_handlers(engine: EngineState, handlers: Handlers) -> dict[type[ds.PipeInstruction], Handler]:
    """Return the handlers as functions of the arguments of their instructions.

    Handlers of the engine's role and executor are called directly, others with the engine as the first argument.
    """
    builtin = {*OWN_HANDLERS, *engine.role.handlers}
    return {
        kind: _builtin_handler(engine, kind)
        if kind in builtin and handler is ENGINE_HANDLERS[kind]
        else functools.partial(handler, engine)
        for kind, handler in handlers.items()
    }


def merge_patches(handlers: Handlers, *bases: Handlers) -> dict[type[ds.PipeInstruction], Handler]:
    """Return the handlers of an engine, including those that a script put into the maps of its base classes.

    A script's handler in an earlier map wins. ``bases`` are the maps of the base classes, nearest first.
    """
    merged = dict(handlers)
    for base in bases:
        for instruction, handler in base.items():
            is_script = is_patch(handler) and handler.__module__ != DeepSpeedPipelineEngine.__module__
            if is_script and instruction in merged and not is_patch(merged[instruction]):
                merged[instruction] = handler
    for instruction, arguments in _ARGUMENTS.items():
        if is_patch(merged[instruction]):
            _require_arguments(instruction, merged[instruction], arguments)
    return merged


def is_patch(handler: Handler) -> bool:
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
