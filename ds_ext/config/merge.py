"""One job from several sources: arguments of PipelineModule, its JSON, and the JSON of initialize(). Needs no torch.

A value that two sources set must be the same in both. A value that one source sets stands for all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import ConfigError
from .batch_sizes import BATCH_KEYS
from .job import DsExtConfig, JobConfig, parse_section

_FLAG = "--deepspeed_config"
# Keys of the section that decide which layers a rank builds, and how.
_STAGE_KEYS = (
    *("schedule", "schedule_options", "import", "fbd"),
    *("pipeline_parallel_size", "tensor_parallel_size", "sequence_parallel", "rank_order"),
    *("sequence_slices", "slice_lengths", "vocabulary_parallel_head"),
)


def command_line_json(words: Iterable[str] | None = None) -> str | None:
    """Return the value of DeepSpeed's flag ``--deepspeed_config``; None without it.

    ``words`` is the command line; None: that of this process.
    """
    value = None
    remaining = iter(sys.argv[1:] if words is None else words)
    for word in remaining:
        flag, equals, text = word.partition("=")
        if flag == _FLAG:
            value = text if equals else next(remaining, None)
    return value


def has_batch_size(job: JobConfig) -> bool:
    """Return whether the JSON fixes the number of micro-batches. One key alone may be completed by another JSON."""
    return sum(job.deepspeed.get(key) is not None for key in BATCH_KEYS) >= 2


def with_arguments(job: JobConfig, arguments: Iterable[tuple[str, str, Any]]) -> JobConfig:
    """Return the job with the section's keys that arguments of PipelineModule set.

    ``arguments`` are (argument, key of the section, value); None as the value: not given.
    """
    section = dict(job.deepspeed.get("ds_ext", {}))
    for argument, key, value in arguments:
        if value is None:
            continue
        if section.setdefault(key, value) != value:
            raise ConfigError(
                f"{argument}: contradicts ds_ext.{key}, which is {section[key]!r} (got {value!r}). Use one value, or "
                f"omit {argument}."
            )
    return replace(job, deepspeed={**job.deepspeed, "ds_ext": section}, ds_ext=parse_section(section))


def merge(module: JobConfig, job: JobConfig) -> JobConfig:
    """Return the job of a PipelineModule, whose stages are built, and of the JSON of initialize()."""
    module_section = dict(module.deepspeed.get("ds_ext", {}))
    job_section = dict(job.deepspeed.get("ds_ext", {}))
    names = {field.alias or name: name for name, field in DsExtConfig.model_fields.items()}
    for key, value in job_section.items():
        if key == "train":
            continue
        if key in module_section and module_section[key] != value:
            raise _contradiction(f"ds_ext.{key}", module_section[key], value)
        stage_value = getattr(module.ds_ext, names[key])
        if key in _STAGE_KEYS and getattr(job.ds_ext, names[key]) != stage_value:
            raise ConfigError(
                f"ds_ext.{key}: PipelineModule built its stages for {stage_value!r}, the default (got {value!r} in the "
                f"JSON of initialize()). Pass this JSON to PipelineModule too: PipelineModule(layers, config, ...), or "
                f"start the script with {_FLAG}."
            )
    top = {key: value for key, value in job.deepspeed.items() if key != "ds_ext"}
    for key, value in top.items():
        if key in module.deepspeed and module.deepspeed[key] != value:
            raise _contradiction(key, module.deepspeed[key], value)
    section: Mapping[str, Any] = {**job_section, **module_section}
    merged = {**top, **module.deepspeed, "ds_ext": section}
    return replace(module, deepspeed=merged, ds_ext=parse_section(section), path=module.path or job.path)


def _contradiction(key: str, module_value: Any, value: Any) -> ConfigError:
    return ConfigError(
        f"{key}: PipelineModule and initialize() must get the same value (got {module_value!r} and {value!r}). Use "
        f"one value, or set it in one place."
    )
