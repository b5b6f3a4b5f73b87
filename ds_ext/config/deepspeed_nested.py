"""The sections of DeepSpeed's JSON whose keys it knows exactly: typos in them, and switches that are none. Pure.

DeepSpeed finds these mistakes only when every rank has started. The tables are those of DeepSpeed 0.19; a test
compares them with what is installed.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError

_MONITOR = "enabled output_path job_name"
_BF16 = (
    "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"
)
NESTED_KEYS: Mapping[str, str] = {
    "bf16": _BF16,
    "bfloat16": _BF16,
    "fp16": "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
    "min_loss_scale fp16_master_weights_and_grads",
    "zero_optimization": "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
    "allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights "
    "elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload_param "
    "cpu_offload_use_pin_memory cpu_offload prefetch_bucket_size stage3_prefetch_bucket_size "
    "param_persistence_threshold stage3_param_persistence_threshold model_persistence_threshold "
    "stage3_model_persistence_threshold max_live_parameters stage3_max_live_parameters max_reuse_distance "
    "stage3_max_reuse_distance gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save "
    "module_granularity_threshold stage3_module_granularity_threshold use_all_reduce_for_fetch_params "
    "stage3_use_all_reduce_for_fetch_params allgather_sequential stage3_allgather_sequential "
    "stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients "
    "parameter_alignment zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights "
    "zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
    "log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module",
    "tensorboard": _MONITOR,
    "csv_monitor": _MONITOR,
    "wandb": "enabled group team project",
    "comet": "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    "comms_logger": "enabled prof_all prof_ops verbose debug",
}
# null is as good as leaving these out.
_MAY_BE_NULL = ("bf16", "bfloat16", "fp16")


def check_nested(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a section that is no object, a key that it does not have, or a switch that is none."""
    for name, keys in NESTED_KEYS.items():
        section = config.get(name, {})
        if (section is None and name in _MAY_BE_NULL) or (
            isinstance(section, bool) and name == "zero_optimization"
        ):
            continue  # zero_optimization: true is an old form of stage 1
        if not isinstance(section, Mapping):
            raise ConfigError(f'"{name}" must be an object such as {{{_example(keys)}}}; got {section!r}.')
        _refuse_unknown(name, section, keys.split())
        enabled = section.get("enabled", False)
        if not isinstance(enabled, bool) and enabled != "auto":
            raise ConfigError(f'"{name}": enabled must be true or false; got {enabled!r}.')


def _example(keys: str) -> str:
    first = keys.split()[0]
    return f'"{first}": {1 if first == "stage" else "true"}'


def _refuse_unknown(name: str, section: Mapping[str, Any], keys: list[str]) -> None:
    for key in section:
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else f"; its keys: {', '.join(keys)}"
            raise ConfigError(f'"{name}" has no key {key!r}{hint}.')
