"""Megatron's flags that stand for sections of the JSON, jobs without a JSON, and the JSON of a job with flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_ext.errors import ConfigError
from ds_ext.planner.job_plan import make_job_plan
from ds_ext.recipes.training.arguments import finished_json, parse
from tests.launch.jobs import tiny_config
from tests.plans import plan_job

ENOUGH = ["--lr", "6e-4", "--micro-batch-size", "4", "--global-batch-size", "32"]


def scheduler(*flags: str) -> dict[str, Any]:
    section = parse("train_gpt.py", [*ENOUGH, "--train-iters", "100", *flags])[1].deepspeed["scheduler"]
    assert section["type"] == "MegatronLR"
    return section["params"]


def test_learning_rate() -> None:
    """Defaults are Megatron's: linear decay over all steps, without warm-up."""
    assert scheduler("--min-lr", "6e-5") == {"min_lr": 6e-5, "total_num_steps": 100, "warmup_num_steps": 0}
    found = scheduler("--lr-decay-style", "cosine", "--lr-decay-iters", "80", "--lr-warmup-fraction", ".1")
    assert found == {"decay_style": "cosine", "total_num_steps": 80, "warmup_num_steps": pytest.approx(8)}
    found = scheduler("--lr-decay-samples", "1600", "--lr-warmup-samples", "80", "--lr-warmup-init", "1e-6")
    assert found == {"warmup_init_lr": 1e-6, "total_num_steps": 50, "warmup_num_steps": 2.5}
    assert scheduler("--lr-warmup-iters", "3")["warmup_num_steps"] == 3
    assert scheduler() == {"total_num_steps": 100, "warmup_num_steps": 0}


def test_loss_scale_optimizer_and_tensorboard() -> None:
    flags = "--fp16 --initial-loss-scale 4096 --loss-scale-window 500 --min-loss-scale 2 --hysteresis 3"
    words = [*ENOUGH, *flags.split(), "--optimizer", "adam", "--use-distributed-optimizer"]
    job = parse("train_gpt.py", [*words, "--tensorboard-dir", "runs"])[1].deepspeed
    assert job["fp16"] == {
        "enabled": True,
        "initial_scale_power": 12,
        "loss_scale_window": 500,
        "min_loss_scale": 2.0,
        "hysteresis": 3,
    }
    assert job["optimizer"]["type"] == "AdamW" and job["zero_optimization"] == {"stage": 1}
    assert job["tensorboard"] == {"enabled": True, "output_path": "runs", "job_name": ""}
    assert (
        parse("train_gpt.py", [*ENOUGH, "--fp16", "--loss-scale", "128"])[1].deepspeed["fp16"]["loss_scale"]
        == 128
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--lr-warmup-iters 3 --lr-warmup-fraction .1", "^--lr-warmup-iters, --lr-warmup-fraction: "),
        ("--lr-decay-iters 3 --lr-decay-samples 8", "^--lr-decay-iters, --lr-decay-samples: "),
        ("--lr-warmup-fraction 1.5", r"^--lr-warmup-fraction: .*got 1\.5"),
        ("--initial-loss-scale 1000", "^--initial-loss-scale: .*got 1000"),
    ],
)
def test_wrong_flags(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse("train_gpt.py", [*ENOUGH, *flags.split()])


def test_a_json_with_the_section_contradicts(tmp_path: Path) -> None:
    config = tmp_path / "job.json"
    section = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    config.write_text(json.dumps({"scheduler": section, "ds_ext": {}}))
    with pytest.raises(ConfigError, match=r"^--min-lr 0\.1: .*scheduler\.type.*WarmupLR"):
        parse("train_gpt.py", ["--deepspeed_config", str(config), "--min-lr", "0.1"])


def test_samples_need_the_size_of_a_step() -> None:
    with pytest.raises(ConfigError, match=r"^--lr-decay-samples: .*got 8 samples.*--global-batch-size"):
        parse("train_gpt.py", [*ENOUGH[:4], "--lr-decay-samples", "8"])


def test_a_job_without_a_json() -> None:
    args, job = parse("train_gpt.py", [*ENOUGH, "--pipeline-model-parallel-size", "2"])
    assert job.deepspeed["train_batch_size"] == 32 and args.num_layers
    assert job.deepspeed["optimizer"]["params"] == {"torch_adam": True, "lr": 6e-4}
    # As in Megatron, one micro-batch per step without --global-batch-size.
    assert parse("train_gpt.py", ENOUGH[:4])[1].deepspeed["gradient_accumulation_steps"] == 1
    two_pipes = ["--schedule", "bitpipe", "--pipeline-model-parallel-size", "2"]
    with pytest.raises(ConfigError, match=r"^--global-batch-size: .* 8 "):
        make_job_plan(parse("train_gpt.py", [*ENOUGH[:4], *two_pipes])[1])
    for missing, kept in (("--lr", ENOUGH[2:]), ("--micro-batch-size", ENOUGH[:2])):
        with pytest.raises(ConfigError, match=f"^--deepspeed_config: .*{missing}"):
            parse("train_gpt.py", kept)


def test_the_written_json_gives_the_same_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "job.json"
    config.write_text(json.dumps({k: v for k, v in tiny_config(tmp_path).items() if k != "scheduler"}))
    flags = [
        "--deepspeed_config",
        str(config),
        "--num-layers",
        "8",
        "--lr-warmup-iters",
        "2",
        "--swiglu",
        "--bf16",
    ]
    written = tmp_path / "written.json"
    with pytest.raises(SystemExit) as ended:
        plan_job("train_gpt.py", [*flags, "--write-config", str(written)], "gpt")
    assert ended.value.code == 0 and str(written) in capsys.readouterr().out
    args, job = parse("train_gpt.py", flags)
    again, job_again = parse("train_gpt.py", ["--deepspeed_config", str(written)])
    assert json.loads(written.read_text()) == finished_json("train_gpt.py", flags, "gpt", args, job)
    of_flags = {"deepspeed_config", "lr_warmup_iters", "bf16"}
    same = {key: value for key, value in vars(args).items() if key not in of_flags}
    assert same == {key: value for key, value in vars(again).items() if key not in of_flags}
    assert {**job.deepspeed, "ds_ext": None} == {**job_again.deepspeed, "ds_ext": None}
    with pytest.raises(ConfigError, match=r"^--write-config: "):
        plan_job("train_gpt.py", [*flags, "--write-config", str(tmp_path)], "gpt")
