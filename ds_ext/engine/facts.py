"""Facts of a job: those that ranks compare in the roll call (optimizer, stages, data), and those of the run record."""

from __future__ import annotations

import contextlib
import os
import platform
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.constants import PIPE_REPLICATED
from torch.utils._pytree import tree_leaves

from ..config.deepspeed_json import precision, zero_stage
from ..environment import package_version
from ..launch.job_facts import as_text, checksum, setting_facts
from ..launch.roll_call import Facts
from ..planner.job_text import describe
from ..planner.parameter_bytes import PRECISIONS
from ..tensor_parallel import is_sharded
from .all_ranks import on_all_ranks
from .module import PipelineModule
from .parameters import parameters_of
from .ties.tied_layers import tied_weights
from .types import Groups, Json, Optimizer, Record, Source

_PACKAGES = ("ds_ext", "torch", "deepspeed")


def optimizer_facts(optimizer: Optimizer) -> Facts:
    """Return the class and the defaults of the caller's optimizer. Its groups may differ by stage."""
    if optimizer is None:
        return {}
    defaults = getattr(optimizer, "defaults", {})
    return {"optimizer": type(optimizer).__name__, **setting_facts(defaults, "optimizer.defaults.")}


def stage_facts(model: PipelineModule, groups: Groups) -> Facts:
    """Return a text -> checksum of the parameters' shapes, dtypes and optimizer options, for every stage of this rank.

    Tied weights have a further text, because all ranks that hold them must train them alike. ``groups`` are parameters,
    or parameter groups of an optimizer.
    """
    options: dict[int, str] = {}
    for group in groups:
        if isinstance(group, Mapping):
            kinds = (int, float, str, tuple)
            values = {k: value for k, value in group.items() if isinstance(value, kinds) and k != "name"}
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
    tied: dict[str, Sequence[torch.Tensor]] = {
        f"layer {shared.layer} {shared.key}": [shared.parameter]
        for shared in model.shared
        if shared.whole and shared.parameter is not None
    }
    for key, tie in model.tied_comms.items():
        tied[f"tie {key}"] = tied_weights(tie["module"], tie["weight_attr"])
    for name, weights in tied.items():
        texts = [str(options.get(id(weight))) if weight.requires_grad else "frozen" for weight in weights]
        facts[f"{name}: optimizer options of tied weights"] = ", ".join(texts)
    return facts


def data_facts(model: PipelineModule, data: Source) -> Facts:
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
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _seeded_bytes(read: Callable[[], object]) -> bytes:
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


def run_facts(model: PipelineModule, data: Facts) -> Record:
    """Return the facts of a run. All ranks must call this together.

    ``ranks`` has an object for every rank: ``host``, ``name`` of its accelerator or "cpu", ``device`` of the pipeline
    group, and the number of its ``parameters``. Only rank 0 has the text of the plan. ``data`` is from
    :func:`data_facts`.
    """
    ranks, rates, data_of_ranks, shares, empty, dtypes = zip(
        *on_all_ranks(
            lambda: (
                _rank_facts(model),
                _dropout_rates(model),
                data,
                _share(model),
                _empty_stages(model),
                {p.dtype for p in model.layer_parameters() if p.requires_grad},
            )
        ),
        strict=True,
    )
    total, trained = (sum(counts) for counts in zip(*shares, strict=True))
    plan, layout, trace_dir = model.plan, model.layout, model.plan.settings.trace.dir
    facts = {
        "schedule": plan.timetable.schedule,
        "world_size": layout.world_size,
        "pipeline_parallel_size": layout.placement.devices_per_pipe,
        "tensor_parallel_size": layout.tensor_parallel_size,
        "data_parallel_size": layout.data_parallel_size,
        "micro_batches": plan.sizes.micro_batches,
        "micro_batch_size": plan.sizes.micro_batch_size,
        "train_batch_size": plan.sizes.train_batch_size,
        "precision": _precision_text(plan.job.deepspeed, set().union(*dtypes)),
        "zero_stage": zero_stage(plan.job.deepspeed),
        "dropout": sorted(set().union(*rates)),
        "data": {key: fact for facts in data_of_ranks for key, fact in facts.items()},
        "ranks": list(ranks),
        "parameters": total,
        "trained_parameters": trained,
        "empty_stages": sorted(set().union(*empty)),
        "versions": {
            "python": platform.python_version(),
            **{name: package_version(name) or "not installed" for name in _PACKAGES},
        },
        "trace_dir": trace_dir and os.path.abspath(trace_dir),
        "config": plan.job.deepspeed,
    }
    return {**facts, "plan": plan_text(model, facts) if model.global_rank == 0 else ""}


def _rank_facts(model: PipelineModule) -> Record:
    parameters = sum(parameter.numel() for parameter in model.layer_parameters())
    name = torch.cuda.get_device_name() if get_accelerator().device_name() == "cuda" else "cpu"
    return {"host": platform.node(), "name": name, "device": model.device_index, "parameters": parameters}


def _share(model: PipelineModule) -> tuple[int, int]:
    """Return the parameters, and the trained ones, that this rank counts. No replica, shard or tie counts twice."""
    layout = model.layout
    device, data, tensor = layout.coordinates(model.global_rank)
    counts = [0, 0]
    if data or tensor or all(device != devices[0] for devices in layout.placement.replica_groups):
        return 0, 0
    for local in parameters_of(model, 1).values():
        if getattr(local.parameter, PIPE_REPLICATED, False):
            continue
        shards = layout.tensor_parallel_size if is_sharded(local.parameter) else 1
        size = local.parameter.numel() * shards
        counts[0] += size
        counts[1] += size * local.parameter.requires_grad
    return counts[0], counts[1]


def _empty_stages(model: PipelineModule) -> list[int]:
    return [
        stage
        for stage in model.stages
        if not any(
            next(layer.parameters(), None) is not None for layer in model.stage_modules(stage).values()
        )
    ]


def _dropout_rates(model: PipelineModule) -> set[float]:
    layers = (layer for layer in model.modules() if "dropout" in type(layer).__name__.lower())
    return {float(p) for layer in layers if isinstance(p := getattr(layer, "p", None), int | float)}


def plan_text(model: PipelineModule, facts: Json, *, verbose: bool = True) -> str:
    """Return the text of the plan, with the largest number of parameters on a rank of every device."""
    max_parameters: dict[int, int] = {}  # by device
    for rank in facts["ranks"]:
        device = rank["device"]
        max_parameters[device] = max(rank["parameters"], max_parameters.get(device, 0))
    hosts = [rank["host"] for rank in facts["ranks"]]
    return describe(
        model.plan,
        boundaries=model.parts[: model.num_stages + 1],
        layer_names=model.layer_names,
        model=_model_text(facts["parameters"], facts["trained_parameters"], facts["precision"]),
        parameters=[max_parameters[device] for device in sorted(max_parameters)],
        empty_stages=facts["empty_stages"],
        hosts=[hosts.index(host) for host in hosts],
        verbose=verbose,
        gpus=get_accelerator().device_name() == "cuda",
    )


def _precision_text(config: Json, dtypes: Collection[torch.dtype]) -> str:
    """Return the precision that the JSON sets; without one, that of trained weights if some are in half precision."""
    halves = [name for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)) if dtype in dtypes]
    if precision(config) != "fp32" or not halves:
        return precision(config)
    names = [*halves, *(["fp32"] if torch.float32 in dtypes else [])]
    return f"{' and '.join(names)} weights, {'fp32' if zero_stage(config) else 'no'} master weights"


def _model_text(total: int, trained: int, precision: str) -> str:
    share = f", {trained:,} of them trained ({trained / total:.2%})" if trained < total else ""
    weights = "" if precision in PRECISIONS else f"; {precision}"  # not in the JSON
    return f"{total:,} parameters{share}{weights}"
