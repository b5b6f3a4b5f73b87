"""The JSON: every mistake gets one sentence with the numbers and the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_ext.config.batch_sizes import batch_sizes
from ds_ext.config.deepspeed_json import (
    fp32_sums_of_bf16,
    half_through_zero,
    precision,
    precision_section,
    zero_stage,
)
from ds_ext.config.job import load_config, parse_section
from ds_ext.errors import ConfigError
from ds_ext.planner.job_plan import make_job_plan
from tests.plans import placement_of, timetable_of

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.json"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_examples_are_valid(path: Path) -> None:
    job = load_config(path)
    sizes = batch_sizes(job.deepspeed, placement_of(job).replicas, 1)
    assert make_job_plan(job).timetable.micro_batches == sizes.micro_batches
    assert job.path == str(path)


def test_defaults() -> None:
    job = load_config({"train_batch_size": 4})
    assert (job.ds_ext.schedule, job.ds_ext.pipeline_parallel_size, job.ds_ext.tensor_parallel_size) == (
        "1f1b",
        1,
        1,
    )
    assert (job.ds_ext.transport, job.ds_ext.transport_options.timeout_s) == ("auto", 120)


def test_the_whole_section_is_accepted_with_the_values_that_mean_off() -> None:
    section = {
        "schedule": "bitpipe",
        "pipeline_parallel_size": 4,
        "tensor_parallel_size": 1,
        "sequence_parallel": False,
        "schedule_options": {},
        "eager_gradient_sync": True,
        "transport": "auto",
        "transport_options": {"timeout_s": 3, "node_ips": None},
        "fbd": {"merge_forward_tensor_parallel": False, "backward_per_forward": 1},
        "trace": {"dir": None, "steps": None},
        "train": {},
    }
    before = json.dumps(section)
    assert parse_section(section).transport_options.timeout_s == 3
    assert json.dumps(section) == before
    for key, value in section.items():
        assert parse_section({key: value})
    assert parse_section({"fbd": {}, "trace": {}, "eager_gradient_sync": False})


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (
            {"schedules": "bitpipe"},
            r"no key 'schedules' \(did you mean 'schedule'\?\); its keys: schedule, pipeline_paral",
        ),
        ({"xyzzy": 1}, r"no key 'xyzzy'; its keys: schedule, "),
        (
            {"transport_options": {"timeout": 1}},
            r"\"ds_ext.transport_options\" has no key 'timeout' \(did you mean 'timeout_s'\?\)",
        ),
        (
            {"transport_options": {"timeout_s": 0}},
            r"transport_options.timeout_s must .* greater than 0; got 0",
        ),
        (
            {"transport_options": {"node_ips": ["10.0.0.1", "node7"]}},
            r"transport_options.node_ips: .*'node7'",
        ),
        (
            {"fbd": {"backwards_per_forward": 1}},
            r"\"ds_ext.fbd\" has no key 'backwards_per_forward' \(did you mean 'backward_per",
        ),
        (
            {"fbd": {"backward_per_forward": True}},
            r"fbd.backward_per_forward must .* valid integer; got True",
        ),
        ({"fbd": None}, r"fbd must be an object; got None"),
        ({"trace": {"dir": "t", "steps": "20:10"}}, r"trace.steps.*'20:10'"),
        ({"trace": {"dir": "t", "steps": "10-20"}}, r"trace.steps must be as .10:20"),
        ({"trace": {"dir": ""}}, r"trace.dir: String should have at least 1 character"),
        ({"pipeline_parallel_size": 0}, r"pipeline_parallel_size must .* greater than or equal to 1; got 0"),
        ({"pipeline_parallel_size": "4"}, r"pipeline_parallel_size must .* valid integer; got '4'"),
        ({"pipeline_parallel_size": True}, r"pipeline_parallel_size must .* valid integer; got True"),
        ({"tensor_parallel_size": 1.5}, r"tensor_parallel_size must .* valid integer; got 1.5"),
        (
            {"transport": "carrier pigeon"},
            r"transport must .*'auto', 'shm', .* or 'torch'; got 'carrier pigeon'",
        ),
        ({"train": 3}, r"train must .* valid dictionary; got 3"),
    ],
)
def test_keys_and_types(section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config({"ds_ext": section})


@pytest.mark.parametrize(
    ("section", "micro_batches", "sentence"),
    [
        ({"schedule": "bitpip"}, 4, r"'bitpip' .*'bitpipe'"),
        (
            {"schedule": "bitpipe", "pipeline_parallel_size": 3},
            4,
            r"pipeline_parallel_size .*got 3.* 2 or 4",
        ),
        (
            {"schedule": "bitpipe", "pipeline_parallel_size": 4},
            6,
            r"micro_batches .*4.*got 6.* 4 or 8.*gradient_accumulation_steps 2 or 4",
        ),
        (
            {"schedule": "interleaved", "pipeline_parallel_size": 2, "schedule_options": {"chunks": "2"}},
            4,
            r"option chunks .*got '2'",
        ),
    ],
)
def test_schedules_that_do_not_fit(section: dict[str, Any], micro_batches: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        timetable_of({"ds_ext": section}, micro_batches)


def test_merged_forward_ranks_and_sequence_parallelism() -> None:
    fbd = {
        "schedule": "fbd",
        "pipeline_parallel_size": 2,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
    }
    placement_of({"ds_ext": fbd})
    merged = {"ds_ext": fbd | {"fbd": {"merge_forward_tensor_parallel": True}}}
    with pytest.raises(ConfigError, match=r"^sequence_parallel: .*merge_forward_tensor_parallel"):
        placement_of(merged)


@pytest.mark.parametrize("stage", [2, 3, "2", 2.0, "3", 4, True, None, "auto"])
def test_zero_beyond_stage_one(stage: object) -> None:
    with pytest.raises(ConfigError, match=rf'^zero_optimization\.stage: .*got {stage!r}.*{{"stage": 1}}'):
        load_config({"zero_optimization": {"stage": stage}})
    for fine in (0, 1, "0", "1"):
        load_config({"zero_optimization": {"stage": fine}})


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("ds_exts", "ds_ext"),
        ("DS_EXT", "ds_ext"),
        ("schedule", '"ds_ext"'),
        ("pipeline_parallel_size", '"ds_ext"'),
    ],
)
def test_our_keys_beside_our_section(key: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: .*got 7.*{fix}"):
        load_config({key: 7})


@pytest.mark.parametrize(
    "key", ["comment", "_comment", "my_lab", "model", "train", "data", "run_name", "notes"]
)
def test_sections_of_the_users_own_stay(key: str) -> None:
    assert load_config({key: 1, "ds_ext": {}}).deepspeed[key] == 1


def test_two_precisions() -> None:
    with pytest.raises(ConfigError, match=r"bf16\.enabled, fp16\.enabled: "):
        load_config({"bf16": {"enabled": True}, "fp16": {"enabled": True}})
    load_config({"bf16": {"enabled": True}, "fp16": {"enabled": False}})


def test_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json' does not exist. The examples are in configs/"):
        load_config(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    broken = tmp_path / "broken.json"
    broken.write_text('{\n  "a": 1,\n}')
    with pytest.raises(ConfigError, match=r"broken\.json: line 3, column 1"):
        load_config(broken)
    broken.write_text("[1]")
    with pytest.raises(ConfigError, match="must hold a JSON object; got list"):
        load_config(broken)
    with pytest.raises(ConfigError, match='"ds_ext" must be an object'):
        load_config({"ds_ext": "bitpipe"})


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    """Only the last would count, at any depth; the same key in another object, in a list or in a string is none."""
    path = tmp_path / "twice.json"
    path.write_text('{\n "optimizer": {"params": {\n  "lr": 1,\n  "lr": 2}}}')
    with pytest.raises(ConfigError, match=r"twice\.json: .*'lr'.* 3, 4"):
        load_config(path)
    path.write_text('{"a": [{"b": 1}, {"b": 1}], "c": "{\\"a\\": 1, \\"a\\": 2}", "\\u0061": 3}')
    with pytest.raises(ConfigError, match=r"twice\.json: .*'a'"):
        load_config(path)
    path.write_text(
        '{"a": [{"b": 1}, {"b": 1}], "b": "\\\\", "c": {"a": "}", "c": "{\\"a\\": 1, \\"a\\": 2}"}}'
    )
    assert load_config(path).deepspeed["b"] == "\\"


@pytest.mark.parametrize("name", ["fp16", "bf16", "bfloat16"])
def test_half_precision_goes_through_zero(name: str) -> None:
    half = {name: {"enabled": True}}
    for zero in ({}, {"zero_optimization": False}, {"zero_optimization": {"stage": 0}}):
        made = half_through_zero(half | zero)
        assert made == half | {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    buckets = half_through_zero(half | {"zero_optimization": {"stage": 0, "reduce_bucket_size": 5}})
    assert buckets["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 5}
    for config in (half | {"zero_optimization": {"stage": 1}}, {name: {"enabled": False}}, {}):
        assert half_through_zero(config) == config


def test_gradients_of_bf16_are_summed_in_fp32_unless_the_json_says_otherwise() -> None:
    bf16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    in_fp32 = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
    assert fp32_sums_of_bf16(bf16) == bf16 | in_fp32
    given = {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"}}
    assert fp32_sums_of_bf16(bf16 | given) == bf16 | given
    without_zero = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    assert half_through_zero(without_zero) == without_zero
    assert fp32_sums_of_bf16({}) == {}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bf16": True}, r"^bf16: .*got True"),
        ({"fp16": None}, r"^fp16: .*got None"),
        ({"fp16": {"enabled": "yes"}}, r"^fp16\.enabled: .*got 'yes'"),
        ({"wandb": {"enabled": 1}}, r"^wandb\.enabled: .*got 1"),
        ({"zero_optimization": None}, r"^zero_optimization: .*got None"),
        ({"optimizer": None}, r"^optimizer: .*got None"),
        ({"scheduler": {"params": [1]}}, r"^scheduler\.params: .*got \[1\]"),
    ],
)
def test_sections_of_another_type(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(config)


def test_forms_of_sections_that_deepspeed_takes() -> None:
    load_config({"bf16": None, "zero_optimization": True, "optimizer": {"type": "AdamW", "params": None}})
    load_config({"bf16": {"enabled": "auto"}})
    assert [zero_stage({"zero_optimization": z}) for z in (True, False, {}, {"stage": "1"})] == [1, 0, 0, 1]
    on, off = {"enabled": True}, {"enabled": False}
    for config, name, section in (
        ({}, "fp32", None),
        ({"bf16": on}, "bf16", "bf16"),
        ({"bfloat16": on}, "bf16", "bfloat16"),
        ({"bf16": None, "bfloat16": on}, "bf16", "bfloat16"),
        ({"bf16": off, "bfloat16": on}, "fp32", None),  # DeepSpeed reads bfloat16 only without bf16
        ({"bf16": {"enabled": "auto"}, "fp16": on}, "fp16", "fp16"),
    ):
        assert (precision(config), precision_section(config)) == (name, section)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown"),
        ({"flops_profiler": {"enabled": True}}, "flops_profiler.enabled"),
        ({"fp16": {"auto_cast": True}}, "fp16.auto_cast"),
    ],
)
def test_keys_without_effect_are_refused(section: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: has no effect"):
        load_config({"train_batch_size": 4, **section})


def test_keys_without_effect_may_be_off() -> None:
    load_config({"train_batch_size": 4, "wall_clock_breakdown": False, "flops_profiler": {"enabled": False}})
