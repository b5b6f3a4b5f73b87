"""One job from the arguments of a module, its JSON and the JSON of initialize()."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from ds_ext.config.job import JobConfig, load_config
from ds_ext.config.merge import command_line_json, has_batch_size, merge, with_arguments
from ds_ext.errors import ConfigError


def job(**keys: Any) -> JobConfig:
    return load_config(keys)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], None),
        (["--deepspeed"], None),
        (["--steps", "3", "--deepspeed_config", "a.json", "x"], "a.json"),
        (["--deepspeed_config=b.json"], "b.json"),
        (["--deepspeed_config", "a.json", "--deepspeed_config=b.json"], "b.json"),
        (["--deepspeed_config"], None),
        (["--deepspeed_config_of_another", "a.json"], None),
    ],
)
def test_the_json_of_the_command_line(words: list[str], expected: str | None) -> None:
    assert command_line_json(words) == expected


def test_a_json_in_base64() -> None:
    keys = {"train_batch_size": 8, "ds_ext": {"schedule": "zb_v"}}
    found = load_config(base64.urlsafe_b64encode(json.dumps(keys).encode()).decode())
    assert found.deepspeed == keys and found.ds_ext.schedule == "zb_v" and found.path is None
    with pytest.raises(ConfigError, match="no such file"):
        load_config("abcd")  # valid base64, but no JSON


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, False),
        ({"train_batch_size": 8}, False),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, True),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, True),
        ({"train_batch_size": 8, "gradient_accumulation_steps": None}, False),
    ],
)
def test_two_batch_keys_fix_the_micro_batches(keys: dict[str, Any], expected: bool) -> None:
    assert has_batch_size(job(**keys)) == expected


def test_arguments_stand_in_for_keys() -> None:
    given = [
        ("num_stages", "pipeline_parallel_size", 4),
        ("topology", "tensor_parallel_size", 1),
        ("schedule", "schedule", None),
    ]
    found = with_arguments(job(ds_ext={"schedule": "zb_v", "pipeline_parallel_size": 4}), given)
    assert (found.ds_ext.schedule, found.ds_ext.pipeline_parallel_size) == ("zb_v", 4)
    assert found.deepspeed["ds_ext"]["tensor_parallel_size"] == 1
    assert with_arguments(job(), given).ds_ext.pipeline_parallel_size == 4


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        ("num_stages", "pipeline_parallel_size", 2),
        ("num_stages", "pipeline_parallel_size", "4"),
        ("x", "schedule", 3),
    ],
)
def test_arguments_that_do_not_fit(argument: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        with_arguments(job(ds_ext={"pipeline_parallel_size": 4}), [(argument, key, value)])
    assert repr(value) in str(caught.value)


def test_a_merge_takes_every_key_once() -> None:
    module = job(train_batch_size=8, ds_ext={"schedule": "bitpipe", "train": {"seed": 1}})
    given = job(steps_per_print=5, train_batch_size=8, ds_ext={"transport": "tcp", "schedule": "bitpipe"})
    found = merge(module, given)
    assert found.deepspeed["steps_per_print"] == 5 and found.deepspeed["train_batch_size"] == 8
    assert (found.ds_ext.schedule, found.ds_ext.transport, found.ds_ext.train) == (
        "bitpipe",
        "tcp",
        {"seed": 1},
    )
    assert merge(module, job(steps_per_print=5)).ds_ext == module.ds_ext
    assert merge(module, job(ds_ext={"pipeline_parallel_size": 1})).ds_ext.pipeline_parallel_size == 1


@pytest.mark.parametrize(
    ("given", "key", "values"),
    [
        ({"train_batch_size": 16}, "train_batch_size", ("8", "16")),
        ({"ds_ext": {"transport": "shm"}}, "ds_ext.transport", ("'tcp'", "'shm'")),
        ({"ds_ext": {"schedule": "zb_v"}}, "ds_ext.schedule", ("'1f1b'", "'zb_v'")),
        ({"ds_ext": {"pipeline_parallel_size": 2}}, "ds_ext.pipeline_parallel_size", ("1", "2")),
        ({"ds_ext": {"sequence_parallel": True}}, "ds_ext.sequence_parallel", ("False", "True")),
        ({"ds_ext": {"rank_order": "tp-pp-dp"}}, "ds_ext.rank_order", ("'tp-dp-pp'", "'tp-pp-dp'")),
        ({"ds_ext": {"import": ["mine"]}}, "ds_ext.import", ("[]", "['mine']")),
    ],
)
def test_contradictions_give_both_values(given: dict[str, Any], key: str, values: tuple[str, str]) -> None:
    module = job(train_batch_size=8, ds_ext={"transport": "tcp"})
    with pytest.raises(ConfigError) as caught:
        merge(module, job(**given))
    assert str(caught.value).startswith(f"{key}: ")
    assert all(value in str(caught.value) for value in values)
