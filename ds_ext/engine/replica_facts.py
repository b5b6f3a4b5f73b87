"""Facts that replicas compare before the first step: parameters of stages with their options, and the data set."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from ..launch.job_facts import as_text, checksum, setting_facts
from ..launch.roll_call import Facts
from .module import PipelineModule


def optimizer_facts(optimizer: Any) -> Facts:
    """Return class and defaults of an optimizer that the caller made; groups may differ by stage."""
    if optimizer is None:
        return {}
    defaults = getattr(optimizer, "defaults", {})
    return {"optimizer": type(optimizer).__name__, **setting_facts(defaults, "optimizer.defaults.")}


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
    with contextlib.suppress(Exception), _equal_random_numbers():  # errors are those of the first step
        first, again = _bytes_of(lambda: data[0]), _bytes_of(lambda: data[0])
        if first == again:
            found["training_data: first sample"] = checksum([first])
    return found


@contextlib.contextmanager
def _equal_random_numbers() -> Iterator[None]:
    """Seed the global generators alike on all ranks, and give them their states back afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _bytes_of(read: Callable[[], Any]) -> bytes:
    """The numbers of what ``read()`` gives. Texts and objects may be a host's own: paths, addresses."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    parts = []
    for leaf in tree_leaves(read()):
        if isinstance(leaf, torch.Tensor):
            # A view keeps the whole data set in memory: its own elements alone are copied.
            parts.append(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
            parts.append(leaf.tobytes())
        elif isinstance(leaf, bool | int | float | complex | bytes):
            parts.append(repr(leaf).encode())
    return b";".join(parts)
