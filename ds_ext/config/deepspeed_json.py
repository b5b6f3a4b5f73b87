"""The keys around the "ds_ext" section that are DeepSpeed's: typos, and settings that a pipeline cannot use. Pure."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import ConfigError
from .deepspeed_nested import check_nested

# What DeepSpeed 0.19 reads at the top level of its JSON, and what older versions read and it names as removed.
DEEPSPEED_KEYS = (
    "activation_checkpointing",
    "aio",
    "amp",
    "autotuning",
    "bf16",
    "bfloat16",
    "checkpoint",
    "comet",
    "comms_logger",
    "communication_data_type",
    "compile",
    "compression_training",
    "csv_monitor",
    "curriculum_learning",
    "data_efficiency",
    "data_types",
    "dataloader_drop_last",
    "datastates_ckpt",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "eigenvalue",
    "elasticity",
    "expert_parallel",
    "flops_profiler",
    "fp16",
    "gradient_accumulation_steps",
    "gradient_allreduce_op",
    "gradient_clipping",
    "gradient_predivide_factor",
    "graph_harvesting",
    "hybrid_engine",
    "log_level",
    "managed_gradient_accumulation",
    "memory_breakdown",
    "nebula",
    "optimizer",
    "pipeline",
    "prescale_gradients",
    "progressive_layer_drop",
    "quantize_training",
    "scheduler",
    "seq_parallel_communication_data_type",
    "sparse_attention",
    "sparse_gradients",
    "steps_per_print",
    "tensor_parallel",
    "tensorboard",
    "timers",
    "torch_autocast",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "use_data_before_expert_parallelism",
    "vocabulary_size",
    "wall_clock_breakdown",
    "wandb",
    "weight_quantization",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
)

# In a valid JSON a string in front of a colon is a key. Strings are matched whole: braces in them are none.
_KEYS_AND_BRACES = re.compile(r'(?P<key>"(?:[^"\\]|\\.)*")\s*:|"(?:[^"\\]|\\.)*"|[{}]')

# Switches of what DeepSpeed does in its own forward and handlers -> what to do instead.
_UNAPPLIED = {
    "torch_autocast.enabled": 'for half precision set "bf16": {"enabled": true}',
    "fp16.auto_cast": "the first layer casts its inputs",
    "flops_profiler.enabled": "torch.profiler shows every computation under its name in the timetable",
    "progressive_layer_drop.enabled": "a layer can skip itself in training",
    "curriculum_learning.enabled": "the data may have another length in every step",
    "data_efficiency.enabled": "order or shorten the samples in the data set",
    "wall_clock_breakdown": 'set "trace" in the "ds_ext" section, which records when each computation, message and '
    "reduction starts and ends",
}

# At this difflib ratio "gradient_clip" is a typo of "gradient_clipping", and "comment" is none of "comet".
_RESEMBLES = 0.84


def check_deepspeed_keys(config: Mapping[str, Any], ours: Collection[str]) -> None:
    """Raise ConfigError for a misspelt key, a section that is none, ZeRO beyond stage 1, or two precisions at once.

    Args:
        ours: keys of the "ds_ext" section that are mistakes at the top level.
    """
    _refuse_typos(config, ours)
    check_nested(config)
    _refuse_zero(config)
    _refuse_two_precisions(config)
    _refuse_unapplied(config)


def refuse_duplicate_keys(text: str, name: str) -> None:
    """Raise ConfigError when an object of a valid JSON has a key twice: only the last would count.

    Args:
        text: the JSON.
        name: of its file, for the error.
    """
    seen: list[dict[str, int]] = []  # per open object: its keys and the lines that they stand on
    for token in _KEYS_AND_BRACES.finditer(text):
        if token[0] == "{":
            seen.append({})
        elif token[0] == "}":
            seen.pop()
        elif token["key"]:
            key, line = json.loads(token["key"]), text.count("\n", 0, token.start()) + 1
            if key in seen[-1]:
                raise ConfigError(
                    f"{name}: line {line}: the key {key!r} stands on line {seen[-1][key]} of the same object already, "
                    f"and only the last would count. Remove one of the two."
                )
            seen[-1][key] = line


def _refuse_typos(config: Mapping[str, Any], ours: Collection[str]) -> None:
    """A misspelt key would be ignored, and something else trained. Keys that resemble none are the user's own."""
    known = ("ds_ext", *DEEPSPEED_KEYS)
    for key in config:
        if key in known:
            continue
        if key in ours:
            raise ConfigError(f'{key!r} belongs into the "ds_ext" section of the JSON, not beside it.')
        near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=_RESEMBLES)
        if near:
            raise ConfigError(
                f"the JSON has a key {key!r}, which nothing reads: did you mean {near[0]!r}? A section of your own "
                f"needs a name that looks less like it."
            )


def _refuse_zero(config: Mapping[str, Any]) -> None:
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3, "0", "1", "2", "3"):
        raise ConfigError(f'"zero_optimization": stage must be 0 or 1; got {stage!r}.')
    if int(stage) > 1:
        raise ConfigError(
            f"ZeRO stage {int(stage)} does not work with pipeline parallelism: gradients of several micro-batches are "
            f"in flight and cannot be partitioned before the last one. Use "
            f'"zero_optimization": {{"stage": 1}}, which shards the optimizer states over replicas and '
            f"data-parallel ranks."
        )


def _refuse_two_precisions(config: Mapping[str, Any]) -> None:
    sections = [config.get(key) for key in ("bf16", "fp16")]
    if all(isinstance(section, Mapping) and section.get("enabled") is True for section in sections):
        raise ConfigError(
            '"bf16" and "fp16" are both enabled, by the JSON or by --bf16 and --fp16. Choose one.'
        )


def half_through_zero(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config``, with ZeRO stage 1 where it asks for fp16 or bf16 without ZeRO.

    DeepSpeed's fp16 optimizers without ZeRO divide a pipeline's gradients by a loss scale that was never applied, and
    its bf16 optimizer sums them in bf16. Stage 1 is the same arithmetic with the optimizer's states spread over the
    data-parallel ranks. Optimizers that stage 0 takes are taken here too. Who asks for sums in bf16 gets them.
    """
    zero, types = config.get("zero_optimization"), config.get("data_types")
    in_bf16 = isinstance(types, Mapping) and types.get("grad_accum_dtype") == "bf16"
    half = _is_enabled(config, "fp16") or (_is_enabled(config, "bf16", "bfloat16") and not in_bf16)
    if not half or zero_stage(config):
        return dict(config)
    section = {**zero, "stage": 1} if isinstance(zero, Mapping) else {"stage": 1}
    return {"zero_allow_untested_optimizer": True, **config, "zero_optimization": section}


def _is_enabled(config: Mapping[str, Any], *names: str) -> bool:
    section = next((config[name] for name in names if name in config), None)
    return isinstance(section, Mapping) and section.get("enabled") is True


def fp32_sums_of_bf16(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config``, with gradients of bf16 summed in fp32, over micro-batches and ranks, unless it says otherwise.

    DeepSpeed would sum them in bf16: of 1,000 micro-batches most would be lost to rounding, and results would depend
    on the sizes of the job.
    """
    if not _is_enabled(config, "bf16", "bfloat16"):
        return dict(config)
    made, types, zero = dict(config), config.get("data_types") or {}, config.get("zero_optimization")
    if made.get("communication_data_type") is None:
        made["communication_data_type"] = "fp32"
    given = not isinstance(types, Mapping) or types.get("grad_accum_dtype") is not None
    refused = isinstance(zero, Mapping) and (
        zero.get("offload_optimizer") or zero.get("cpu_offload") or zero.get("compute_grad_norm") is False
    )
    if zero_stage(config) == 1 and not (given or refused):
        made["data_types"] = {**types, "grad_accum_dtype": "fp32"}
    return made


def _refuse_unapplied(config: Mapping[str, Any]) -> None:
    """Refuse switches of DeepSpeed's own forward and handlers, which this engine replaces."""
    for path, way_out in _UNAPPLIED.items():
        section, _, key = path.partition(".")
        value = config.get(section)
        if key:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is True:
            name = f'"{section}": {key}' if key else f'"{section}": true'
            raise ConfigError(f"{name} has no effect in this engine. Leave it out; {way_out}.")


def zero_stage(config: Mapping[str, Any]) -> int:
    """ZeRO's stage; from 1 on, optimizer states are spread over data-parallel ranks."""
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        return int(zero)  # DeepSpeed's old form
    return int(zero.get("stage", 0)) if isinstance(zero, Mapping) else 0
