"""DeepSpeed's part of the JSON: our own refusals, precision and ZeRO stage. Pure.

Whether the installed DeepSpeed accepts the keys is decided in :mod:`.deepspeed_check`, which imports it.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import ConfigError

# Section -> the package that rank 0 imports for it, and its name for pip.
_MONITORS = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "comet": ("comet_ml", "'comet_ml>=3.41.0'"),
}
_SWITCHED = ("bf16", "bfloat16", "fp16", *_MONITORS)
_OBJECTS = ("optimizer", "optimizer.params", "scheduler", "scheduler.params", "zero_optimization", *_SWITCHED)
_MAY_BE_NULL = ("optimizer.params", "scheduler.params", "bf16")

# Switches of DeepSpeed's forward and handlers, which this engine replaces -> what to do instead.
_UNAPPLIED = {
    "torch_autocast.enabled": 'For half precision set "bf16": {"enabled": true}',
    "fp16.auto_cast": "The first layer casts its inputs",
    "flops_profiler.enabled": "torch.profiler shows every computation under its name in the timetable",
    "data_efficiency.enabled": "Order or shorten the samples in the data set",
    "wall_clock_breakdown": 'Set "trace" in the "ds_ext" section',
}

# At this difflib ratio "gradient_clip" is a typo of "gradient_clipping", and "comment" is not one of "comet".
RESEMBLES = 0.84


def check_deepspeed_keys(config: Mapping[str, Any], ours: Collection[str]) -> None:
    """Raise ConfigError for a misplaced or misspelt section of ours, or settings that a pipeline cannot use.

    Args:
        ours: keys of the "ds_ext" section that are mistakes at the top level.
    """
    for key, value in config.items():
        if key in ours:
            raise ConfigError(f'{key}: misplaced (got {value!r} at the top level). Move it into "ds_ext".')
        if key != "ds_ext" and difflib.get_close_matches(key.lower(), ["ds_ext"], cutoff=RESEMBLES):
            raise ConfigError(f"{key}: unknown key (got {value!r}). Did you mean ds_ext?")
    for path in _OBJECTS:
        value = _value(config, path, {})
        old_form = isinstance(value, bool) and path == "zero_optimization"
        if not (isinstance(value, Mapping) or (value is None and path in _MAY_BE_NULL) or old_form):
            raise ConfigError(f"{path}: not an object (got {value!r}). Write {{...}} or leave it out.")
    for path in [f"{name}.enabled" for name in _SWITCHED]:
        value = _value(config, path, False)
        if not isinstance(value, bool) and value != "auto":
            raise ConfigError(f"{path}: not a switch (got {value!r}). Use true or false.")
    stage = _value(config, "zero_optimization.stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, "0", "1"):
        raise ConfigError(
            f"zero_optimization.stage: pipelines support 0 and 1, as gradients of several micro-batches are in "
            f'flight (got {stage!r}). Use {{"stage": 1}}, which shards the optimizer states.'
        )
    if _is_enabled(config, "bf16") and _is_enabled(config, "fp16"):
        raise ConfigError("bf16.enabled, fp16.enabled: both set by the JSON or flags (got true). Choose one.")
    for path, instead in _UNAPPLIED.items():
        if _value(config, path, False) is True:
            raise ConfigError(f"{path}: has no effect in this engine (got true). Leave it out. {instead}.")


def refuse_duplicate_keys(text: str, name: str) -> None:
    """Raise ConfigError when an object of a valid JSON has a key twice: only the last would count.

    Args:
        text: the JSON.
        name: its file, for the error.
    """

    def check(pairs: list[tuple[str, Any]]) -> None:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                lines = [str(n) for n, line in enumerate(text.splitlines(), 1) if f'"{key}"' in line]
                raise ConfigError(
                    f"{name}: an object has the key {key!r} twice, and only the last would count (got it on lines "
                    f"{', '.join(lines)}). Remove one of the two."
                )

    json.loads(text, object_pairs_hook=check)


def require_monitors(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for an enabled monitor whose package is not installed here; rank 0 alone uses it."""
    for section, (package, requirement) in _MONITORS.items():
        if not _is_enabled(config, section):
            continue
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:  # a folder of that name, as wandb makes, is a package too
            raise ConfigError(
                f'{section}: the package {package!r} is not installed on the host of rank 0 (got "enabled": true). '
                f"Install it with `pip install {requirement}`, or remove the section."
            )


def half_through_zero(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config``, with ZeRO stage 1 where it asks for fp16 or bf16 without ZeRO.

    DeepSpeed's fp16 optimizers without ZeRO divide a pipeline's gradients by a loss scale that was never applied, and
    its bf16 optimizer sums them in bf16. Stage 1 is the same arithmetic with the optimizer's states spread over the
    data-parallel ranks. Optimizers that stage 0 takes are taken here too. Who asks for sums in bf16 gets them.
    """
    zero, types = config.get("zero_optimization"), config.get("data_types")
    in_bf16 = isinstance(types, Mapping) and types.get("grad_accum_dtype") == "bf16"
    half = precision(config)
    if zero_stage(config) or half == "fp32" or (half == "bf16" and in_bf16):
        return dict(config)
    section = {**zero, "stage": 1} if isinstance(zero, Mapping) else {"stage": 1}
    return {"zero_allow_untested_optimizer": True, **config, "zero_optimization": section}


def fp32_sums_of_bf16(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config``, with gradients of bf16 summed in fp32, over micro-batches and ranks, unless it is set.

    DeepSpeed would sum them in bf16: of 1,000 micro-batches most would be lost to rounding, and results would depend
    on the sizes of the job.
    """
    made, types, zero = dict(config), config.get("data_types") or {}, config.get("zero_optimization")
    if precision(config) != "bf16":
        return made
    if made.get("communication_data_type") is None:
        made["communication_data_type"] = "fp32"
    given = not isinstance(types, Mapping) or types.get("grad_accum_dtype") is not None
    refused = isinstance(zero, Mapping) and (
        zero.get("offload_optimizer") or zero.get("cpu_offload") or zero.get("compute_grad_norm") is False
    )
    if zero_stage(config) == 1 and not (given or refused):
        made["data_types"] = {**types, "grad_accum_dtype": "fp32"}
    return made


def zero_stage(config: Mapping[str, Any]) -> int:
    """Return ZeRO's stage; from 1 on, optimizer states are spread over data-parallel ranks."""
    zero = config.get("zero_optimization")
    return int(
        zero.get("stage", 0) if isinstance(zero, Mapping) else zero or 0
    )  # true is an old form of stage 1


def precision(config: Mapping[str, Any]) -> str:
    """Return bf16, fp16 or fp32, as the JSON's sections of these names set it."""
    name = precision_section(config) or "fp32"
    return "bf16" if name == "bfloat16" else name


def precision_section(config: Mapping[str, Any]) -> str | None:
    """Return the name of the section that enables half precision; None for fp32."""
    bf16 = "bfloat16" if config.get("bf16") is None else "bf16"  # as DeepSpeed reads the two names
    return next((name for name in (bf16, "fp16") if _is_enabled(config, name)), None)


def _is_enabled(config: Mapping[str, Any], name: str) -> bool:
    return _value(config, f"{name}.enabled", False) is True


def _value(config: Any, path: str, default: Any) -> Any:
    for key in path.split("."):
        if not isinstance(config, Mapping) or key not in config:
            return default
        config = config[key]
    return config
