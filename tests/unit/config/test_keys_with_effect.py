"""Every key of the installed DeepSpeed has an effect, is refused, or is harmless for a reason given here."""

from __future__ import annotations

import copy
import fnmatch
import json
import logging
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig, get_pipeline_config
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.utils import logger
from pydantic import BaseModel, ValidationError

from ds_ext.config.deepspeed_check import _top_level_keys, unknown_keys
from ds_ext.config.deepspeed_json import NOTED, UNAPPLIED
from ds_ext.config.job import load_config
from ds_ext.errors import ConfigError

ONE = {"train_micro_batch_size_per_gpu": 1}

# Keys with an effect. DeepSpeed's constructor, optimizers and monitors apply them, or this engine does.
APPLIED = [
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("optimizer", "scheduler", "gradient_clipping", "communication_data_type", "steps_per_print"),
    *("prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("disable_python_gc", "log_level"),
    *(
        "pipeline.activation_checkpoint_interval",
        "pipeline.use_reentrant",
        "tensor_parallel.autotp_size",
        "expert_parallel.enabled",
        "expert_parallel.autoep_size",
    ),
    *("data_types.grad_accum_dtype", "data_types.param_dtype", "data_types.buffer_dtype"),
    "data_types.keep_in_fp32_modules",
    *("tensorboard.*", "wandb.*", "comet.*", "csv_monitor.*"),
    *("bf16.enabled", "bf16.check_grad_overflow", "bf16.bf16_master_weights_and_grads"),
    *("bf16.bf16_optimizer_states", "fp16.enabled", "fp16.loss_scale", "fp16.initial_scale_power"),
    *("fp16.loss_scale_window", "fp16.hysteresis", "fp16.consecutive_hysteresis", "fp16.min_loss_scale"),
    "fp16.fp16_master_weights_and_grads",
    *(
        f"zero_optimization.{key}"
        for key in (
            *("stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "overlap_comm"),
            *("use_multi_rank_bucket_allreduce", "allgather_partitions", "allgather_bucket_size"),
            *("compute_grad_norm", "parameter_alignment", "cpu_offload"),
            *("offload_optimizer", "offload_optimizer.pin_memory"),
            *("offload_optimizer.cpuadam_cores_perc", "ignore_unused_parameters"),
        )
    ),
]

# Keys without an effect here: results are those that the JSON asks for, or those of DeepSpeed's own pipelines.
STAGE_3 = "a size or a switch of ZeRO stage 3, which changes neither results nor memory at stages 0 and 1"
SWITCHED = "read only if a key is set that is refused"
OUR_FILES = "checkpoints have one format, which contains the fp32 weights and loads with any sizes"
HARMLESS = {
    "autotuning.*": SWITCHED,
    "bf16.immediate_grad_update": "gradients are added to the fp32 sums after each backward either way",
    "checkpoint.parallel_write": "all ranks write their parts at the same time",
    "checkpoint.tag_validation": "a tag that differs between ranks is always an error",
    "comms_logger.*": SWITCHED,
    "compile.*": SWITCHED,
    "data_efficiency.*": SWITCHED,
    "expert_parallel.*": SWITCHED,
    "flops_profiler.*": SWITCHED,
    "hybrid_engine.*": SWITCHED,
    "memory_breakdown": "printed in the constructor only, as by DeepSpeed's pipelines",
    "tensor_parallel.*": SWITCHED,
    "timers.throughput": "DeepSpeed's pipelines do not read it",
    "torch_autocast.*": SWITCHED,
    "vocabulary_size": "a warning of DeepSpeed",
    **{f"weight_quantization.{key}": SWITCHED for key in ("enabled", "num_bits", "q_type", "q_groups")},
    "zero_optimization.cpu_offload_use_pin_memory": "deprecated; DeepSpeed does not read it",
    "zero_optimization.elastic_checkpoint": OUR_FILES,
    "zero_optimization.enable_sanity_checks": "checks of stage 3",
    "zero_optimization.legacy_stage1": "refused by DeepSpeed",
    "zero_optimization.load_from_fp32_weights": OUR_FILES,
    "zero_optimization.offload_optimizer.*": "sizes of offloading to NVMe, and a ratio that only stage 3 uses",
    "zero_optimization.offload_param*": SWITCHED,
    "zero_optimization.pipeline_loading_checkpoint": OUR_FILES,
    "zero_optimization.zenflow.*": SWITCHED,
    **{
        f"zero_optimization.{key}": STAGE_3
        for key in (
            *("sub_group_size", "prefetch_bucket_size", "param_persistence_threshold"),
            *("model_persistence_threshold", "max_live_parameters", "max_reuse_distance"),
            *("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
            *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
            *("memory_efficient_linear", "override_module_apply", "log_trace_cache_warnings"),
            *("save_muon_momentum_buffer_in_memory", "leaf_module", "leaf_module.*"),
        )
    },
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def fields(path: str, model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{path}.{name}"
        for kind in typing.get_args(field.annotation) or (field.annotation,):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from fields(f"{path}.{name}", kind)


def asked_keys(section: str) -> set[str]:
    """Return the keys for which DeepSpeed looks in a section that it reads without a model."""
    asked: set[str] = set()

    class Recorder(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            asked.add(f"{section}.{key}")
            return super().get(key, default)

        def __contains__(self, key: Any) -> bool:
            asked.add(f"{section}.{key}")
            return super().__contains__(key)

    DeepSpeedConfig({**ONE, section: Recorder(enabled=True)})
    return asked


def all_keys() -> Iterator[str]:
    """Yield every key of the installed DeepSpeed with its path. "bfloat16" is another name of "bf16"."""
    subclasses = DeepSpeedConfigModel.__subclasses__()
    models = {model.__name__: model for one in subclasses for model in (one, *one.__subclasses__())}
    for section in sorted(_top_level_keys() - {*_REMOVED_TOP_LEVEL_CONFIG_KEYS, "bfloat16"}):
        try:
            DeepSpeedConfig(copy.deepcopy({**ONE, section: {"no_such_key": 1}}))
        except ValidationError as error:
            model: Any = models[error.title]
            if error.errors()[0]["loc"][0] == section:  # the monitors' sections are fields of one model
                model = model.model_fields[section].annotation
            yield from fields(section, model)
        except Exception:
            yield section  # not an object
        else:
            keys = asked_keys(section) if section not in ("optimizer", "scheduler") else set()
            yield from sorted(keys) or [section]
    yield from (f"pipeline.{key}" for key in (*get_pipeline_config({}), "use_reentrant"))


KEYS = sorted(set(all_keys()) - {"pipeline"})


def test_all_sections_are_enumerated() -> None:
    assert len(KEYS) > 200
    assert {"zero_optimization.stage", "pipeline.stages", "checkpoint.load_universal", "aio.block_size"} <= {
        *KEYS
    }


@pytest.mark.parametrize("key", KEYS)
def test_every_key_has_a_row(key: str) -> None:
    lists = [key in UNAPPLIED, any(fnmatch.fnmatch(key, row) for row in APPLIED), key in HARMLESS]
    lists.append(key in NOTED or key.split(".")[0] in NOTED)
    sections = any(fnmatch.fnmatch(key, row) for row in HARMLESS)
    assert sum(lists) == 1 or (not any(lists) and sections), key


def test_every_row_has_a_key() -> None:
    rows = [*UNAPPLIED, *APPLIED, *HARMLESS, *(f"{row}*" for row in NOTED)]
    outside = {"sequence_parallel_size"}  # DeepSpeed looks for it only on ranks
    assert [row for row in rows if not fnmatch.filter(KEYS, row)] == sorted(outside)


@pytest.mark.parametrize("key", UNAPPLIED)
def test_keys_without_effect_are_refused(key: str) -> None:
    accepted, _ = UNAPPLIED[key]

    def config(value: Any) -> dict[str, Any]:
        for name in reversed(key.split(".")):
            value = {name: value}
        return {**ONE, **value}

    for value in accepted:
        load_config(config(value))
    other = True if accepted == (False, None) else 2
    with pytest.raises(ConfigError) as refusal:
        load_config(config(other))
    assert str(refusal.value).startswith(f"{key}: ")
    assert f"(got {json.dumps(other)})" in str(refusal.value)


@pytest.mark.parametrize("key", NOTED)
def test_keys_with_a_note(key: str) -> None:
    def notes(value: Any, **settings: Any) -> list[str]:
        for name in reversed(key.split(".")):
            value = {name: value}
        return [note.split(": ")[0] for note in load_config({**ONE, **settings, **value}).notes]

    silent, _ = NOTED[key]
    other = {"profile": True} if silent[0] == {} else "cpu" if silent[0] == "none" else True
    assert notes(other) == [key]
    assert not any(notes(value) for value in silent)
    assert notes(other, bf16={"enabled": True}) == ([] if "offload" in key else [key])


def test_the_documented_keys() -> None:
    """docs/from_deepspeed.md lists the keys of the tables, and no others as refused or accepted with a note."""
    text = (Path(__file__).parents[3] / "docs" / "from_deepspeed.md").read_text()
    table = text.partition("## Keys of the JSON\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| (\w+) \| (.*) \|$", table, re.MULTILINE))
    documented = {name: set(re.findall(r"`([\w.]+)`", row)) for name, row in rows.items()}
    assert documented["refused"] == set(UNAPPLIED)
    assert set(NOTED) == documented["noted"]
    assert documented["honored"] and all(
        any(fnmatch.fnmatch(key, row) for row in APPLIED) for key in documented["honored"]
    )


def test_unknown_keys_are_listed() -> None:
    assert unknown_keys({**ONE, "ema": {"enabled": True}, "fp32_allreduce": True}) == [
        "ema",
        "fp32_allreduce",
    ]
    for file in (Path(__file__).parents[3] / "configs").glob("*.json"):
        assert unknown_keys(load_config(file).deepspeed) == []
