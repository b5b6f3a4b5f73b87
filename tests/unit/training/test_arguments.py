"""Flags, the JSON's "train" object, and what happens when they disagree."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_ext.config.job import JobConfig
from ds_ext.errors import ConfigError
from ds_ext.training.arguments import build_parser, parse
from ds_ext.training.megatron_flags import REPLACED_FLAGS
from ds_ext.training.setup import plan_job
from tests.own_schedule import NAME, write_own_schedule
from tests.plans import placement_of

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(tmp_path: Path) -> Any:
    def parsed(config: dict[str, Any], *flags: str) -> tuple[argparse.Namespace, JobConfig]:
        path = tmp_path / "job.json"
        path.write_text(json.dumps({"train_batch_size": 8} | config))
        return parse("train_gpt.py", ["--deepspeed_config", str(path), *flags])

    return parsed


def test_a_flag_wins_over_train_and_train_over_the_default(run: Any) -> None:
    train = {"num_layers": 4, "hidden_size": 64, "data_path": "0.3 a 0.7 b", "hidden_dropout": 0}
    args, job = run({"ds_ext": {"train": train}}, "--hidden-size", "32")
    assert (args.num_layers, args.hidden_size, args.seq_length) == (4, 32, 128)
    assert args.data_path == ["0.3", "a", "0.7", "b"]
    assert args.hidden_dropout == 0
    assert job.path.endswith("job.json")
    assert run({"ds_ext": {"train": {"data_path": ["a b", "c"]}}})[0].data_path == ["a b", "c"]


def test_flags_fill_in_the_json(run: Any) -> None:
    sizes = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 3 --micro-batch-size 2"
    _, job = run({}, "--schedule", "interleaved", *sizes.split(), "--lr", "0.5", "--clip-grad", "2")
    section = job.ds_ext
    assert section.schedule == "interleaved"
    assert (section.pipeline_parallel_size, section.tensor_parallel_size) == (2, 3)
    assert job.deepspeed["optimizer"] == {"params": {"lr": 0.5}}
    assert (job.deepspeed["gradient_clipping"], job.deepspeed["train_micro_batch_size_per_gpu"]) == (2, 2)
    assert run({}, "--enable-bitpipe-schedule")[1].ds_ext.schedule == "bitpipe"
    # Saying the same twice is no contradiction.
    assert run({"ds_ext": {"schedule": "bitpipe"}}, "--enable-bitpipe-schedule", "--schedule", "bitpipe")[
        1
    ].ds_ext


@pytest.mark.parametrize(
    ("config", "flags", "sentence"),
    [
        (
            {"ds_ext": {"schedule": "1f1b"}},
            ["--enable-bitpipe-schedule"],
            r"--enable-bitpipe-schedule contradicts \"ds_ext.schedule\": '1f1b' of .*job\.json. Change one of the two, "
            r"or leave the key \"schedule\" out of the JSON\.",
        ),
        (
            {"ds_ext": {"pipeline_parallel_size": 4}},
            ["--pipeline-model-parallel-size", "2"],
            r"--pipeline-model-parallel-size 2 contradicts \"ds_ext.pipeline_parallel_size\": 4 of .*job\.json",
        ),
        ({}, ["--global-batch-size", "16"], r"--global-batch-size 16 contradicts \"train_batch_size\": 8"),
        (
            {},
            ["--schedule", "gpipe", "--enable-bitpipe-schedule"],
            r"contradicts \"ds_ext.schedule\": 'gpipe' of --schedule gpipe\. Leave one of the two out\.",
        ),
        (
            {"optimizer": {"params": {"betas": [0.9, 0.95]}}},
            ["--adam-beta1", "0.8"],
            r"--adam-beta1 0.8 contradicts \"optimizer.params.betas\": \[0.9, 0.95\] of .*job\.json",
        ),
        ({"bf16": {"enabled": False}}, ["--bf16"], r"--bf16 contradicts \"bf16.enabled\": False of"),
        ({"bf16": {"enabled": True}}, ["--fp16"], r"bf16\.enabled, fp16\.enabled: "),
        (
            {"ds_ext": {"sequence_parallel": False}},
            ["--sequence-parallel"],
            r"--sequence-parallel contradicts \"ds_ext.sequence_parallel\": False of",
        ),
        ({"optimizer": {"params": 3}}, ["--adam-beta1", "1"], r"^optimizer\.params: .*got 3"),
        ({"optimizer": None}, ["--lr", "1"], r"^optimizer: .*got None"),
        ({}, ["--node-ips", "10.0.0.1,node7"], r"transport_options.node_ips: .*'node7'"),
    ],
)
def test_contradictions(run: Any, config: dict[str, Any], flags: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run(config, *flags)


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        (
            {"num_layer": 4},
            r"no key 'num_layer' \(did you mean 'num_layers'\?\); its keys: attention_dropout, ",
        ),
        ({"schedule": "gpipe"}, r"no key 'schedule'"),
        ({"num_layers": "4"}, r"num_layers must be int; got '4'"),
        ({"num_layers": 4.0}, r"num_layers must be int; got 4.0"),
        ({"num_layers": True}, r"num_layers must be int; got True"),
        ({"hidden_dropout": "none"}, r"hidden_dropout must be float; got 'none'"),
        ({"save": 3}, r"save must be str; got 3"),
        (
            {"recompute_granularity": "half"},
            r"recompute_granularity must be one of none, selective, full; got 'half'",
        ),
    ],
)
def test_wrong_keys_and_types_in_train(run: Any, train: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run({"ds_ext": {"train": train}})


def test_flags_that_do_not_exist(run: Any) -> None:
    for words in (["--num-layer", "4"], ["--num-layer=4"], ["--save", "x", "--num-layer", "4", "--lrr", "1"]):
        with pytest.raises(
            ConfigError, match=r"argument --num-layer \(did you mean --num-layers\?\)\. `python"
        ):
            run({}, *words)
    with pytest.raises(ConfigError, match=r"unrecognized argument --zzz\. `python"):
        run({}, "--zzz")
    with pytest.raises(ConfigError, match=r"unrecognized argument stray\. `python"):
        run({}, "stray")


def test_optimizer_and_precision_flags_fill_in_the_json(run: Any) -> None:
    numbers = "--weight-decay 0 --adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-6"
    _, job = run({}, *numbers.split(), "--bf16")
    assert job.deepspeed["optimizer"] == {"params": {"weight_decay": 0, "betas": [0.8, 0.95], "eps": 1e-6}}
    assert job.deepspeed["bf16"] == {"enabled": True}
    assert run({}, "--fp16")[1].deepspeed["fp16"] == {"enabled": True}
    assert job.flags["optimizer.params.betas"] == "--adam-beta1 0.8 --adam-beta2 0.95"
    # One alone leaves the other as it is.
    assert run({}, "--adam-beta2", "0.95")[1].deepspeed["optimizer"]["params"]["betas"] == [0.9, 0.95]
    said = {"optimizer": {"params": {"betas": [0.7, 0.95]}}}
    assert run(said, "--adam-beta1", "0.7")[1].deepspeed["optimizer"] == said["optimizer"]


def test_the_version_needs_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    import deepspeed
    import torch

    import ds_ext

    with pytest.raises(SystemExit) as stop:
        parse("train_gpt.py", ["--version"])
    assert stop.value.code == 0
    versions = f"ds_ext {ds_ext.__version__}, deepspeed {deepspeed.__version__}, torch {torch.__version__}\n"
    assert capsys.readouterr().out == versions


def test_the_version_is_no_key_of_train(run: Any) -> None:
    with pytest.raises(ConfigError, match=r"no key 'version'"):
        run({"ds_ext": {"train": {"version": "1"}}})


def test_the_tokenizers_two_names(run: Any) -> None:
    for flag in ("--tokenizer", "--tokenizer-model"):
        assert (
            run({}, flag, "t.model", "--tokenizer-type", "SentencePieceTokenizer")[0].tokenizer == "t.model"
        )
    with pytest.raises(ConfigError, match=r"--tokenizer-type: invalid choice: 'NullTokenizer' \(choose from"):
        run({}, "--tokenizer-type", "NullTokenizer")


@pytest.mark.parametrize(
    ("words", "use"),
    [
        ("--recompute-num-layers 2", "--recompute-interval"),
        ("--recompute-activations", "--recompute-granularity selective"),
        ("--min-lr=1e-5", '"cos_min_ratio"'),
        ("--lr-decay-style cosine", '"WarmupCosineLR"'),
        ("--lr-warmup-iters 10", '"warmup_num_steps"'),
        ("--train-samples 100", "--train-iters"),
    ],
)
def test_a_flag_of_megatrons_is_refused_with_its_replacement(run: Any, words: str, use: str) -> None:
    flag = words.partition(" ")[0].partition("=")[0]
    with pytest.raises(ConfigError, match=rf"{flag}: .*{use}"):
        run({}, *words.split())


def test_a_flag_that_is_taken_is_never_refused() -> None:
    """Every flag that a refusal names exists."""
    taken = set(build_parser("x")._option_string_actions)
    assert not taken & set(REPLACED_FLAGS)
    for flag, use in REPLACED_FLAGS.items():
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", use)) <= taken, flag


def test_megatrons_keys_in_train_name_the_same_replacement(run: Any) -> None:
    with pytest.raises(ConfigError, match=r"'recompute_num_layers': .*--recompute-interval"):
        run({"ds_ext": {"train": {"recompute_num_layers": 2}}})


def test_flags_of_other_systems_name_schedules(run: Any) -> None:
    sizes = {"ds_ext": {"pipeline_parallel_size": 2}}
    for flag, name in (("--use-dpp", "dpp"), ("--forward-backward-disaggregating", "fbd")):
        job = run(sizes, flag)[1]
        assert job.ds_ext.schedule == name and placement_of(job).stages >= 2


# --- schedules of one's own -------------------------------------------------------------------------------------------

JOB = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
PLAN = """
import sys
from ds_ext.config.job import load_config
from ds_ext.errors import ConfigError
from ds_ext.planner.job_plan import resolve_schedule
from ds_ext.training.setup import plan_job
flags = ["--deepspeed_config", sys.argv[1], *sys.argv[2:]]
try:
    plan_job("train_gpt.py", flags, "gpt")
except ConfigError as error:
    print(str(error).splitlines()[0])
print(resolve_schedule(load_config(sys.argv[1]))[0].name)
"""


@pytest.mark.parametrize(
    "imports", [(["mine"], []), ([], ["--import", "mine"]), (["mine"], ["--import", "mine"])], ids=str
)
def test_own_schedules_are_imported_before_they_are_looked_up(
    imports: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    """From the folder of the JSON and by a flag; what is missing next is the data. In a process: it registers."""
    write_own_schedule(tmp_path, "mine")
    key, flags = imports
    section = {"schedule": NAME, "pipeline_parallel_size": 2, "import": key}
    (tmp_path / "job.json").write_text(json.dumps({**JOB, "ds_ext": section}))
    words = [sys.executable, "-c", PLAN, str(tmp_path / "job.json"), "--dry-run", *flags]
    folder = tmp_path if not key else ROOT  # by the JSON: wherever the job starts
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    missing, name = done.stdout.splitlines()
    assert "--data-path" in missing and name == NAME


def test_unknown_schedules_and_modules_come_before_missing_data(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    for section, words in (
        ({"schedule": "bitpip"}, ("bitpip", "bitpipe")),
        ({"import": ["no_such_module"]}, ('"ds_ext": import', "no_such_module", "PYTHONPATH")),
    ):
        path.write_text(json.dumps({**JOB, "ds_ext": section}))
        with pytest.raises(ConfigError) as caught:
            plan_job("train_gpt.py", ["--deepspeed_config", str(path), "--dry-run"], "gpt")
        assert all(word in str(caught.value) for word in words)


def test_import_flags_and_keys_are_joined(run: Any) -> None:
    _, job = run({"ds_ext": {"import": ["json", "math"]}}, "--import", "math", "--import", "string")
    assert job.ds_ext.modules == ["json", "math", "string"]
    assert job.deepspeed["ds_ext"]["import"] == ["json", "math", "string"]
