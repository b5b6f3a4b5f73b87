"""Facts of a job: those that ranks compare in the roll call (optimizer, stages, data), and those of the run record."""

from __future__ import annotations

import contextlib
import os
import platform
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from torch.utils._pytree import tree_leaves

from ..config.deepspeed_json import precision, zero_stage
from ..environment import package_version
from ..launch.job_facts import as_text, checksum, setting_facts
from ..launch.roll_call import Facts
from ..planner.job_text import GRID_MICRO_BATCHES, describe
from .module import PipelineModule
from .together import together

_PACKAGES = ("ds_ext", "torch", "deepspeed")


def optimizer_facts(optimizer: Any) -> Facts:
    """Return the class and the defaults of the caller's optimizer. Its groups may differ by stage."""
    if optimizer is None:
        return {}
    defaults = getattr(optimizer, "defaults", {})
    return {"optimizer": type(optimizer).__name__, **setting_facts(defaults, "optimizer.defaults.")}


def stage_facts(model: PipelineModule, groups: Iterable[Any]) -> Facts:
    """Return a text -> checksum of the parameters' shapes, dtypes and optimizer options, for every stage of this rank.

    Args:
        model: module with the stages.
        groups: parameters, or parameter groups of an optimizer.
    """
    options: dict[int, str] = {}
    for group in groups:
        if isinstance(group, Mapping):
            values = {k: value for k, value in group.items() if isinstance(value, (int, float, str, tuple))}
            text = as_text(values)
            options |= {id(parameter): text for parameter in group["params"]}
    _, _, tensor = model.layout.coordinates(model.global_rank)
    place = f", tensor-parallel rank {tensor}" if model.layout.tensor_parallel_size > 1 else ""
    role = f"{model.role_name} rank of " if model.role_name else ""
    facts = {}
    for stage in model.stages:
        parameters = model.stage_parameters(stage)
        facts[f"{role}stage {stage}{place}: parameters"] = checksum(
            f"{tuple(p.shape)} {p.dtype} {options.get(id(p))};".encode() for p in parameters
        )
    return facts


def data_facts(model: PipelineModule, data: Any) -> Facts:
    """Return the type and length of ``training_data`` and a checksum of its first sample; empty if it is not read here.

    Ranks with the first or the last stage read it. The checksum is omitted if reading the sample fails, which the first
    step reports, or if two reads give different values, as with random augmentation.
    """
    last_stage = model.layout.placement.stages - 1
    reads_data = 0 in model.stages or last_stage in model.stages
    if data is None or not reads_data or not hasattr(data, "__len__"):
        return {}
    facts = {"training_data": f"{type(data).__name__} of {len(data)} samples"}
    with contextlib.suppress(Exception), _preserve_generators():
        sample = _seeded_bytes(lambda: data[0])
        if sample == _seeded_bytes(lambda: data[0]):
            facts["training_data: first sample"] = checksum([sample])
    return facts


@contextlib.contextmanager
def _preserve_generators() -> Iterator[None]:
    """Context that restores the states of the global random generators of the CPU on exit."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _seeded_bytes(read: Callable[[], Any]) -> bytes:
    """Return the numbers in the result of ``read()``, as bytes.

    Seeds the global generators of the CPU; the caller restores them. Strings and objects are ignored, because they may
    differ between hosts (paths, addresses).
    """
    random.seed(0)
    np.random.seed(0)
    # torch.manual_seed() also seeds GPUs, whose states are not restored.
    torch.default_generator.manual_seed(0)
    parts = []
    for leaf in tree_leaves(read()):
        if isinstance(leaf, torch.Tensor):
            # Copy only the elements of the leaf: a view's storage may be the whole dataset.
            parts.append(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
            parts.append(leaf.tobytes())
        elif isinstance(leaf, bool | int | float | complex | bytes):
            parts.append(repr(leaf).encode())
    return b";".join(parts)


def run_facts(model: PipelineModule, data: Facts) -> dict[str, Any]:
    """Return the facts of a run. All ranks must call this together.

    ``ranks`` has an object for every rank: ``host``, ``name`` of its accelerator or "cpu", ``device`` of the pipeline
    group, and the number of its ``parameters``. Only rank 0 has the text of the plan.

    Args:
        data: facts of the data that this rank reads, from :func:`data_facts`.
    """
    ranks, rates, data_of_ranks = zip(
        *together(lambda: (_rank_facts(model), _dropout_rates(model), data)), strict=True
    )
    plan, layout, trace_dir = model.plan, model.layout, model.plan.settings.trace.dir
    return {
        "schedule": plan.timetable.schedule,
        "world_size": layout.world_size,
        "pipeline_parallel_size": layout.placement.devices_per_pipe,
        "tensor_parallel_size": layout.tensor_parallel_size,
        "data_parallel_size": layout.data_parallel_size,
        "micro_batches": plan.sizes.micro_batches,
        "micro_batch_size": plan.sizes.micro_batch_size,
        "train_batch_size": plan.sizes.train_batch_size,
        "precision": precision(plan.job.deepspeed),
        "zero_stage": zero_stage(plan.job.deepspeed),
        "dropout": sorted(set().union(*rates)),
        "data": {key: fact for facts in data_of_ranks for key, fact in facts.items()},
        "ranks": list(ranks),
        "versions": {
            "python": platform.python_version(),
            **{name: package_version(name) or "not installed" for name in _PACKAGES},
        },
        "trace_dir": trace_dir and os.path.abspath(trace_dir),
        "plan": plan_text(model, ranks) if model.global_rank == 0 else "",
        "config": plan.job.deepspeed,
    }


def _rank_facts(model: PipelineModule) -> dict[str, Any]:
    """Return this rank's object of ``ranks``."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if model.placeholder is not None:
        parameters -= model.placeholder.numel()
    name = torch.cuda.get_device_name() if get_accelerator().device_name() == "cuda" else "cpu"
    return {"host": platform.node(), "name": name, "device": model.device_index, "parameters": parameters}


def _dropout_rates(model: PipelineModule) -> set[float]:
    """Return the attributes ``p`` of this rank's dropout layers, of any class with "dropout" in its name."""
    layers = (layer for layer in model.modules() if "dropout" in type(layer).__name__.lower())
    return {float(p) for layer in layers if isinstance(p := getattr(layer, "p", None), int | float)}


def plan_text(model: PipelineModule, ranks: Sequence[dict[str, Any]]) -> str:
    """Return the text of the plan, with the largest number of parameters on a rank of every device."""
    max_parameters: dict[int, int] = {}  # by device
    for rank in ranks:
        device = rank["device"]
        max_parameters[device] = max(rank["parameters"], max_parameters.get(device, 0))
    hosts = [rank["host"] for rank in ranks]
    return describe(
        model.plan,
        boundaries=model.parts,
        layer_names=model.layer_names,
        parameters=[max_parameters[device] for device in sorted(max_parameters)],
        grid=model.plan.sizes.micro_batches <= GRID_MICRO_BATCHES,
        hosts=[hosts.index(host) for host in hosts],
    )
