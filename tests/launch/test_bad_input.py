"""Bad input: one error by rank 0, exit code 2, and no process group.

Most scripts run in forked processes; launches and dry runs in new interpreters show the whole way.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_ext.recipes.data.tokenizer import train_bpe
from tests.launch.forked import run_forked
from tests.launch.jobs import LAUNCHERS, ROOT, Job, command, environment, tiny_config, write_json
from tests.selection import select

SCRIPT, TOY = str(ROOT / "train_gpt.py"), str(ROOT / "tests" / "launch" / "toy.py")


def run_rank(
    path: Path, *flags: str, rank: int = 0, world: int = 2, script: str = "train_gpt.py", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` as one rank of a job; a rendezvous would fail immediately, because it has no address."""
    words = [str(ROOT / script), "--deepspeed_config", str(path), *flags]
    place = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    (result,) = run_forked([words], path.parent, env=place | env)
    return result


def refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: "), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    for word in words:
        assert word in result.stderr


Change = Callable[[dict[str, Any]], Any]

NO_DATA = (
    "nowhere/text_document.bin",
    "python -m ds_ext prepare --source stdlib --output nowhere",
)
JSON_FAULTS: dict[str, tuple[Change, int, tuple[str, ...]]] = {
    "odd devices": (lambda c: c["ds_ext"].update(pipeline_parallel_size=3), 3, ("bitpipe", "3", "2 or 4")),
    "micro-batches": (lambda c: c.update(train_batch_size=4), 4, ("multiple of 4", "got 2")),
    "layers": (
        lambda c: c["ds_ext"]["train"].update(num_layers=3),
        2,
        ("num_layers:", "4 stages", "got 3", "4 layers"),
    ),
    "our key": (
        lambda c: c["ds_ext"].update(schedules="gpipe"),
        2,
        ("ds_ext.schedules: ", "got 'gpipe'", "schedule?"),
    ),
    "train key": (lambda c: c["ds_ext"]["train"].update(sed=1), 2, ("train.sed: ", "'seed'")),
    "world": (
        lambda c: None,
        3,
        ("world size:", "multiple of 2", "got 3", "deepspeed --num_gpus 2", "torchrun"),
    ),
    "one rank": (
        lambda c: None,
        1,
        ("world size:", "got 1", "deepspeed --num_gpus 2", "torchrun --nproc_per_node 2"),
    ),
    "no data": (lambda c: c["ds_ext"]["train"].update(data_path="nowhere"), 2, NO_DATA),
    "typo beside": (lambda c: c.update(ds_exts=c.pop("ds_ext")), 1, ("ds_exts: ", "mean ds_ext?")),
    "ZeRO 2": (
        lambda c: c["zero_optimization"].update(stage=2),
        2,
        ("zero_optimization.stage", "got 2", '{"stage": 1}'),
    ),
    "ZeRO 3": (lambda c: c["zero_optimization"].update(stage=3), 2, ("zero_optimization.stage", "got 3")),
    "ZeRO's key": (
        lambda c: c["zero_optimization"].update(reduce_buckt_size=1),
        2,
        ("zero_optimization.reduce_buckt_size: ", "mean reduce_bucket_size?"),
    ),
    "no section": (lambda c: c.update(bf16=True), 2, ("bf16: ", "got True")),
    "data path": (lambda c: c["ds_ext"]["train"].update(data_path=7), 2, ("data_path", "got 7")),
    "no optimizer": (lambda c: c.pop("optimizer"), 2, ("optimizer", "AdamW")),
    "batch sizes": (lambda c: c.update(train_batch_size=5), 2, ("5", "train_batch_size")),
    "optimizer": (
        lambda c: c["optimizer"].update(type="Adamm"),
        2,
        ("optimizer.type: ", "'Adamm'", "mean Adam?"),
    ),
    "its parameter": (
        lambda c: c["optimizer"]["params"].update(learning_rate=1),
        2,
        ("optimizer.params.learning_rate: ", "mean lr?"),
    ),
    "its number": (lambda c: c["optimizer"]["params"].update(lr=-1), 2, ("optimizer.params.lr", "got -1")),
    "scheduler": (
        lambda c: c["scheduler"].update(type="Warmup"),
        2,
        ("scheduler.type: ", "'Warmup'", "mean WarmupLR?"),
    ),
    "heads": (lambda c: c["ds_ext"]["train"].update(num_attention_heads=3), 2, ("16", "3")),
}


@pytest.mark.quick
@pytest.mark.parametrize("fault", JSON_FAULTS)
def test_fault_in_the_json(corpus: Path, tmp_path: Path, fault: str) -> None:
    change, world, words = JSON_FAULTS[fault]
    config = tiny_config(corpus)
    if fault == "micro-batches":
        config["ds_ext"]["pipeline_parallel_size"] = 4
        config["ds_ext"]["train"]["num_layers"] = 8
    change(config)
    refused(run_rank(write_json(tmp_path / "job.json", config), world=world), *words)


FLAG_FAULTS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "contradiction": (["--use-dpp"], ("--use-dpp", "bitpipe")),
    "two flags": (["--pipeline-model-parallel-size", "4"], ("pipeline_parallel_size", "4", "2")),
    "unknown flag": (["--num-layer", "4"], ("--num-layer",)),
    "Megatron's flag": (["--recompute-num-layers", "2"], ("--recompute-interval",)),
    "global batch": (
        ["--global-batch-size", "10"],
        ("--global-batch-size 10", "train_batch_size", "(got 8)"),
    ),
    "not a number": (["--num-layers", "four"], ("four",)),
    "no checkpoint": (["--load", "."], ("--load .", "no checkpoint")),
    "missing checkpoint": (
        ["--load", "nowhere", "--exit-on-missing-checkpoint"],
        ("--load nowhere", "no checkpoint"),
    ),
    "unwritable": (["--save", "bitpipe.json/here"], ("--save", "bitpipe.json is a file")),
    "half a tokenizer": (["--vocab-file", "vocab.json"], ("--merge-file",)),
    "kind of tokenizer": (
        ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer", "tokenizer.json"],
        ("SentencePieceTokenizer needs", ".model file (got tokenizer.json)"),
    ),
    "tokenizer without files": (["--tokenizer-type", "GPT2BPETokenizer"], ("--merge-file", "got none")),
    "metrics below a file": (
        ["--metrics-file", "bitpipe.json/metrics"],
        ("--metrics-file", "bitpipe.json is a file"),
    ),
    "metrics into a folder": (["--metrics-file", "."], ("--metrics-file", "(got .)", "metrics.jsonl")),
    "learning rate": (["--weight-decay", "-1"], ("--weight-decay: ", "got -1.0")),
    "no steps": (["--train-iters", "0"], ("--train-iters",)),
    "negative number": (["--keep-checkpoints", "-1"], ("--keep-checkpoints: ", "got -1")),
}


@pytest.mark.quick
@pytest.mark.parametrize("fault", FLAG_FAULTS)
def test_fault_in_the_flags(config: Path, fault: str) -> None:
    flags, words = FLAG_FAULTS[fault]
    refused(run_rank(config, *flags), *words)


def test_missing_and_damaged_json(tmp_path: Path) -> None:
    refused(run_rank(tmp_path / "none.json"), "none.json: ")
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"ds_ext": {},\n "optimizer" {}}')
    refused(run_rank(damaged), "damaged.json", "line 2")
    damaged.write_text('{"ds_ext": {"schedule": "gpipe",\n "schedule": "1f1b"}}')
    refused(run_rank(damaged), "damaged.json: ", "'schedule'", "1, 2")


def test_dry_run_finds_what_a_run_would(corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(corpus)
    config["scheduler"]["params"]["warmup_steps"] = 3
    path = write_json(tmp_path / "job.json", config)
    refused(run_rank(path, "--dry-run", world=1), "scheduler.params.warmup_steps: ", "mean warmup_num_steps?")
    assert sorted(tmp_path.iterdir()) == [path]


def test_tokenizer_of_other_data(config: Path, corpus: Path, tmp_path: Path) -> None:
    train_bpe(["words of another text, and others"], 280).save(tmp_path)
    refused(run_rank(config, "--tokenizer", str(tmp_path)), "tokenizer", "fingerprint")
    taken = run_rank(config, "--tokenizer", str(corpus / "tokenizer.json"), "--dry-run", world=2)
    assert taken.returncode == 0, taken.stderr


def test_unknown_log_level(config: Path) -> None:
    refused(run_rank(config, DS_EXT_LOG_LEVEL="loud"), "loud", "debug, info, warning, error")


def test_other_ranks_leave_it_to_rank_0(tmp_path: Path) -> None:
    """They wait until the launcher ends them; where no launcher does, they report the error themselves."""
    result = run_rank(tmp_path / "none.json", rank=1)
    assert result.returncode == 2
    assert result.stderr.startswith("rank 1: error: ") and "none.json" in result.stderr


@pytest.mark.quick
@pytest.mark.parametrize("launcher", select([*LAUNCHERS], ["torchrun"]))
def test_launchers_show_it_once(config: Path, free_port: Callable[[], int], launcher: str) -> None:
    """`deepspeed` passes the exit code on; torchrun always ends with 1 and shows ours in its report."""
    with Job(
        command(launcher, 3, free_port(), SCRIPT, "--deepspeed_config", str(config)), config.parent
    ) as job:
        job.seconds_until_gone(600)
        assert job.wait(5) == (2 if launcher == "deepspeed" else 1)
        said = [line for line in job.lines if "world size: " in line]
        assert said[0].startswith("error: ")
        assert not any(line.startswith("rank ") for line in job.lines), job.text
        if launcher == "torchrun":
            assert len(said) == 2 and "traceback : error: world size: " in said[1]
            assert any("exitcode  : 2" in line for line in job.lines)
        else:
            assert len(said) == 1 and "Traceback" not in job.text


PRECISION_JOBS: dict[str, tuple[str, list[str], tuple[str, ...]]] = {
    "fp16": ("fp16", [], ("fp16.enabled: ", "cpu", '"bf16"', "fp32")),
    "fp16 flag": ("", ["--fp16"], ("--fp16: ", "cpu", '"bf16"', "fp32")),
    "bf16": ("bf16", [], ("bf16.enabled: ", "cpu", "fp32")),
    "bfloat16": ("bfloat16", [], ("bfloat16.enabled: ", "cpu", "fp32")),
}


@pytest.mark.parametrize("job", PRECISION_JOBS)
def test_precision_that_the_device_lacks(corpus: Path, tmp_path: Path, job: str) -> None:
    section, flags, words = PRECISION_JOBS[job]
    enabled = {section: {"enabled": True}} if section else {}
    path = write_json(tmp_path / "job.json", tiny_config(corpus) | enabled)
    without = "fp16" if "fp16" in job else "fp16,bf16"
    refused(run_rank(path, *flags, DS_EXT_TEST_WITHOUT=without), *words)
    planned = run_rank(path, *flags, "--dry-run", DS_EXT_TEST_WITHOUT=without)
    assert planned.returncode == 0, planned.stderr


def test_precision_that_the_device_lacks_for_bert(bert_corpus: Path, tmp_path: Path) -> None:
    config = tiny_config(bert_corpus)
    config["ds_ext"]["train"] |= {"seq_length": 24}
    path = write_json(tmp_path / "job.json", config)
    result = run_rank(path, "--fp16", script="train_bert.py", DS_EXT_TEST_WITHOUT="fp16")
    refused(result, "--fp16: ", "cpu", '"bf16"', "fp32")


def test_own_script_with_a_precision_that_the_device_lacks(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    words, env = [TOY, "1", "30"], {"TOY_PRECISION": "fp16", "DS_EXT_TEST_WITHOUT": "fp16"}
    first, second = run_forked([words] * 2, tmp_path, port=free_port(), env=env)
    refused(first, "fp16.enabled: ")
    assert second.returncode == 2
    # c10d prints a warning and a C++ stack where rank 0 has left first; rank 1 itself prints nothing.
    assert not re.search("^(rank 1|error|Traceback)", second.stderr, re.MULTILINE), second.stderr


def test_dry_run_prints_the_plan(config: Path) -> None:
    words = [sys.executable, SCRIPT, "--deepspeed_config", str(config), "--dry-run", "--verbose"]
    result = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=900)
    assert result.returncode == 0 and result.stderr == ""
    assert "stage 3   device 0, 1" in result.stdout and "bubble" in result.stdout


def test_dry_run_ends_quietly_when_its_reader_leaves(config: Path) -> None:
    """As `train_gpt.py --dry-run | head -1` does, when head is the faster one."""
    words = [sys.executable, SCRIPT, "--deepspeed_config", str(config), "--dry-run"]
    pipes = subprocess.PIPE
    with subprocess.Popen(words, env=environment(), stdout=pipes, stderr=pipes, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(600) == 141


def test_a_port_that_is_taken(config: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (result,) = run_forked(
            [[SCRIPT, "--deepspeed_config", str(config)]], tmp_path, port=port, env={"WORLD_SIZE": "2"}
        )
        assert result.returncode != 0
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and str(port) in errors[0] and "MASTER_PORT" in errors[0]
        assert "EADDRINUSE" not in result.stderr
