"""``ds_ext.initialize``: the same arguments and result as ``deepspeed.initialize``."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig

from ..comm.groups import limit_waits, watch_hosts
from ..comm.spin import usable_cores
from ..config.deepspeed_check import check_deepspeed
from ..config.deepspeed_json import (
    fp32_sums_of_bf16,
    half_through_zero,
    precision,
    precision_section,
    require_monitors,
)
from ..config.job import JobConfig, load_config
from ..errors import ConfigError
from ..launch.failure import rank, world_size
from ..launch.job_facts import code_facts, setting_facts
from ..launch.roll_call import Facts, compare, meet, one_refusal
from ..parallel.fbd import FORWARD_ROLE, DisaggregatedLayout
from ..planner.job_plan import JobPlan
from .engine import PipelineEngine
from .fbd.backward import BackwardEngine
from .fbd.forward import ForwardEngine
from .module import PipelineModule
from .replica_facts import data_facts, optimizer_facts, stage_facts

_NOT_ON_FORWARD_RANKS = ("optimizer", "scheduler", "zero_optimization", "fp16", "bf16", "bfloat16")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(job: JobConfig) -> None:
    """Raise ConfigError if the device of this rank does not support the precision of the job.

    Uses no process group, so that every rank can call it before there is one.
    """
    wanted, accelerator = precision(job.deepspeed), get_accelerator()
    if wanted == "fp32":
        return
    # To answer, an accelerator may allocate on its current device: select the device that DeepSpeed will select.
    accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    supports = {"bf16": accelerator.is_bf16_supported, "fp16": accelerator.is_fp16_supported}
    if supports[wanted]():
        return
    other = "fp16" if wanted == "bf16" else "bf16"
    half = f'"{other}": {{"enabled": true}} or ' if supports[other]() else ""
    key = f"{precision_section(job.deepspeed)}.enabled"
    raise ConfigError(
        f"{job.flags.get(key, key)}: the device {accelerator.device_name()} of this host does not support {wanted} "
        f"(got true). Use {half}fp32, which needs no section."
    )


def init_distributed(timeout_s: float = 120.0, facts: Facts | None = None) -> None:
    """Start the process group: nccl on CUDA, gloo on CPU. Does nothing when it runs already.

    First all ranks compare versions, source code and ``facts``. On CPU DeepSpeed would compile a shared-memory op
    first, which only its inference uses: half a minute, and a compiler, for nothing.

    Args:
        timeout_s: how long to wait for the other ranks, in seconds.
        facts: what else must be the same on all ranks, as text by key.

    Raises:
        ConfigError: ranks differ, one of them has failed, or the port is taken.
        TransportError: a rank did not come in time.
    """
    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads_of_rank())
    if not dist.is_initialized():
        try:
            # Rank 0 serves the store as long as the roll call lives; the process group shares it.
            call = meet(rank(), world_size(), timeout_s)
            if call is not None:
                call.answer({**code_facts(), **(facts or {})}, timeout_s)
            deepspeed.init_distributed(
                get_accelerator().communication_backend_name(),
                verbose=False,
                timeout=timedelta(seconds=timeout_s),
            )
        except torch.distributed.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise ConfigError(
                f"port {os.environ.get('MASTER_PORT')} is taken on this host, perhaps by another job: give "
                f"the launcher --master_port with a free one."
            ) from None
    watch_hosts()
    os.environ.setdefault("LOCAL_RANK", "0")


def threads_of_rank() -> int:
    """Number of threads for torch on CPU: the usable cores, divided by the ranks that share them.

    Ranks that each take all cores slow each other down several times over.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    with contextlib.suppress(OSError):  # the launcher has ended
        if os.sched_getaffinity(0) != os.sched_getaffinity(os.getppid()):
            ranks = 1  # the launcher has pinned this rank to its own cores
    return max(1, int(usable_cores() // ranks))


def initialize(
    args: Any = None,
    model: PipelineModule | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Mapping[str, Any] | None = None,
) -> tuple[PipelineEngine, Any, Any, Any]:
    """Build the engine for a :class:`ds_ext.PipelineModule`.

    Returns ``(engine, optimizer, training_dataloader, lr_scheduler)`` as ``deepspeed.initialize`` does;
    ``training_dataloader`` is None: micro-batches of ``training_data`` are fetched by id, in order, epoch after epoch.

    Args:
        config: may be left out; else the JSON that the PipelineModule was given.

    Raises:
        ConfigError: the model is not ours, ``config`` is another JSON than its, DeepSpeed refuses the JSON, the device
            does not support its precision, ``training_data`` has no samples by index, or ranks differ.
    """
    if not isinstance(model, PipelineModule):
        raise ConfigError(
            f"ds_ext.initialize needs a ds_ext.PipelineModule; got {type(model).__name__}. Build it from the "
            f"same list of layers: ds_ext.PipelineModule(layers, config, loss_fn=...)."
        )
    init_distributed()
    with one_refusal():
        if mpu is not None or mesh_param is not None:
            raise ConfigError("mpu and mesh_param must be None: the PipelineModule brings its own grid.")
        for source in (config, config_params, getattr(args, "deepspeed_config", None)):
            if source is not None:
                _require_same_json(source, model.plan)
                break
        job, sizes = model.plan.job, model.plan.sizes
        _require_samples_by_index(training_data)
        check_precision(job)
        check_deepspeed(job.deepspeed, optimizer=optimizer is None, scheduler=lr_scheduler is None)
        if rank() == 0:
            require_monitors(job.deepspeed)
    config_dict = dict(
        fp32_sums_of_bf16(half_through_zero(job.deepspeed)),
        train_micro_batch_size_per_gpu=sizes.micro_batch_size,
        gradient_accumulation_steps=sizes.gradient_accumulation_steps,
        train_batch_size=sizes.train_batch_size,
    )
    # Also for the collectives of the constructors below.
    limit_waits(model.plan.settings.transport_options.timeout_s)
    model_parameters = None if model_parameters is None else [_with_list(one) for one in model_parameters]
    compare(
        {
            **code_facts(),
            **setting_facts({k: v for k, v in job.deepspeed.items() if k != "ds_ext"}),
            **optimizer_facts(optimizer),
        },
        of_replicas={
            **stage_facts(model, getattr(optimizer, "param_groups", model_parameters) or []),
            **data_facts(model, training_data),
        },
    )
    if optimizer is not None or "optimizer" in config_dict:
        _require_parameters(model)
    engine = _make_engine(
        model,
        config_dict,
        args=_without_config(args),
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=model.mpu(),
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
    )
    engine._configure_python_gc()
    limit_waits(job.ds_ext.transport_options.timeout_s)
    return engine, engine.optimizer, None, engine.lr_scheduler


def _make_engine(model: PipelineModule, config: Mapping[str, Any], **kwargs: Any) -> PipelineEngine:
    """Return the engine of this rank's role.

    Args:
        config: DeepSpeed's JSON, complete.
        **kwargs: other arguments of the engine.

    Raises:
        ConfigError: something in the JSON does not go with forward ranks.
    """

    def make_config(role_config: Mapping[str, Any]) -> DeepSpeedConfig:
        return DeepSpeedConfig(dict(role_config), model.mpu())

    layout = model.layout
    if not isinstance(layout, DisaggregatedLayout):
        return PipelineEngine(model=model, config=config, config_class=make_config(config), **kwargs)
    if layout.role(dist.get_rank()) != FORWARD_ROLE:
        return BackwardEngine(model=model, config=config, config_class=make_config(config), **kwargs)
    ours = {key: value for key, value in config.items() if key not in _NOT_ON_FORWARD_RANKS}
    ours["gradient_accumulation_steps"] *= layout.placement.replicas
    return ForwardEngine(
        dtype=_DTYPES[precision(config)],
        model=model,
        config=ours,
        config_class=make_config(ours),
        **{**kwargs, "optimizer": None, "model_parameters": None, "lr_scheduler": None},
    )


def _with_list(group: Any) -> Any:
    """Return a parameter, or a parameter group whose parameters can be read more than once."""
    if not isinstance(group, Mapping):
        return group
    parameters = group["params"]
    return {**group, "params": [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)}


def _require_samples_by_index(training_data: Any) -> None:
    """Refuse training data whose samples cannot be fetched by index in any order."""
    has_both = all(hasattr(type(training_data), name) for name in ("__len__", "__getitem__"))
    iterable = isinstance(training_data, torch.utils.data.IterableDataset)
    if training_data is not None and has_both and not iterable and len(training_data) == 0:
        raise ConfigError("training_data: it has no samples (got a length of 0). Give at least one.")
    if training_data is not None and (iterable or not has_both):
        raise ConfigError(
            f"training_data: it needs __len__ and __getitem__, as each rank fetches samples by index (got "
            f"{type(training_data).__name__}). For a stream make one iterator and pass it to every step: "
            f"iterator = iter(loader); engine.train_batch(data_iter=iterator)."
        )


def _require_same_json(config: str | Mapping[str, Any], plan: JobPlan) -> None:
    """Refuse another JSON than that of the PipelineModule; only the "ds_ext" section may be missing."""
    theirs = load_config(config).deepspeed
    ours, theirs = _flat(plan.job.deepspeed, "ds_ext" in theirs), _flat(theirs, True)
    for key in sorted({*ours, *theirs}):
        if ours.get(key) != theirs.get(key):
            raise ConfigError(
                f"{key}: PipelineModule and initialize() were given different JSONs (got {ours.get(key)!r} and "
                f"{theirs.get(key)!r}). Give both the same, or leave config out of initialize()."
            )


def _flat(config: Mapping[str, Any], with_section: bool) -> dict[str, Any]:
    """Return a JSON with the keys of our section as ``ds_ext.key``, without the defaults of the scripts' flags."""
    section = config.get("ds_ext", {}) if with_section else {}
    ours = {f"ds_ext.{key}": value for key, value in section.items() if key != "train"}
    return {key: value for key, value in config.items() if key != "ds_ext"} | ours


def _require_parameters(model: PipelineModule) -> None:
    """Raise ConfigError on all ranks if one has no trainable parameter; DeepSpeed would refuse it while others wait."""
    trained = [stage for stage in model.stages if model.stage_parameters(stage)]
    counts: list[int | None] = [None] * dist.get_world_size()
    torch.distributed.all_gather_object(counts, len(trained))
    empty = [rank for rank, count in enumerate(counts) if count == 0]
    if empty:
        raise ConfigError(
            f"rank{'s' if len(empty) > 1 else ''} {', '.join(map(str, empty))} would hold no trainable parameter: give "
            f"partition_method boundaries that leave every rank some, or use fewer stages."
        )


def _without_config(args: Any) -> Any:
    """Return the caller's arguments without the JSON's path, as the engine gets the dict instead of the file."""
    if getattr(args, "deepspeed_config", None) is None:
        return args
    args = copy.copy(args)
    args.deepspeed_config = None
    return args


def weight_decay_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: matrices decay by its setting, vectors (biases, norms) not at all.

    The convention of GPT-2's, BERT's and Megatron's training. Groups that would be empty are left out; ranks that hold
    the same stages get the same groups in the same order, as ZeRO needs them.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1]},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
