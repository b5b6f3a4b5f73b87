"""Facts of a job: those that ranks compare in the roll call (optimizer, stages, data), and those of the run record."""

from __future__ import annotations

import contextlib
import os
import platform
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    """Return a checksum for every stage of this rank, of its parameters' shapes, dtypes and optimizer options.

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
    role = f"{model.role} rank of " if model.role else ""
    facts = {}
    for stage in model.stages:
        parameters = model.stage_parameters(stage)
        facts[f"{role}stage {stage}{place}: parameters"] = checksum(
            f"{tuple(p.shape)} {p.dtype} {options.get(id(p))};".encode() for p in parameters
        )
    return facts


def data_facts(model: PipelineModule, data: Any) -> Facts:
    """Return the type and length of ``training_data`` and a checksum of its first sample, on ranks that read it.

    The checksum is omitted if reading the sample twice gives different values, as with random augmentation.
    """
    ends = {0, model.layout.placement.stages - 1}
    if data is None or not ends & set(model.stages) or not hasattr(data, "__len__"):
        return {}
    facts = {"training_data": f"{type(data).__name__} of {len(data)} samples"}
    with contextlib.suppress(Exception), _kept_generators():  # the first step reports errors
        first, again = _bytes_of(lambda: data[0]), _bytes_of(lambda: data[0])
        if first == again:
            facts["training_data: first sample"] = checksum([first])
    return facts


@contextlib.contextmanager
def _kept_generators() -> Iterator[None]:
    """Context that restores the states of the global random generators on exit."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _bytes_of(read: Callable[[], Any]) -> bytes:
    """Return the numbers in the result of ``read()``, called with seeded generators, as bytes.

    Strings and objects are ignored, because they may differ between hosts (paths, addresses).
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
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
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if model.placeholder is not None:
        parameters -= model.placeholder.numel()
    name = torch.cuda.get_device_name() if get_accelerator().device_name() == "cuda" else "cpu"
    own = {"host": platform.node(), "name": name, "device": model.device_index, "parameters": parameters}
    layers = (layer for layer in model.modules() if "dropout" in type(layer).__name__.lower())
    dropout = {p for layer in layers if isinstance(p := getattr(layer, "p", None), int | float)}
    gathered = together(lambda: (own, dropout, data))
    ranks: list[dict[str, Any]] = [one for one, _, _ in gathered]
    plan, layout, trace = model.plan, model.layout, model.plan.settings.trace.dir
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
        "dropout": sorted({float(p) for _, of_rank, _ in gathered for p in of_rank}),
        "data": {key: fact for _, _, of_rank in gathered for key, fact in of_rank.items()},
        "ranks": ranks,
        "versions": {
            "python": platform.python_version(),
            **{name: package_version(name) or "not installed" for name in _PACKAGES},
        },
        "trace_dir": trace and os.path.abspath(trace),
        "plan": plan_text(model, ranks) if model.global_rank == 0 else "",
        "config": plan.job.deepspeed,
    }


def plan_text(model: PipelineModule, ranks: list[dict[str, Any]]) -> str:
    """Return the text of the plan, with the largest number of parameters on a rank of every device."""
    of_device: dict[int, int] = {}
    for rank in ranks:
        of_device[rank["device"]] = max(rank["parameters"], of_device.get(rank["device"], 0))
    plan, hosts = model.plan, [rank["host"] for rank in ranks]
    return describe(
        plan,
        boundaries=model.parts,
        layer_names=model.layer_names,
        parameters=[of_device[device] for device in sorted(of_device)],
        grid=plan.sizes.micro_batches <= GRID_MICRO_BATCHES,
        hosts=[hosts.index(host) for host in hosts],
    )
