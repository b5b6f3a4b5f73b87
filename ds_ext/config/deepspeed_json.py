"""DeepSpeed's part of the JSON: settings that ds_ext rejects, precision and ZeRO stage. Needs no torch.

:mod:`.deepspeed_check` asks the installed DeepSpeed whether it accepts the keys.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Collection, Mapping
from typing import Any

import hjson

from ..errors import ConfigError, Problems

# Section -> package that rank 0 imports for it, and its name for pip.
_MONITORS = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "comet": ("comet_ml", "'comet_ml>=3.41.0'"),
}
_SWITCHED = ("bf16", "bfloat16", "fp16", *_MONITORS)
_OBJECTS = ("optimizer", "optimizer.params", "scheduler", "scheduler.params", "zero_optimization", *_SWITCHED)
_MAY_BE_NULL = ("optimizer.params", "scheduler.params", "bf16")

# Settings without effect in this engine, which replaces DeepSpeed's forwards, messages, data loader and checkpoints and
# has no ZeRO stage 3: key -> (accepted values, alternative). tests/unit/config/test_keys_with_effect.py has the others.
_OFF = (False, None)
_STAGE_3 = 'ZeRO stage 3 alone uses it. Use "stage": 1, or more devices'
UNAPPLIED: dict[str, tuple[tuple[Any, ...], str]] = {
    "torch_autocast.enabled": (_OFF, 'For half precision set "bf16": {"enabled": true}'),
    "fp16.auto_cast": (_OFF, "The first layer casts its inputs"),
    "flops_profiler.enabled": (
        _OFF,
        "torch.profiler shows every computation under its name in the timetable",
    ),
    "data_efficiency.enabled": (_OFF, "Order or shorten the samples in the dataset"),
    "autotuning.enabled": (_OFF, 'Set "schedule": "auto" in the "ds_ext" section'),
    "hybrid_engine.enabled": (_OFF, "Generate with the model that `python -m ds_ext convert --to hf` writes"),
    "compile.deepcompile": (_OFF, "Call engine.compile()"),
    "sequence_parallel_size": ((1, None), 'Set "tensor_parallel_size" in the "ds_ext" section'),
    "seq_parallel_communication_data_type": (("fp32", None), "Set communication_data_type"),
    "tensor_parallel.tensor_parallel.tp_size": ((1,), 'Set "tensor_parallel_size" in the "ds_ext" section'),
    "use_data_before_expert_parallelism": (_OFF, "Tensor-parallel ranks divide the experts"),
    "managed_gradient_accumulation": ((True,), "train_batch() runs all micro-batches of a step"),
    "pipeline.stages": (("auto",), 'Set "pipeline_parallel_size" in the "ds_ext" section'),
    "pipeline.partition": (("best",), "Pass partition_method to PipelineModule"),
    "pipeline.seed_layers": ((*_OFF, True), "Pass seed_layers to PipelineModule"),  # True by default
    "pipeline.pipe_partitioned": (_OFF, "Each tensor-parallel rank sends whole activations"),
    "pipeline.grad_partitioned": (_OFF, "Each tensor-parallel rank sends whole gradients"),
    "checkpoint.load_universal": (_OFF, "Every checkpoint loads with any schedule and sizes"),
    "checkpoint.use_node_local_storage": (_OFF, "Save to a folder that all hosts share"),
    "checkpoint.writer": ((None,), "All ranks write at the same time"),
    "checkpoint.checkpoint_serialization": ((True,), "The format of the files is fixed"),
    "datastates_ckpt": (({}, None), "All ranks write at the same time"),
    "weight_quantization.quantized_initialization": (({},), "Quantize the weights in the layers"),
    "weight_quantization.post_init_quant": (({},), "Quantize the weights in the layers"),
    "zero_optimization.round_robin_gradients": (
        _OFF,
        "Every rank updates consecutive parameters, which checkpoints rely on",
    ),
    "zero_optimization.zenflow": ((None,), "offload_optimizer works without it"),
    "zero_optimization.offload_optimizer.super_offload": (_OFF, _STAGE_3),
    "zero_optimization.offload_param.device": (("none", None), _STAGE_3),
    "zero_optimization.cpu_offload_param": (_OFF, _STAGE_3),
    "zero_optimization.zero_hpz_partition_size": ((1,), _STAGE_3),
    "zero_optimization.zero_quantized_weights": (_OFF, _STAGE_3),
    "zero_optimization.zero_quantized_nontrainable_weights": (_OFF, _STAGE_3),
    "zero_optimization.zero_quantized_gradients": (_OFF, _STAGE_3),
}

# Settings that are accepted with a note, because they have less effect than they seem to have: key -> (values without a
# note, note). docs/from_deepspeed.md has the same keys.
_AT_INFO = "its lines are messages of level info: set DS_EXT_LOG_LEVEL=info"
NOTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "wall_clock_breakdown": (_OFF, 'ignored. Set "trace" in the "ds_ext" section for the time of every op'),
    "activation_checkpointing": (
        ({}, None),
        "ignored, unless the script calls deepspeed.checkpointing.configure(None, deepspeed_config=engine.config). Set "
        '"pipeline": {"activation_checkpoint_interval": 1} to recompute layers',
    ),
    "zero_optimization.offload_optimizer.device": (
        ("none", None),
        'ignored in fp32 at ZeRO stage 0. Set "stage": 1',
    ),
    "aio": (({}, None), "ignored. Only ZeRO stage 3 reads and writes NVMe"),
    "dataloader_drop_last": (_OFF, "ignored. Every batch is full"),
    "disable_allgather": (_OFF, "ignored, as in DeepSpeed"),
    "comms_logger.enabled": (_OFF, f"{_AT_INFO}. They do not include the messages of the pipeline"),
    "dump_state": (_OFF, _AT_INFO),
}

_BUCKET = 500_000_000
_FUSED = ("adam", "adamw", "lamb", "lion")

# With this difflib ratio, "gradient_clip" is a typo of "gradient_clipping", but "comment" is not a typo of "comet".
RESEMBLES = 0.84


def check_deepspeed_keys(config: Mapping[str, Any], ours: Collection[str]) -> None:
    """Raise ConfigError for misplaced or misspelled keys of ds_ext, and for settings that a pipeline cannot use.

    ``ours`` are the keys of the "ds_ext" section that must not be at the top level.
    """
    problems = Problems()
    for key, value in config.items():
        if key in ours:
            problems.add(f'{key}: misplaced (got {value!r} at the top level). Move it into "ds_ext".')
        if key != "ds_ext" and difflib.get_close_matches(key.lower(), ["ds_ext"], cutoff=RESEMBLES):
            problems.add(f"{key}: unknown key (got {value!r}). Did you mean ds_ext?")
    for path in _OBJECTS:
        value = value_at(config, path, {})
        old_form = isinstance(value, bool) and path == "zero_optimization"
        if not (isinstance(value, Mapping) or (value is None and path in _MAY_BE_NULL) or old_form):
            problems.add(f"{path}: must be an object (got {value!r}). Use {{...}} or omit it.")
    for path in [f"{name}.enabled" for name in _SWITCHED]:
        value = value_at(config, path, False)
        if not isinstance(value, bool) and value != "auto":
            problems.add(f"{path}: must be true or false (got {value!r}).")
    stage = value_at(config, "zero_optimization.stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, "0", "1"):
        problems.add(
            f"zero_optimization.stage: pipelines support only 0 and 1, because the gradients of several micro-batches "
            f'are in flight (got {stage!r}). Use {{"stage": 1}}, which shards the optimizer states.'
        )
    if _is_enabled(config, "bf16") and _is_enabled(config, "fp16"):
        problems.add("bf16.enabled, fp16.enabled: both are set (got true). Set only one.")
    for path, (accepted, instead) in UNAPPLIED.items():
        if (value := value_at(config, path, accepted[0])) not in accepted:
            shown = json.dumps(value, default=repr)
            problems.add(f"{path}: has no effect in this engine (got {shown}). Omit it. {instead}.")
    problems.raise_all()


def notes_on_keys(config: Mapping[str, Any]) -> list[str]:
    """Return a note for each key of NOTED that the JSON sets, and for a precision "auto"."""
    precisions = [f"{name}.enabled" for name in ("bf16", "bfloat16", "fp16")]
    automatic = [path for path in precisions if value_at(config, path, False) == "auto"]
    notes = [f'{path}: "auto" is off, as in DeepSpeed. Write true or false' for path in automatic]
    for path, (silent, note) in NOTED.items():
        offloads = path.endswith("offload_optimizer.device") and zero_stage(half_through_zero(config)) > 0
        if not offloads and value_at(config, path, silent[0]) not in silent:
            notes.append(f"{path}: {note}")
    return notes


def parse_json(text: str, name: str) -> Any:
    """Return the value of a JSON, which may have comments and trailing commas, as DeepSpeed's reader permits."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                lines = [str(n) for n, line in enumerate(text.splitlines(), 1) if f'"{key}"' in line]
                raise ConfigError(
                    f"{name}: key {key!r} appears twice in one object (got it on lines {', '.join(lines)}). Remove "
                    "one of the two."
                )
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=without_duplicates)
    except json.JSONDecodeError as error:
        strict = error

    def without_swallowed_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # hjson reads `1 "b": 2` after a missing comma as a string without quotes.
        for key, value in pairs:
            if isinstance(value, str) and '"' in value and json.dumps(value, ensure_ascii=False) not in text:
                raise ConfigError(
                    f"{name}: value of key {key!r}: not JSON (got {value}). Add the missing comma."
                )
        return without_duplicates(pairs)

    try:
        return hjson.loads(text, object_pairs_hook=without_swallowed_keys)
    except hjson.HjsonDecodeError as error:
        # hjson reports the end of the text for most errors. JSON's error is useless at a comment or a trailing comma.
        at_extension = text[strict.pos : strict.pos + 1] in ("/", "#", "}", "]")
        cause = error if at_extension else strict
        raise ConfigError(f"{name}: line {cause.lineno}, column {cause.colno}: {cause.msg}.") from None


def require_monitors(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for enabled monitors whose packages are not installed here. Only rank 0 uses them."""
    problems = Problems()
    for section, (package, requirement) in _MONITORS.items():
        if not _is_enabled(config, section):
            continue
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:  # a folder such as ./wandb is a namespace package
            problems.add(
                f'{section}: the package {package!r} is not installed on the host of rank 0 (got "enabled": true). '
                f"Install it with `pip install {requirement}`, or remove the section."
            )
    problems.raise_all()


def half_through_zero(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config``, with ZeRO stage 1 if it sets fp16 or bf16 without ZeRO.

    Without ZeRO, DeepSpeed's fp16 optimizers divide a pipeline's gradients by a loss scale that was never applied, and
    its bf16 optimizer accumulates gradients in bf16. Stage 1 has the same arithmetic as stage 0, with the optimizer
    states sharded over the data-parallel ranks. All optimizers that stage 0 accepts are still accepted. An explicit
    ``grad_accum_dtype`` bf16 stays unchanged.
    """
    zero, types = config.get("zero_optimization"), config.get("data_types")
    in_bf16 = isinstance(types, Mapping) and types.get("grad_accum_dtype") == "bf16"
    half = precision(config)
    if zero_stage(config) or half == "fp32" or (half == "bf16" and in_bf16):
        return dict(config)
    section = {**zero, "stage": 1} if isinstance(zero, Mapping) else {"stage": 1}
    return {"zero_allow_untested_optimizer": True, **config, "zero_optimization": section}


def fp32_sums_of_bf16(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config``, with bf16 gradients accumulated and reduced in fp32, unless it sets the dtypes.

    DeepSpeed's default is bf16. Over 1,000 micro-batches, most of the sum would be lost to rounding, and results would
    depend on the sizes of the job. An offloaded optimizer, ``compute_grad_norm`` false, or
    ``bf16_master_weights_and_grads`` keeps bf16 sums.
    """
    settings = dict(config)
    if precision(config) != "bf16":
        return settings
    types = config.get("data_types") or {}
    if settings.get("communication_data_type") is None:
        settings["communication_data_type"] = "fp32"
    is_set = not isinstance(types, Mapping) or types.get("grad_accum_dtype") is not None
    device = value_at(config, "zero_optimization.offload_optimizer.device", "none")
    is_offloaded = device not in ("none", "auto") or value_at(config, "zero_optimization.cpu_offload", False)
    # DeepSpeed has no fp32 sums with an offloaded optimizer, without the gradient norm, or with bf16 master weights.
    without_norm = value_at(config, "zero_optimization.compute_grad_norm", True) is False
    in_bf16 = value_at(config, f"{precision_section(config)}.bf16_master_weights_and_grads", False)
    is_refused = is_offloaded or without_norm or in_bf16
    if zero_stage(config) == 1 and not (is_set or is_refused):
        settings["data_types"] = {**types, "grad_accum_dtype": "fp32"}
    return settings


def zero_stage(config: Mapping[str, Any]) -> int:
    zero = config.get("zero_optimization")
    if isinstance(zero, Mapping):
        return int(zero.get("stage", 0))
    return int(zero or 0)  # true is an old form of stage 1


def reduce_bucket_size(config: Mapping[str, Any]) -> int:
    """Return the elements of ZeRO's reduction bucket. The default is DeepSpeed's."""
    size = value_at(config, "zero_optimization.reduce_bucket_size", _BUCKET)
    return _BUCKET if size == "auto" else int(size)


def adam_implementation(config: Mapping[str, Any]) -> str:
    """Return the implementation of the optimizer: fused, foreach or for-loop, in torch's terms.

    DeepSpeed's optimizers are fused. Without a setting, torch uses foreach on GPUs and for-loop on CPUs. The result is
    then for-loop, which needs more memory.
    """
    params = value_at(config, "optimizer.params") or {}
    if params.get("fused"):
        return "fused"
    if str(value_at(config, "optimizer.type", "")).lower() in _FUSED and not params.get("torch_adam"):
        return "fused"
    return "foreach" if params.get("foreach") else "for-loop"


def precision(config: Mapping[str, Any]) -> str:
    """Return bf16, fp16 or fp32, from the sections with these names."""
    name = precision_section(config) or "fp32"
    return "bf16" if name == "bfloat16" else name


def precision_section(config: Mapping[str, Any]) -> str | None:
    """Return the name of the section that enables half precision; None for fp32."""
    bf16 = "bfloat16" if config.get("bf16") is None else "bf16"  # DeepSpeed's rule for the two names
    return next((name for name in (bf16, "fp16") if _is_enabled(config, name)), None)


def _is_enabled(config: Mapping[str, Any], name: str) -> bool:
    return value_at(config, f"{name}.enabled", False) is True


def value_at(config: Any, path: str, default: Any = None) -> Any:
    """Return the value at a dotted path; ``default`` if it is not set."""
    for key in path.split("."):
        if not isinstance(config, Mapping) or key not in config:
            return default
        config = config[key]
    return config
