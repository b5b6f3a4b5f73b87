"""DeepSpeed's Muon: its import without the compiler, and the parameters that it trains.

With ZeRO or bf16, DeepSpeed imports Muon in every job, to compare the type of the optimizer with it. Muon decorates
three functions with ``torch.compile``, which imports the whole compiler: 2 s of CPU time on every rank.
"""

from __future__ import annotations

import functools
import importlib

import torch
from deepspeed.runtime import compiler

from ...errors import ConfigError
from ...tensor_parallel import is_sharded
from ..all_ranks import on_all_ranks
from ..module import PipelineModule
from ..placeholders import add_placeholder, as_groups, has_trained
from ..ties.tied_layers import tied_weights
from ..types import Function, Groups


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


def tag_for_muon(model: PipelineModule) -> None:
    """Tag the matrices of hidden layers for Muon and the rest for Adam, unless the script has tagged parameters.

    DeepSpeed looks for words such as "embed" in the names of parameters, which are numbers in a pipeline. Here, Adam
    gets the first and the last layer with a matrix, embeddings, the weights tied to any of them, vectors and shards.
    """
    parameters = list(model.layer_parameters())
    if any(on_all_ranks(lambda: any(hasattr(parameter, "use_muon") for parameter in parameters))):
        for parameter in parameters:
            parameter.use_muon = getattr(parameter, "use_muon", False)  # pyright: ignore[reportAttributeAccessIssue]
        return
    modules = [
        (index, module)
        for stage in model.stages
        for index, layer in model.stage_modules(stage).items()
        for module in layer.modules()
    ]
    with_matrix = on_all_ranks(
        lambda: [i for i, module in modules if any(p.dim() > 1 for p in module.parameters(recurse=False))]
    )
    indices = sorted({index for of_rank in with_matrix for index in of_rank})
    adam = {id(p) for p in parameters if p.dim() < 2 or is_sharded(p)}
    for index, module in modules:
        if index in (*indices[:1], *indices[-1:]) or isinstance(module, torch.nn.Embedding):
            adam.update(map(id, module.parameters(recurse=False)))
    tied = {
        (key, number): weight
        for key, tie in model.tied_comms.items()
        for number, weight in enumerate(tied_weights(tie["module"], tie["weight_attr"]))
    }
    of_ranks = on_all_ranks(lambda: [place for place, weight in tied.items() if id(weight) in adam])
    adam |= {id(tied[place]) for places in of_ranks for place in places if place in tied}
    if not any(on_all_ranks(lambda: any(id(parameter) not in adam for parameter in parameters))):
        shards = sum(p.dim() > 1 and is_sharded(p) for p in parameters)
        raise ConfigError(
            f"optimizer.type: Muon trains whole matrices of hidden layers (got none in {len(indices)} layers with "
            f"matrices; {shards} matrices of this rank are shards). Use AdamW, or tensor_parallel_size 1."
        )
    for parameter in parameters:
        parameter.use_muon = id(parameter) not in adam  # pyright: ignore[reportAttributeAccessIssue]


def fill_halves(model: PipelineModule, groups: Groups) -> None:
    """Add placeholders to groups of Muon, which DeepSpeed divides, so that all ranks have the same halves."""

    def trained_halves() -> list[list[bool]]:
        marks = [[p for p in group["params"] if hasattr(p, "use_muon")] for group in all_groups]
        return [
            [has_trained(p for p in marked if p.use_muon is half) for half in (True, False)]
            for marked in marks
        ]

    all_groups = as_groups(groups)
    of_ranks = on_all_ranks(trained_halves)
    for group, mine, *others in zip(all_groups, trained_halves(), *of_ranks, strict=False):
        for half, dim in ((0, 2), (1, 1)):
            if not mine[half] and any(halves[half] for halves in others):
                group["params"].append(add_placeholder(model, dim)[1])
