"""What replicas compare before the first step: the parameters of a stage with their options, and the data set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..launch.job_facts import as_text, checksum
from ..launch.roll_call import Facts
from .module import PipelineModule


def stage_facts(model: PipelineModule, groups: Iterable[Any]) -> Facts:
    """Return the shapes, types and optimizer options of the parameters of every stage that this rank holds.

    Args:
        groups: parameters, or parameter groups as an optimizer takes them.
    """
    options: dict[int, str] = {}
    for group in groups:
        if isinstance(group, Mapping):
            numbers = as_text(
                {key: value for key, value in group.items() if isinstance(value, (int, float, str, tuple))}
            )
            options |= {id(parameter): numbers for parameter in group["params"]}
    _, _, tensor = model.layout.coordinates(model.global_rank)
    place = f", tensor-parallel rank {tensor}" if model.layout.tensor_parallel_size > 1 else ""
    role = f"{model.role} rank of " if model.role else ""
    found = {}
    for stage in model.stages:
        parameters = model.stage_parameters(stage)
        found[f"{role}stage {stage}{place}: parameters"] = checksum(
            f"{tuple(p.shape)} {p.dtype} {options.get(id(p))};".encode() for p in parameters
        )
    return found


def data_facts(model: PipelineModule, data: Any) -> Facts:
    """Return kind, length and first sample of ``training_data``, on ranks that read it.

    A sample that differs when it is read again (it is augmented at random) is left out.
    """
    ends = {0, model.layout.placement.stages - 1}
    if data is None or not ends & set(model.stages) or not hasattr(data, "__len__"):
        return {}
    found = {"training_data": f"{type(data).__name__} of {len(data)} samples"}
    with contextlib.suppress(Exception):  # what cannot be read is an error of the first step
        first, again = _bytes_of(data[0]), _bytes_of(data[0])
        if first == again:
            found["training_data: first sample"] = checksum([first])
    return found


def _bytes_of(sample: Any) -> bytes:
    parts = []
    for leaf in tree_leaves(sample):
        # A view keeps the whole data set in memory: its own elements alone are copied.
        tensor = leaf.detach().cpu().contiguous().reshape(-1) if torch.is_tensor(leaf) else None
        parts.append(repr(leaf).encode() if tensor is None else tensor.view(torch.uint8).numpy().tobytes())
    return b";".join(parts)
