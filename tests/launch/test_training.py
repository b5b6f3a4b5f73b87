"""Whole trainings by the script: what a person reads, what programs read, and resuming."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_ext.__main__ import main
from ds_ext.config.job import JobConfig
from ds_ext.errors import ConfigError
from ds_ext.observe.report.folder import read_run
from ds_ext.observe.trace.read import read_traces
from ds_ext.observe.trace.summary import summarize
from ds_ext.recipes.data.meta import read_meta
from ds_ext.recipes.models.gpt import GPTConfig
from ds_ext.recipes.training.setup import model_fields
from tests.launch.forked import ForkedJob, run_forked
from tests.launch.jobs import ROOT, Job, command, write_json
from tests.own_schedule import NAME, write_own_schedule
from tests.plans import plan_job
from tests.selection import extensive

SCRIPT = str(ROOT / "train_gpt.py")
COUNTED = str(Path(__file__).with_name("counted.py"))
KEYS = [
    *("step", "loss", "grad_norm", "lr", "iter_time_s", "samples_per_s", "tokens_per_s", "tflops_per_device"),
    *("mfu", "consumed_samples", "schedule", "transport", "peak_memory_bytes", "bubble_measured"),
    *(
        "bubble_simulated",
        "losses",
        "validation_loss",
        "validation_losses",
        "snapshot_s",
        "recovered_from_step",
        "tokens",
        "epoch",
        "expert_load",
        "idle_experts",
    ),
]


@pytest.fixture
def train(config: Path, tmp_path: Path, free_port: Callable[[], int]) -> Callable[..., Job]:
    """Run train_gpt.py on two ranks to its end: train(launcher, flags...)."""

    def run(launcher: str, *flags: str) -> Job:
        words = command(launcher, 2, free_port(), SCRIPT, "--deepspeed_config", config.name, *flags)
        with Job(words, tmp_path) as job:
            job.seconds_until_gone(600)
            assert job.wait(5) == 0, job.text
        return job

    return run


@pytest.fixture
def train_forked(config: Path, tmp_path: Path, free_port: Callable[[], int]) -> Callable[..., str]:
    """Run train_gpt.py on two ranks without a launcher and return their output: train_forked(flags...)."""

    def run(*flags: str, script: str = SCRIPT, **env: str) -> str:
        words = [script, "--deepspeed_config", config.name, *flags]
        with ForkedJob([words] * 2, tmp_path, port=free_port(), env=env) as job:
            assert [rank.returncode for rank in job.wait()] == [0, 0], job.text
            return job.text

    return run


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def launcher_free(lines: list[str]) -> list[str]:
    """The lines that are not the launcher's own."""
    return [line for line in lines if not re.search(r"\[(runner|launch)\.py|torch/distributed/run\.py", line)]


def test_training_shows_its_own_lines_only_and_resumes_where_it_was(
    train: Callable[..., Job], train_forked: Callable[..., str], tmp_path: Path
) -> None:
    whole, halves, saved = tmp_path / "whole.jsonl", tmp_path / "halves.jsonl", tmp_path / "saved"
    once = train("deepspeed", "--train-iters", "6", "--metrics-file", str(whole), "--eval-iters", "0")
    first = train(
        *("torchrun", "--train-iters", "3", "--metrics-file", str(halves), "--save", str(saved)),
    )
    again = (
        next(line for line in first.lines if "continue training" in line)
        .split("continue training", 1)[1]
        .split()
    )
    assert again[:3] == ["torchrun", "--nproc_per_node", "2"]
    assert again[-4:] == ["--load", str(saved), "--train-iters", "6"]
    second = train_forked(*again[again.index(SCRIPT) + 3 :])

    at_once, in_two = records(whole), records(halves)
    assert (
        [record["step"] for record in at_once] == [record["step"] for record in in_two] == [1, 2, 3, 4, 5, 6]
    )
    for one, other in zip(at_once, in_two, strict=True):
        assert list(one) == list(other) == KEYS
        for key in ("loss", "grad_norm", "lr", "consumed_samples"):
            assert one[key] == pytest.approx(other[key], rel=1e-6), (key, one["step"])
    planned = re.search(r"^bubble +([\d.]+)% \(simulated: layers and head", once.text, re.M)
    assert planned is not None
    for record in at_once:
        assert 100 * record["bubble_simulated"] == pytest.approx(float(planned[1]), abs=0.051)
        numbers = [value for value in record.values() if isinstance(value, int | float)]
        assert len(numbers) == 13 and all(math.isfinite(value) for value in numbers), record
        assert record["mfu"] is record["validation_loss"] is None
        assert record["tokens_per_s"] == pytest.approx(record["samples_per_s"] * 16)
        assert record["schedule"] == "bitpipe" and record["transport"] == "shm"
        assert record["consumed_samples"] == record["step"] * 8 and record["tokens"] == 8 * 16
    assert "at step 3, 24 samples consumed" in second
    # Evaluated after the last step only. The first half ran with the default of the JSON, one evaluation.
    assert [record["validation_loss"] is None for record in in_two] == [True, True, False] * 2

    for text, recorded in ((once.text, at_once), (first.text, in_two[:3]), (second, in_two[3:])):
        printed = [line for line in text.splitlines() if re.match(r"step +\d+/\d+ \| loss", line)]
        assert [line.split(" | ")[1] for line in printed] == [f"loss {r['loss']:.4f}" for r in recorded]
        lines = launcher_free(text.splitlines())
        plan_end = next(number for number, line in enumerate(lines) if line.startswith("more "))
        assert lines[0].startswith("schedule  bitpipe")
        known = re.compile(
            r"step |resumed from |(final|validation) loss |next: |      (show the|continue) |"
            r"(trained|memory|bubble|saved|report) +\S| {10}[\d,]+ samples, "
        )
        assert all(known.match(line) for line in lines[plan_end + 1 :]), text
        assert re.search(
            r"(final|validation) loss [\d.]+, (not )?below the unigram entropy of [\d.]+ nats", text
        )
        assert "python -m ds_ext show bitpipe --num-devices 2 --micro-batches 4" in text


def test_megatrons_flags_without_a_json(corpus: Path, tmp_path: Path, free_port: Callable[[], int]) -> None:
    """Linear decay to a minimum above 0, under ZeRO, and continued from a checkpoint."""
    flags = [
        *("--lr", "1e-3", "--min-lr", "1e-4", "--lr-warmup-iters", "2", "--lr-decay-iters", "6"),
        *("--micro-batch-size", "2", "--global-batch-size", "8", "--use-distributed-optimizer"),
        *("--pipeline-model-parallel-size", "2", "--enable-bitpipe-schedule", "--data-path", str(corpus)),
        *("--num-layers", "4", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16"),
        *("--split", "80,20,0", "--eval-iters", "0", "--metrics-file", "steps.jsonl", "--save", "saved"),
    ]
    for more in (["--train-iters", "3"], ["--train-iters", "8", "--load", "saved"]):
        results = run_forked([[SCRIPT, *flags, *more]] * 2, tmp_path, port=free_port())
        assert [result.returncode for result in results] == [0, 0], results
        assert json.loads(results[0].stdout.split("saves it):\n")[1].split("\nschedule ")[0])["scheduler"]
    rates = [row["lr"] for row in records(tmp_path / "steps.jsonl")]
    # Steps 1 and 2 warm up, steps 3 to 7 decay, all later ones have the minimum.
    assert rates == pytest.approx([0, 5e-4, 1e-3, 7.75e-4, 5.5e-4, 3.25e-4, 1e-4, 1e-4])


def test_everything_is_logged_on_demand(train_forked: Callable[..., str]) -> None:
    text = train_forked("--train-iters", "1", DS_EXT_LOG_LEVEL="info")
    assert "[INFO]" in text and "before it has started" in text


def changed(config: Path, name: str, **keys: Any) -> str:
    """Another job in the same folder: BitPipe on two ranks but for ``keys``; those in "ds_ext" replace single keys."""
    job = json.loads(config.read_text())
    job["ds_ext"].update(keys.pop("ds_ext", {}))
    (config.parent / name).write_text(json.dumps(job | keys))
    return name


def refused_before_a_start(config: Path, saved: Path) -> None:
    """A dry run compares the model with the checkpoint's, without ranks."""

    def make_config(more_words: int, args: argparse.Namespace, job: JobConfig | None) -> GPTConfig:
        entries = (read_meta(args.data_path) or {})["vocab_size"] + more_words
        return GPTConfig(**model_fields(args, job), vocab_size=entries)

    def fits(*flags: str, more_words: int = 0) -> None:
        words = ["--deepspeed_config", str(config), "--dry-run", "--load", str(saved), *flags]
        plan_job("train_gpt.py", words, "gpt", functools.partial(make_config, more_words))

    fits()
    for flags, words in (
        (["--num-layers", "5"], r"step_2 .*num_layers 4, here 5\)"),
        (["--hidden-size", "32"], r"hidden_size 16, here 32, ffn_hidden_size 64, here 128\)"),
        (["--num-attention-heads", "4"], r"num_attention_heads 2, here 4"),
        (["--max-position-embeddings", "99"], r"max_position_embeddings \d+, here 99"),
    ):
        with pytest.raises(ConfigError, match=words):
            fits(*flags)
    with pytest.raises(ConfigError, match=r"vocab_size \d+, here \d+\)\. .*tokenizer"):
        fits(more_words=1)


def test_resuming_under_another_schedule_sizes_and_batch(
    config: Path, train_forked: Callable[..., str], tmp_path: Path, free_port: Callable[[], int]
) -> None:
    saved, metrics = tmp_path / "saved", tmp_path / "metrics.jsonl"
    keep = ("--save", str(saved), "--metrics-file", str(metrics))
    one = changed(config, "1f1b.json", ds_ext={"schedule": "1f1b"}, train_batch_size=24)
    first = train_forked("--deepspeed_config", one, "--train-iters", "2", *keep)
    refused_before_a_start(tmp_path / one, saved)
    # Tensor instead of pipeline parallelism, and a third of the batch; the data go on at the next sample. All steps
    # together need fewer samples than are consumed.
    sizes = changed(
        config,
        "gpipe.json",
        ds_ext={
            **{"schedule": "gpipe", "pipeline_parallel_size": 1, "tensor_parallel_size": 2},
            "print_plan": False,
        },
        train_batch_size=8,
    )
    other = ("--load", str(saved), "--seed", "5", "--split", "7,3")
    again = train_forked("--deepspeed_config", sizes, "--train-iters", "3", *other, *keep)
    plans = [re.findall(r"^schedule  ", text, re.MULTILINE) for text in (first, again)]
    assert [len(lines) for lines in plans] == [1, 0]
    split, seed = (line for line in again.splitlines() if line.startswith("note: "))
    assert "--split" in split and "0.8,0.2,0" in split and "0.7,0.3,0" in split
    assert "--seed" in seed and "1234" in seed and "5" in seed
    (resumed,) = (line for line in again.splitlines() if line.startswith("resumed from "))
    assert re.search(r"step_2\b.* 48 samples .*1f1b\b.*PP 2 x TP 1 x DP 1", resumed)
    assert [record["consumed_samples"] for record in records(metrics)] == [24, 48, 48 + 8]
    assert (saved / "latest").read_text() == "step_3"

    (saved / "step_3" / "layer_01-model_00-model_states.pt").write_bytes(b"")
    refused = [SCRIPT, "--deepspeed_config", one, "--load", str(saved)]
    with ForkedJob([refused] * 2, tmp_path, port=free_port()) as job:
        assert [rank.returncode for rank in job.wait()] == [2, 2]
        (error,) = (line for line in job.text.splitlines() if line.startswith("error: "))
        assert "Traceback" not in job.text
    assert "step_3/layer_01-model_00-model_states.pt" in error and "(got 0)" in error
    assert str(saved / "latest") in error and "step_2" in error


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        (
            {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            {"type": "CosineAnnealingLR", "params": {"T_max": 4}},
        ),
        (
            {
                "type": "ADAM",
                "params": {
                    "torch_adam": True,
                    "adam_w_mode": False,
                    "decoupled_weight_decay": False,
                    "foreach": None,
                },
            },
            {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}},
        ),
    ],
    ids=["torch", "deepspeed"],
)
def test_optimizers_and_schedulers_that_are_accepted_run(
    config: Path, train_forked: Callable[..., str], optimizer: dict[str, Any], scheduler: dict[str, Any]
) -> None:
    zero = {"stage": 0}
    name = changed(config, "other.json", optimizer=optimizer, scheduler=scheduler, zero_optimization=zero)
    assert "step 3/3 | loss" in train_forked("--deepspeed_config", name)


@extensive
@pytest.mark.quick
def test_the_first_and_the_last_step_are_printed_whatever_the_interval(
    train_forked: Callable[..., str],
) -> None:
    text = train_forked("--train-iters", "7", "--log-interval", "3", "--eval-iters", "0")
    printed = [line.split("/")[0] for line in text.splitlines() if re.match(r"step +\d+/\d+ \| loss", line)]
    assert printed == ["step 1", "step 3", "step 6", "step 7"]


@extensive
def test_a_rank_works_out_its_timetable_once(train_forked: Callable[..., str], tmp_path: Path) -> None:
    train_forked("--train-iters", "2", "--eval-iters", "1", script=COUNTED)
    once = {"generated": 1, "lowered": 1, "checked": 1, "simulated": 1}
    assert [json.loads((tmp_path / f"counts.{rank}.json").read_text()) for rank in (0, 1)] == [once, once]


def test_an_own_script_has_plan_lines_metrics_and_monitors(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """The code and the JSON of docs/own_scripts.md, in a function that process.run runs."""
    page = (ROOT / "docs" / "own_scripts.md").read_text()
    code = next(b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "PipelineModule" in b)
    job = json.loads(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0])
    job["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "own"}
    job["steps_per_print"] = 10**9
    job["ds_ext"]["print_plan"] = "all"
    (tmp_path / "job.json").write_text("// as DeepSpeed reads it\n" + json.dumps(job)[:-1] + ",}")
    code = code.replace(
        "total_steps=10)", "total_steps=10, file='steps.jsonl', tokens_per_sample=5, **known)"
    )
    code = code.replace("loss_fn=torch.nn.functional.mse_loss", "loss_fn=loss_fn")
    assert "**known" in code and "loss_fn=loss_fn" in code
    (tmp_path / "own.py").write_text(
        f"config = 'job.json'\ndef main():\n{textwrap.indent(code, '    ')}"
        "import torch\n"
        "from ds_ext.launch import process\n"
        "known = {'flops_per_sample': 6e9, 'peak_tflops': 2.0}\n"
        "def loss_fn(outputs, labels):\n"
        "    loss = torch.nn.functional.mse_loss(outputs, labels)\n"
        "    loss_fn.additional_losses = {'half': loss / 2}\n"
        "    return loss\n"
        "loss_fn.additional_losses = {'half': 0.0}\n"
        "dataset = [(torch.ones(4) * i / 128, torch.zeros(4)) for i in range(128)]\n"
        "process.run(main)\n"
    )
    results = run_forked([["own.py"]] * 4, tmp_path, port=free_port(), env={"DS_EXT_LOG_LEVEL": "info"})
    assert [result.returncode for result in results] == [0] * 4, results
    printed = results[0].stdout
    assert not any("step " in result.stdout for result in results[1:])
    assert "stage 7   device 0, 3    Linear 14-15" in printed
    assert re.search(r"^ +0-3 +160$", printed, re.MULTILINE), printed  # eight layers of 20 parameters
    assert re.findall(r"^step +(\d+)/10 \| loss", printed, re.MULTILINE) == ["1", "10"]
    assert "[INFO]" in results[0].stdout + results[0].stderr

    rows = records(tmp_path / "steps.jsonl")
    assert [(list(row), row["step"]) for row in rows] == [(KEYS, step) for step in range(1, 11)]
    for row in rows:
        assert row["losses"] == {"half": pytest.approx(row["loss"] / 2, rel=1e-5)}
        assert row["samples_per_s"] == pytest.approx(64 / row["iter_time_s"])
        assert row["tokens_per_s"] == pytest.approx(5 * row["samples_per_s"])
        assert row["tflops_per_device"] == pytest.approx(row["samples_per_s"] * 6e9 / 4 / 1e12)
        assert row["mfu"] == pytest.approx(row["tflops_per_device"] / 2)
        assert row["consumed_samples"] == 64 * row["step"] and row["peak_memory_bytes"] > 100 << 20
    for name, key in (("grad_norm", "grad_norm"), ("bubble", "bubble_measured"), ("half", "loss")):
        lines = (tmp_path / "csv" / "own" / f"Train_Samples_{name}.csv").read_text().splitlines()[1:]
        half = 0.5 if name == "half" else 1.0
        assert [float(line.split(",")[1]) for line in lines] == pytest.approx(
            [half * row[key] for row in rows]
        )


@extensive
def test_validation_checkpoints_and_resuming_of_an_own_script(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """The code of docs/own_scripts.md: the validation loss is the same under every schedule, and a run resumes."""
    page = (ROOT / "docs" / "own_scripts.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    build = next(block for block in blocks if "PipelineModule" in block).split("for step in")[0]
    loop = next(block for block in blocks if "load_checkpoint" in block)
    assert "total_steps=10" in build and "steps = 20" in loop and '"checkpoints/own"' in loop
    calls = ["load_checkpoint", "try_checkpoint_folder", "train_batch", "save_checkpoint"]
    assert re.findall("|".join(calls), loop) == calls
    job = json.loads(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0])
    for schedule, steps in (("bitpipe", 10), ("bitpipe", 20), ("1f1b", 20)):
        folder, build_of = (
            schedule,
            build.replace("total_steps=10", f"total_steps=20, file='{schedule}.jsonl'"),
        )
        job["ds_ext"]["schedule"] = schedule
        write_json(tmp_path / "job.json", job)
        code = build_of + loop.replace("steps = 20", f"steps = {steps}").replace("checkpoints/own", folder)
        (tmp_path / "own.py").write_text(
            f"config = 'job.json'\ndef main():\n{textwrap.indent(code, '    ')}"
            "import torch\n"
            "from ds_ext.launch import process\n"
            "dataset = [(torch.ones(4) * i / 128, torch.zeros(4)) for i in range(128)]\n"
            "validation_dataset = [(torch.ones(4) * i / 64, torch.ones(4)) for i in range(64)]\n"
            "process.run(main)\n"
        )
        results = run_forked([["own.py"]] * 4, tmp_path, port=free_port())
        assert [result.returncode for result in results] == [0] * 4, results
    rows = {schedule: records(tmp_path / f"{schedule}.jsonl") for schedule in ("bitpipe", "1f1b")}
    for found in rows.values():
        assert [row["step"] for row in found] == list(range(1, 21))
        assert [row["step"] for row in found if row["validation_loss"] is not None] == [10, 20]
    for one, other in zip(*rows.values(), strict=True):
        for key in ("loss", "validation_loss"):
            assert one[key] is other[key] is None or one[key] == pytest.approx(other[key], rel=1e-5)


def test_an_own_script_without_a_launcher_is_the_only_rank(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    config: dict[str, Any] = {
        "train_batch_size": 4,
        "ds_ext": {"schedule": "1f1b", "pipeline_parallel_size": 2},
    }
    (tmp_path / "own.py").write_text(
        "import sys, torch, ds_ext\n"
        "from ds_ext.launch import process\n"
        "def main():\n"
        "    ds_ext.init_distributed()\n"
        f"    config = {config}\n"
        "    config['ds_ext']['pipeline_parallel_size'] = int(sys.argv[1])\n"
        "    model = ds_ext.PipelineModule([torch.nn.Linear(1, 1)] * 4, config, loss_fn=torch.nn.functional.mse_loss)\n"
        "    data = [(torch.ones(1), torch.zeros(1))] * 8\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    engine, *_ = ds_ext.initialize(model=model, optimizer=optimizer, training_data=data)\n"
        "    print('loss', float(engine.train_batch()))\n"
        "process.run(main)\n"
    )
    for devices, status in (("1", 0), ("2", 2)):
        words = [sys.executable, "own.py", devices]
        done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == status, done.stderr
        if status == 0:
            assert float(re.findall(r"^loss (\S+)$", done.stdout, re.MULTILINE)[0]) >= 0
        else:
            errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            assert len(errors) == 1 and "(got 1)" in errors[0] and "Traceback" not in done.stderr


def test_the_plan_can_be_omitted(tmp_path: Path, free_port: Callable[[], int]) -> None:
    config: dict[str, Any] = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}
    config["ds_ext"] = {"schedule": "1f1b", "pipeline_parallel_size": 2, "print_plan": False}
    (tmp_path / "own.py").write_text(
        "import torch, ds_ext\nds_ext.init_distributed()\n"
        f"config = {config}\n"
        "model = ds_ext.PipelineModule([torch.nn.Linear(1, 1) for _ in range(4)], config)\n"
        "ds_ext.initialize(model=model, config=config)\n"
    )
    results = run_forked([["own.py"]] * 2, tmp_path, port=free_port())
    assert [(result.returncode, result.stdout) for result in results] == [(0, "")] * 2


@extensive
def test_the_report_of_a_resumed_run(train_forked: Callable[..., str], config: Path, tmp_path: Path) -> None:
    """Metrics, record and traces of two starts fit together, and the page has the numbers of both."""
    job, metrics, saved = json.loads(config.read_text()), tmp_path / "run" / "steps.jsonl", tmp_path / "saved"
    job["ds_ext"]["trace"] = {"dir": "run/traces"}
    write_json(config, job)
    flags = [
        "--metrics-file",
        str(metrics),
        "--save",
        str(saved),
        "--eval-interval",
        "2",
        "--eval-iters",
        "1",
    ]
    text = train_forked("--train-iters", "3", "--save-interval", "2", *flags)
    assert f"python -m ds_ext report {metrics} -o report.html" in text
    train_forked("--train-iters", "4", "--load", str(saved), *flags)

    run = read_run(tmp_path / "run")
    assert run.notes == [] and [[row["step"] for row in start.rows] for start in run.starts] == [
        [1, 2, 3],
        [4],
    ]
    first, second = (start.facts for start in run.starts)
    events = [
        [(event["event"], event["step"]) for event in facts["checkpoints"]] for facts in (first, second)
    ]
    assert events == [[("saved", 2), ("saved", 3)], [("loaded", 3), ("saved", 4)]]
    assert all(Path(event["path"]).is_dir() for event in first["checkpoints"])
    assert (first["world_size"], first["pipeline_parallel_size"], first["micro_batches"]) == (2, 2, 4)
    assert [rank["device"] for rank in first["ranks"]] == [0, 1] and first["model"]["hidden_size"] == 16
    assert max(second["peak_memory_bytes"]) == pytest.approx(run.rows[-1]["peak_memory_bytes"], rel=0.02)
    # A step's bubble is the same in metrics and traces, also if an evaluation follows the step.
    assert run.traces is not None
    bubbles = summarize(run.traces).bubble_by_step
    assert bubbles == {4: pytest.approx(run.rows[-1]["bubble_measured"], abs=1e-6)}
    earlier = next((tmp_path / "run" / "traces").glob("*/rank0.json")).parent
    bubbles = summarize(read_traces(earlier)).bubble_by_step
    assert [bubbles[step] for step in (1, 2, 3)] == [
        pytest.approx(row["bubble_measured"], abs=1e-6) for row in run.rows[:3]
    ]
    assert main(["report", str(metrics.parent), "-o", str(tmp_path / "page.html")]) == 0
    assert re.findall(r'data-step="(\d+)"', (tmp_path / "page.html").read_text()) == ["4"]


def test_trains_with_an_own_schedule_of_the_jobs_folder(
    train_forked: Callable[..., str], config: Path, tmp_path: Path
) -> None:
    write_own_schedule(tmp_path, "mine")
    job, steps = json.loads(config.read_text()), tmp_path / "steps.jsonl"
    job["ds_ext"] |= {"schedule": NAME, "import": ["mine"]}
    write_json(config, job)
    train_forked("--train-iters", "2", "--eval-iters", "0", "--metrics-file", str(steps))
    assert [(row["step"], row["schedule"]) for row in records(steps)] == [(1, NAME), (2, NAME)]
