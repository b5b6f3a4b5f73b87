"""DeepSpeed's Muon, imported without the compiler.

With ZeRO or bf16, DeepSpeed imports Muon in every job, to compare the type of the optimizer with it. Muon decorates
three functions with ``torch.compile``, which imports the whole compiler: 2 s of CPU time on every rank.
"""

from __future__ import annotations

import functools
import importlib

import torch
from deepspeed.runtime import compiler

from ..types import Function


def import_muon() -> None:
    """Import DeepSpeed's Muon, unless it has been imported; its functions are compiled when they are first called."""
    compile_now, compiler.compile = compiler.compile, lambda: _compile_when_called
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = compile_now


def _compile_when_called(function: Function) -> Function:
    @functools.cache
    def compiled() -> Function:
        return torch.compile(function)

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        return compiled()(*args, **kwargs)

    return call
