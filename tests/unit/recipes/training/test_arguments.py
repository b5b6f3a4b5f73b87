"""Flags, the "train" object of the JSON, and their contradictions."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from ds_ext.config.job import JobConfig
from ds_ext.errors import ConfigError
from ds_ext.recipes.training.arguments import parse
from tests.own_schedule import NAME, write_own_schedule
from tests.plans import placement_of, plan_job

ROOT = Path(__file__).parents[4]


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


def test_flags_set_keys_of_the_json(run: Any) -> None:
    sizes = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 3 --micro-batch-size 2"
    _, job = run({}, "--schedule", "interleaved", *sizes.split(), "--lr", "0.5", "--clip-grad", "2")
    section = job.ds_ext
    assert section.schedule == "interleaved"
    assert (section.pipeline_parallel_size, section.tensor_parallel_size) == (2, 3)
    assert job.deepspeed["optimizer"] == {"type": "AdamW", "params": {"lr": 0.5, "torch_adam": True}}
    assert (job.deepspeed["gradient_clipping"], job.deepspeed["train_micro_batch_size_per_gpu"]) == (2, 2)
    assert section.rank_order == "tp-dp-pp"
    assert run({}, "--use-tp-pp-dp-mapping")[1].ds_ext.rank_order == "tp-pp-dp"
    assert run({}, "--calculate-per-token-loss")[1].deepspeed["ds_ext"]["loss_weighting"] == "tokens"
    # Equal values do not contradict.
    same = ["--enable-bitpipe-schedule", "--schedule", "bitpipe"]
    assert run({"ds_ext": {"schedule": "bitpipe"}}, *same)[1].ds_ext.schedule == "bitpipe"


@pytest.mark.parametrize(
    ("config", "flags", "words"),
    [
        (
            {"ds_ext": {"schedule": "1f1b"}},
            ["--enable-bitpipe-schedule"],
            r"^--enable-bitpipe-schedule: .*ds_ext\.schedule .*job\.json .*got '1f1b'",
        ),
        (
            {"ds_ext": {"pipeline_parallel_size": 4}},
            ["--pipeline-model-parallel-size", "2"],
            r"^--pipeline-model-parallel-size 2: .*ds_ext\.pipeline_parallel_size .*got 4",
        ),
        (
            {"ds_ext": {"rank_order": "tp-dp-pp"}},
            ["--use-tp-pp-dp-mapping"],
            r"^--use-tp-pp-dp-mapping: .*ds_ext\.rank_order .*got 'tp-dp-pp'",
        ),
        (
            {"ds_ext": {"loss_weighting": "micro_batches"}},
            ["--calculate-per-token-loss"],
            r"^--calculate-per-token-loss: .*ds_ext\.loss_weighting .*got 'micro_batches'",
        ),
        ({}, ["--global-batch-size", "16"], r"^--global-batch-size 16: .*train_batch_size .*got 8"),
        (
            {},
            ["--schedule", "gpipe", "--enable-bitpipe-schedule"],
            r"ds_ext\.schedule .*--schedule gpipe .*got 'gpipe'",
        ),
        (
            {"optimizer": {"params": {"betas": [0.9, 0.95]}}},
            ["--adam-beta1", "0.8"],
            r"^--adam-beta1 0\.8: .*optimizer\.params\.betas .*got \[0\.9, 0\.95\]",
        ),
        ({"bf16": {"enabled": True}}, ["--fp16"], r"bf16\.enabled, fp16\.enabled: "),
        ({"optimizer": {"params": 3}}, ["--adam-beta1", "1"], r"^optimizer\.params: .*got 3"),
        ({"optimizer": None}, ["--lr", "1"], r"^optimizer: .*got None"),
        ({}, ["--node-ips", "10.0.0.1,node7"], r"transport_options.node_ips: .*'node7'"),
    ],
)
def test_contradictions(run: Any, config: dict[str, Any], flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(config, *flags)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"num_layer": 4}, r"^train\.num_layer: .*got 4.*'num_layers'"),
        ({"xyzzy": 4}, r"^train\.xyzzy: .*attention_dropout, "),
        ({"schedule": "gpipe"}, r"^train\.schedule: .*got 'gpipe'"),
        ({"version": "1"}, r"^train\.version: "),
        ({"num_layers": "4"}, r"^train\.num_layers: .*integer .*got '4'"),
        ({"num_layers": 4.0}, r"^train\.num_layers: .*got 4\.0"),
        ({"num_layers": True}, r"^train\.num_layers: .*got True"),
        ({"hidden_dropout": "none"}, r"^train\.hidden_dropout: .*number .*got 'none'"),
        ({"bert_no_binary_head": 1}, r"^train\.bert_no_binary_head: "),
        ({"save": 3}, r"^train\.save: .*got 3"),
        ({"data_path": 7}, r"^train\.data_path: .*got 7"),
        ({"recompute_granularity": "half"}, r"none, selective, full .*got 'half'"),
        (
            {"moe_expert_capacity_factor": 2},
            r"^train\.moe_expert_capacity_factor: .*--moe-expert-capacity-factor",
        ),
    ],
)
def test_wrong_keys_and_types_in_train(run: Any, train: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run({"ds_ext": {"train": train}})


def test_unknown_flags(run: Any) -> None:
    for words in (["--num-layer", "4"], ["--num-layer=4"], ["--save", "x", "--num-layer", "4", "--lrr", "1"]):
        with pytest.raises(ConfigError, match=r"^--num-layer: .*--num-layers\?"):
            run({}, *words)
    for word in ("--zzz", "stray"):
        with pytest.raises(ConfigError, match=rf"(?s)^{word}: .*`python"):
            run({}, word)


def test_optimizer_and_precision_flags_set_keys(run: Any) -> None:
    numbers = "--weight-decay 0 --adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-6"
    _, job = run({}, *numbers.split(), "--bf16")
    assert job.deepspeed["optimizer"] == {"params": {"weight_decay": 0, "betas": [0.8, 0.95], "eps": 1e-6}}
    assert job.deepspeed["bf16"] == {"enabled": True}
    assert run({}, "--fp16")[1].deepspeed["fp16"] == {"enabled": True}
    assert job.flags["optimizer.params.betas"] == "--adam-beta1 0.8 --adam-beta2 0.95"
    # One flag keeps the other element.
    assert run({}, "--adam-beta2", "0.95")[1].deepspeed["optimizer"]["params"]["betas"] == [0.9, 0.95]
    same = {"optimizer": {"params": {"betas": [0.7, 0.95]}}}
    assert run(same, "--adam-beta1", "0.7")[1].deepspeed["optimizer"] == same["optimizer"]


def test_the_version_needs_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    import ds_ext

    with pytest.raises(SystemExit) as stop:
        parse("train_gpt.py", ["--version"])
    assert stop.value.code == 0
    # torch.__version__ may have a local version, such as +cu130, that its package lacks.
    versions = f"deepspeed {version('deepspeed')}, torch {version('torch')}"
    assert capsys.readouterr().out == f"ds_ext {ds_ext.__version__}, {versions}\n"


def test_tokenizer_flags(run: Any) -> None:
    for flag in ("--tokenizer", "--tokenizer-model"):
        args, _ = run({}, flag, "t.model", "--tokenizer-type", "SentencePieceTokenizer")
        assert args.tokenizer == "t.model"
    with pytest.raises(ConfigError, match="'NullTokenizer'"):
        run({}, "--tokenizer-type", "NullTokenizer")


@pytest.mark.parametrize(
    ("words", "use"),
    [
        ("--recompute-num-layers 2", "--recompute-interval"),
        ("--warmup=0.1", "--lr-warmup-fraction"),
        ("--num-gpus 8", "launcher"),
        ("--workload 1024", "slices"),
        ("--trace", '"trace"'),
    ],
)
def test_flags_of_megatron_are_refused_with_a_replacement(run: Any, words: str, use: str) -> None:
    flag = words.partition(" ")[0].partition("=")[0]
    with pytest.raises(ConfigError, match=rf"{flag}: .*{use}"):
        run({}, *words.split())


def test_all_unknown_flags_are_in_one_error(run: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        run(
            {},
            *[
                "--kill-switch-file",
                "1",
                "--seqlength",
                "8",
                "--num-gpus",
                "8",
                "--workload",
                "3",
                "--lr",
                "0.1",
            ],
        )
    flags = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert flags == ["--kill-switch-file", "--seqlength", "--num-gpus", "--workload"]
    assert "--seq-length" in str(caught.value)


def test_flags_of_other_systems_set_the_schedule(run: Any) -> None:
    sizes = {"ds_ext": {"pipeline_parallel_size": 2}}
    for flag, name in (("--use-dpp", "dpp"), ("--forward-backward-disaggregating", "fbd")):
        job = run(sizes, flag)[1]
        assert job.ds_ext.schedule == name and placement_of(job).stages >= 2


# --- custom schedules ------------------------------------------------------------------------------------------------

JOB = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
PLAN = """
import sys
from ds_ext.config.job import load_config
from ds_ext.errors import ConfigError
from ds_ext.planner.job_plan import resolve_schedule
from tests.plans import plan_job
flags = ["--deepspeed_config", sys.argv[1], *sys.argv[2:]]
try:
    plan_job("train_gpt.py", flags, "gpt")
except ConfigError as error:
    print(str(error).splitlines()[0])
print(resolve_schedule(load_config(sys.argv[1]))[0].name)
"""


@pytest.mark.parametrize(("key", "flags"), [(["mine"], []), ([], ["--import", "mine"])], ids=["key", "flag"])
def test_custom_schedules_are_imported_first(key: list[str], flags: list[str], tmp_path: Path) -> None:
    """The next error is the missing data. Each case has its own process because a schedule stays registered."""
    write_own_schedule(tmp_path, "mine")
    section = {"schedule": NAME, "pipeline_parallel_size": 2, "import": key}
    (tmp_path / "job.json").write_text(json.dumps({**JOB, "ds_ext": section}))
    words = [sys.executable, "-c", PLAN, str(tmp_path / "job.json"), *flags]
    folder = ROOT if key else tmp_path  # the key also searches the folder of the JSON
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    missing, name = done.stdout.splitlines()
    assert "--data-path" in missing and name == NAME


def test_unknown_schedules_and_modules_are_reported_before_missing_data(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    for section, words in (
        ({"schedule": "bitpip"}, ("bitpip", "bitpipe")),
        ({"import": ["no_such_module"]}, ("import", "no_such_module", "PYTHONPATH")),
    ):
        path.write_text(json.dumps({**JOB, "ds_ext": section}))
        with pytest.raises(ConfigError) as caught:
            plan_job("train_gpt.py", ["--deepspeed_config", str(path), "--dry-run"], "gpt")
        assert all(word in str(caught.value) for word in words)


def test_import_flags_and_keys_are_joined(run: Any) -> None:
    _, job = run({"ds_ext": {"import": ["json", "math"]}}, "--import", "math", "--import", "string")
    assert job.ds_ext.modules == ["json", "math", "string"]
    assert job.deepspeed["ds_ext"]["import"] == ["json", "math", "string"]
