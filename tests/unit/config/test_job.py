"""Validation of the DeepSpeed JSON and its "ds_ext" section."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from ds_ext.config.batch_sizes import batch_sizes
from ds_ext.config.deepspeed_json import (
    adam_implementation,
    fp32_sums_of_bf16,
    half_through_zero,
    precision,
    precision_section,
    reduce_bucket_size,
    zero_stage,
)
from ds_ext.config.job import load_config, parse_section
from ds_ext.errors import ConfigError
from ds_ext.planner.job_plan import make_job_plan
from tests.plans import placement_of, timetable_of

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.json"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_examples_are_valid(path: Path) -> None:
    job = load_config(path)
    sizes = batch_sizes(job.deepspeed, placement_of(job).replicas, 1)
    assert make_job_plan(job).timetable.micro_batches == sizes.micro_batches
    assert job.path == str(path)


def test_defaults() -> None:
    job = load_config({"train_batch_size": 4})
    section = job.ds_ext
    assert (section.schedule, section.pipeline_parallel_size, section.tensor_parallel_size) == ("1f1b", 1, 1)
    assert (section.transport, section.transport_options.timeout_s) == ("auto", 120)


def test_section_with_all_keys() -> None:
    section = {
        "schedule": "bitpipe",
        "pipeline_parallel_size": 4,
        "tensor_parallel_size": 1,
        "sequence_parallel": False,
        "rank_order": "tp-mirror-dp-pp",
        "schedule_options": {},
        "eager_gradient_sync": True,
        "overlap_across_steps": False,
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
    ("section", "key", "got"),
    [
        ({"schedules": "bitpipe"}, "schedules", "'bitpipe'.* schedule\\?"),
        ({"xyzzy": 1}, "xyzzy", "1.* schedule, pipeline_parallel_size"),
        ({"transport_options": {"timeout": 1}}, "transport_options.timeout", "1.* timeout_s\\?"),
        ({"transport_options": {"timeout_s": 0}}, "transport_options.timeout_s", "0"),
        ({"transport_options": {"node_ips": ["10.0.0.1", "node7"]}}, "transport_options.node_ips", ".*node7"),
        ({"fbd": {"backwards_per_forward": 1}}, "fbd.backwards_per_forward", "1.* backward_per_forward\\?"),
        ({"recovery": {"every_steps": 1}}, "recovery.every_steps", "1.* every\\?"),
        ({"fbd": {"backward_per_forward": True}}, "fbd.backward_per_forward", "true"),
        ({"fbd": None}, "fbd", "null"),
        ({"trace": {"dir": "t", "steps": "20:10"}}, "trace.steps", "'20:10'"),
        ({"trace": {"dir": "t", "steps": "10-20"}}, "trace.steps", "'10-20'"),
        ({"trace": {"dir": ""}}, "trace.dir", "''"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size", "0"),
        ({"pipeline_parallel_size": "4"}, "pipeline_parallel_size", "'4'"),
        ({"pipeline_parallel_size": True}, "pipeline_parallel_size", "true"),
        ({"rank_order": None}, "rank_order", "null"),
        ({"tensor_parallel_size": 1.5}, "tensor_parallel_size", "1.5"),
        ({"transport": "carrier pigeon"}, "transport", "'carrier pigeon'"),
        ({"train": 3}, "train", "3"),
        ({"rank_order": "dp-tp-pp"}, "rank_order", "'dp-tp-pp'"),
        ({"rank_order": ["tp", "dp", "pp"]}, "rank_order", ".*tp"),
    ],
)
def test_keys_and_types(section: dict[str, Any], key: str, got: str) -> None:
    with pytest.raises(ConfigError, match=rf"^ds_ext\.{key}: .*\(got {got}"):
        load_config({"ds_ext": section})


@pytest.mark.parametrize(
    ("section", "micro_batches", "parts"),
    [
        ({"schedule": "bitpip"}, 4, ["schedule: ", "'bitpip'", "'bitpipe'"]),
        (
            {"schedule": "bitpipe", "pipeline_parallel_size": 3},
            4,
            ["pipeline_parallel_size", "(got 3)", "2 or 4"],
        ),
        (
            {"schedule": "bitpipe", "pipeline_parallel_size": 4},
            6,
            ["micro_batches", "(got 6)", "4 or 8", "train_batch_size: 4 or 8"],
        ),
        (
            {"schedule": "interleaved", "pipeline_parallel_size": 2, "schedule_options": {"chunks": "2"}},
            4,
            ["chunks", "(got '2')"],
        ),
    ],
)
def test_inapplicable_schedules(section: dict[str, Any], micro_batches: int, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        timetable_of({"ds_ext": section}, micro_batches)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_merged_forward_ranks_and_sequence_parallelism() -> None:
    fbd = {
        "schedule": "fbd",
        "pipeline_parallel_size": 2,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
    }
    placement_of({"ds_ext": fbd})
    merged = {"ds_ext": fbd | {"fbd": {"merge_forward_tensor_parallel": True}}}
    with pytest.raises(ConfigError, match="sequence_parallel"):
        placement_of(merged)


@pytest.mark.parametrize("stage", [2, 3, "2", 2.0, "3", 4, True, None, "auto"])
def test_zero_beyond_stage_one(stage: object) -> None:
    with pytest.raises(ConfigError, match=rf'^zero_optimization\.stage: .*got {stage!r}.*{{"stage": 1}}'):
        load_config({"zero_optimization": {"stage": stage}})
    for valid in (0, 1, "0", "1"):
        load_config({"zero_optimization": {"stage": valid}})


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("ds_exts", "ds_ext"),
        ("DS_EXT", "ds_ext"),
        ("schedule", '"ds_ext"'),
        ("pipeline_parallel_size", '"ds_ext"'),
    ],
)
def test_misplaced_keys(key: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: .*got 7.*{fix}"):
        load_config({key: 7})


@pytest.mark.parametrize(
    "key", ["comment", "_comment", "my_lab", "model", "train", "data", "run_name", "notes"]
)
def test_unknown_top_level_keys_are_kept(key: str) -> None:
    assert load_config({key: 1, "ds_ext": {}}).deepspeed[key] == 1


def test_two_precisions() -> None:
    with pytest.raises(ConfigError, match=r"bf16\.enabled, fp16\.enabled: "):
        load_config({"bf16": {"enabled": True}, "fp16": {"enabled": True}})
    load_config({"bf16": {"enabled": True}, "fp16": {"enabled": False}})


def test_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json: .*configs/"):
        load_config(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match=f"^{tmp_path}: "):
        load_config(tmp_path)
    broken = tmp_path / "broken.json"
    broken.write_text('{\n  "a": 1 "b": 2\n}')
    with pytest.raises(ConfigError, match=r"broken\.json: .*'a'.*\"b\": 2"):
        load_config(broken)
    broken.write_text('{  // comment\n  "a": 1')
    with pytest.raises(ConfigError, match=r"broken\.json: line 2, column 9"):
        load_config(broken)
    broken.write_text("[1]")
    with pytest.raises(ConfigError, match=r"broken\.json: .*got list"):
        load_config(broken)
    with pytest.raises(ConfigError, match=r"^ds_ext: .*got 'bitpipe'"):
        load_config({"ds_ext": "bitpipe"})


def test_comments_and_trailing_commas(tmp_path: Path) -> None:
    """JSONs are read as DeepSpeed reads them, and floats without a fraction stay floats in a strict JSON."""
    path = tmp_path / "commented.json"
    text = """{
      // the schedule
      "ds_ext": {"schedule": "bitpipe", "schedule_options": {"a": [1, 2,]},},  # trailing comma
      /* "train_batch_size": 4, */
      "train_batch_size": 8,
    }"""
    path.write_text(text)
    for source in (path, base64.urlsafe_b64encode(text.encode()).decode()):
        job = load_config(source)
        assert job.deepspeed == {
            "ds_ext": {"schedule": "bitpipe", "schedule_options": {"a": [1, 2]}},
            "train_batch_size": 8,
        }
    path.write_text('{"ds_ext": {}, "gradient_clipping": 4.0}')
    assert isinstance(load_config(path).deepspeed["gradient_clipping"], float)
    path.write_text('{"a": 1, /* again */ "a": 2}')
    with pytest.raises(ConfigError, match=r"commented\.json: .*'a'"):
        load_config(path)


def test_duplicate_key(tmp_path: Path) -> None:
    """A duplicate is found at any depth. Equal keys of different objects and text in strings are not duplicates."""
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


def test_all_problems_of_a_json_are_in_one_error() -> None:
    section = {"scheduler": "x", "pipeline_parallel_size": "four", "slice_lengths": "x", "trace": {"dirr": 1}}
    config = {
        "bf16": {"enabled": 1},
        "zero_optimization": {"stage": 3},
        "schedule": "1f1b",
        "ds_ext": section,
    }
    with pytest.raises(ConfigError) as error:
        load_config(config)
    keys = [line.partition(":")[0] for line in str(error.value).splitlines()]
    assert keys[:3] == ["schedule", "bf16.enabled", "zero_optimization.stage"]
    names = {key.removeprefix("ds_ext.").partition(".")[0] for key in keys[3:]}
    assert names == section.keys() and len(keys) == 7


def test_bf16_gradients_are_accumulated_in_fp32_by_default() -> None:
    bf16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    in_fp32 = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
    assert fp32_sums_of_bf16(bf16) == bf16 | in_fp32
    given = {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"}}
    assert fp32_sums_of_bf16(bf16 | given) == bf16 | given
    without_zero = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    assert half_through_zero(without_zero) == without_zero
    assert fp32_sums_of_bf16({}) == {}


@pytest.mark.parametrize(
    ("section", "dtype"),
    [
        ({"offload_optimizer": {"device": "none"}}, "fp32"),
        ({"offload_optimizer": {"pin_memory": True}}, "fp32"),
        ({"offload_optimizer": None, "cpu_offload": False}, "fp32"),
        ({"offload_optimizer": {"device": "cpu"}}, None),
        ({"cpu_offload": True}, None),
        ({"compute_grad_norm": False}, None),
        ({"offload_optimizer": {"device": "none"}, "compute_grad_norm": False}, None),
    ],
)
def test_bf16_gradients_of_an_offloaded_optimizer(section: dict[str, Any], dtype: str | None) -> None:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, **section}}
    assert fp32_sums_of_bf16(config).get("data_types", {}).get("grad_accum_dtype") == dtype


@pytest.mark.parametrize(
    ("kind", "params", "found"),
    [
        ("AdamW", {}, "fused"),
        ("Lion", None, "fused"),
        ("AdamW", {"torch_adam": True}, "for-loop"),
        ("AdamW", {"torch_adam": True, "foreach": True}, "foreach"),
        ("Adam", {"torch_adam": True, "fused": True}, "fused"),
        ("SGD", {"lr": 0.1}, "for-loop"),
        ("RAdam", {"foreach": True}, "foreach"),
    ],
)
def test_implementation_of_the_optimizer(kind: str, params: dict[str, Any] | None, found: str) -> None:
    assert adam_implementation({"optimizer": {"type": kind, "params": params}}) == found
    assert adam_implementation({}) == "for-loop"


def test_bucket_of_zero() -> None:
    assert reduce_bucket_size({"zero_optimization": {"stage": 1, "reduce_bucket_size": 2e8}}) == 200_000_000
    assert [reduce_bucket_size(c) for c in ({}, {"zero_optimization": True})] == [500_000_000] * 2


@pytest.mark.parametrize(
    ("config", "found"),
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
def test_sections_of_a_wrong_type(config: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        load_config(config)


def test_alternative_forms_of_sections() -> None:
    load_config({"bf16": None, "zero_optimization": True, "optimizer": {"type": "AdamW", "params": None}})
    job = load_config({"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}})
    assert [note.partition(": ")[0] for note in job.notes] == ["bf16.enabled"]
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
        ({"flops_profiler": {"enabled": True}}, "flops_profiler.enabled"),
        ({"fp16": {"auto_cast": True}}, "fp16.auto_cast"),
    ],
)
def test_keys_without_effect_are_refused(section: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: "):
        load_config({"train_batch_size": 4, **section})


def test_keys_without_effect_may_be_off() -> None:
    load_config({"train_batch_size": 4, "flops_profiler": {"enabled": False}})


@pytest.mark.parametrize("section", [{}, {"tensor_parallel_size": 2}])
def test_the_tensor_parallel_size_of_deepspeed_is_ours(section: dict[str, int]) -> None:
    job = load_config({"tensor_parallel": {"autotp_size": 2}, "ds_ext": section})
    assert job.ds_ext.tensor_parallel_size == 2
    assert job.deepspeed["tensor_parallel"]["autotp_size"] == 0  # DeepSpeed divides no layers


def test_the_tensor_parallel_size_of_deepspeed_adds_no_section() -> None:
    assert "ds_ext" not in load_config({"tensor_parallel": {"autotp_size": 2}}).deepspeed


def test_the_experts_are_divided_over_tensor_parallel_ranks() -> None:
    job = load_config(
        {
            "expert_parallel": {"enabled": True, "autoep_size": 2},
            "tensor_parallel": {"autotp_size": 2},
            "ds_ext": {},
        }
    )
    assert job.ds_ext.tensor_parallel_size == 2
    assert "expert_parallel" not in job.deepspeed  # DeepSpeed divides no experts


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"enabled": True, "autoep_size": 4}, "autoep_size"),
        ({"enabled": True}, "autoep_size"),
        ({"enabled": "auto"}, "enabled"),
        ({"enabled": True, "autoep_size": 2, "top_k": 2}, "top_k"),
    ],
)
def test_other_settings_of_experts_are_refused(section: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"expert_parallel\.{key}"):
        load_config({"expert_parallel": section, "ds_ext": {"tensor_parallel_size": 2}})


@pytest.mark.parametrize(("size", "ours"), [(2, 4), (1, 2), (-1, 1), ("auto", 1), (2.0, 2)])
def test_other_sizes_than_ours_are_refused(size: Any, ours: int) -> None:
    with pytest.raises(ConfigError, match="autotp_size"):
        load_config({"tensor_parallel": {"autotp_size": size}, "ds_ext": {"tensor_parallel_size": ours}})
