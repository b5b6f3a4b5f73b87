"""Requests to end a run: signals, deadline and interval, in steps, evaluations and saves."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ds_ext.engine.checkpoint.folder import open_checkpoint
from tests.launch.forked import run_forked
from tests.launch.jobs import ROOT, Job, command, tiny_config, write_json
from tests.selection import extensive, select

STEPS = 6
STOPPED = str(Path(__file__).with_name("stopped.py"))
SCRIPT = str(ROOT / "train_gpt.py")
# Schedule -> the section "ds_ext", and number of ranks.
JOBS = {
    "bitpipe": ({"schedule": "bitpipe", "pipeline_parallel_size": 2}, 2),
    "fbd": ({"schedule": "fbd", "pipeline_parallel_size": 2}, 4),
    "bitpipe_3d": ({"schedule": "bitpipe", "pipeline_parallel_size": 2, "tensor_parallel_size": 2}, 4),
}


@pytest.fixture
def words(corpus: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function of schedule and flags that returns the words of a rank's command."""

    def script(schedule: str, *flags: str) -> list[str]:
        config = write_json(tmp_path / f"{schedule}.json", tiny_config(corpus, **JOBS[schedule][0]))
        intervals = ["--eval-interval", "2", "--eval-iters", "3", "--train-iters", str(STEPS)]
        return [SCRIPT, "--deepspeed_config", str(config), *intervals, *flags]

    return script


def metrics(file: Path) -> list[tuple[Any, ...]]:
    """Return step, loss and validation loss of every line of a metrics file."""
    lines = map(json.loads, file.read_text().splitlines())
    return [(line["step"], line["loss"], line.get("validation_loss")) for line in lines]


def checksums(folder: Path) -> dict[str, Any]:
    """Return the checksums of the weights and optimizer states of the current checkpoint."""
    files = open_checkpoint(folder)[1]["files"]
    return {name: record for name, record in files.items() if not name.startswith(("random", "mp_rank"))}


def run(ranks: int, script: Sequence[str], folder: Path, port: int) -> str:
    """Run a job to its end, which must be a success, and return its output."""
    results = run_forked([script] * ranks, folder, port=port)
    assert [result.returncode for result in results] == [0] * ranks, results
    return "".join(result.stdout for result in results)


@pytest.mark.parametrize(
    ("schedule", "moment", "number", "chosen", "at", "last"),
    select(
        [
            ("bitpipe", "step", "SIGTERM", 0, 3, 3),
            ("bitpipe", "step", "SIGUSR1", 1, 4, 4),
            ("bitpipe", "evaluation", "SIGTERM", 1, 2, 2),
            ("bitpipe", "save", "SIGTERM", 0, 1, 2),
            ("bitpipe", "start", "SIGUSR1", 1, 1, 0),
            ("bitpipe_3d", "start", "SIGTERM", 0, 1, 0),
            ("bitpipe", "dataloader", "SIGTERM", 1, 3, 3),
            ("bitpipe_3d", "step", "SIGTERM", 3, 3, 3),
            ("fbd", "step", "SIGTERM", 0, 3, 3),
            ("fbd", "step", "SIGUSR1", 3, 3, 3),
            ("fbd", "evaluation", "SIGUSR1", 2, 2, 2),
            ("fbd", "save", "SIGTERM", 1, 1, 2),
        ],
        [
            ("bitpipe", "start", "SIGUSR1", 1, 1, 0),
            ("bitpipe", "save", "SIGTERM", 0, 1, 2),
            ("fbd", "step", "SIGUSR1", 3, 3, 3),
        ],
    ),
)
def test_a_signal_in_a_rank(
    schedule: str,
    moment: str,
    number: str,
    chosen: int,
    at: int,
    last: int,
    words: Callable[..., list[str]],
    tmp_path: Path,
    free_port: Callable[[], int],
) -> None:
    """The resumed run has the losses, validation losses and weights of an undisturbed one."""
    ranks = JOBS[schedule][1]
    straight, parts, saved = tmp_path / "straight", tmp_path / "parts.jsonl", tmp_path / "saved"
    script = words(schedule, "--exit-signal-handler", "--metrics-file", str(tmp_path / "whole.jsonl"))
    run(ranks, [*script, "--save", str(straight)], tmp_path, free_port())

    flags = [
        "--exit-signal-handler",
        "--metrics-file",
        str(parts),
        "--save",
        str(saved),
        "--load",
        str(saved),
    ]
    flags += ["--save-interval", "2"]
    begin = [STOPPED, moment, number, str(chosen), str(at)]
    text = run(ranks, [*begin, *words(schedule, *flags)], tmp_path, free_port())
    assert (
        len(list(saved.glob("step_*"))) == last // 2 + last % 2
    )  # the interval is 2: no second save of a step
    assert last == 0 or open_checkpoint(saved)[0].name == f"step_{last}"
    assert f"because rank {chosen} received {number}" in text
    assert re.findall(r"^step (\d+): stopped", text, re.MULTILINE) == [str(last)]
    # The evaluation ended early, or did not begin.
    is_cut = moment in ("step", "evaluation") and last % 2 == 0
    assert (f"step {last}: no validation loss" in text) == is_cut
    assert f"--train-iters {STEPS}" in text  # the command that continues
    run(ranks, words(schedule, *flags), tmp_path, free_port())
    whole, both = metrics(tmp_path / "whole.jsonl"), metrics(parts)
    if is_cut:
        assert both[last - 1][2] is None
        whole[last - 1] = (*whole[last - 1][:2], None)
    assert both == whole
    assert checksums(saved) == checksums(straight)


@pytest.mark.parametrize("flags", [["--exit-interval", "4"], ["--exit-duration-in-mins", "0.0001"]])
def test_limits(
    flags: list[str], words: Callable[..., list[str]], tmp_path: Path, free_port: Callable[[], int]
) -> None:
    saved = tmp_path / "saved"
    text = run(2, words("bitpipe", *flags, "--save", str(saved)), tmp_path, free_port())
    assert open_checkpoint(saved)[0].name == ("step_4" if flags[0] == "--exit-interval" else "step_1")
    assert text.count(": validation loss") == (2 if flags[0] == "--exit-interval" else 0)
    assert f"--train-iters {STEPS}" in text
    assert len(re.findall(r"took \d+ s of 0 s", text)) == (flags[0] == "--exit-duration-in-mins")
    assert "nats" not in text  # no verdict on the loss of a run that goes on


@pytest.mark.parametrize(
    ("launcher", "target", "number"),
    select(
        [
            ("deepspeed", "launcher", "SIGTERM"),
            ("deepspeed", "host", "SIGTERM"),
            ("deepspeed", "rank", "SIGUSR1"),
            ("torchrun", "launcher", "SIGTERM"),
            ("torchrun", "launcher", "SIGUSR1"),
            ("torchrun", "rank", "SIGTERM"),
        ],
        [("torchrun", "launcher", "SIGTERM")],
    ),
)
def test_a_signal_to_the_launcher(
    launcher: str,
    target: str,
    number: str,
    words: Callable[..., list[str]],
    tmp_path: Path,
    free_port: Callable[[], int],
) -> None:
    """``deepspeed`` alone ends without its ranks, its process on the host ends all descendants; torchrun ends ranks."""
    saved = tmp_path / "saved"
    flags = ["--exit-signal-handler", "--save", str(saved), "--train-iters", "1000000"]
    with Job(command(launcher, 2, free_port(), *words("bitpipe", *flags)), tmp_path) as job:
        job.wait_for(" 2/1000000")
        processes = {"launcher": job.process.pid, "rank": job.ranks()[1]}
        if target == "host":
            parent = Path(f"/proc/{job.ranks()[1]}/stat").read_text().rpartition(")")[2].split()[1]
            processes["host"] = int(parent)
        begin = time.monotonic()
        os.kill(processes[target], signal.Signals[number])
        job.seconds_until_gone(60)
        assert time.monotonic() - begin < 60
        code = job.wait(5)
        assert "stopped, because rank" in job.text, job.text
        step = re.findall(r"^step (\d+): stopped", job.text, re.MULTILINE)[0]
        assert open_checkpoint(saved)[0].name == f"step_{step}"
        # The launchers turn a SIGTERM of their own into a failure, and torchrun has no handler for SIGUSR1.
        assert (code == 0) == (target == "rank")
        assert "Traceback" not in job.text or launcher == "torchrun"


@extensive
def test_a_lost_rank_is_no_request(
    words: Callable[..., list[str]], tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """The launcher ends the others with SIGTERM, and the rank that is gone cannot save its part."""
    saved = tmp_path / "saved"
    flags = [
        "--exit-signal-handler",
        "--save",
        str(saved),
        "--save-interval",
        "1",
        "--train-iters",
        "1000000",
    ]
    port = free_port()
    with Job(command("torchrun", 2, port, *words("bitpipe", *flags)), tmp_path) as job:
        job.wait_for("saved/step_2")
        time.sleep(1)  # the ranks learn their neighbours' process ids
        os.kill(job.ranks()[1], signal.SIGKILL)
        job.seconds_until_gone(60)
        assert job.wait(5) != 0
        assert "rank 1" in job.lines[job.first("rank 0 stopped")]
        command_line = job.lines[job.first("next:")].split("  ")[-1].split()
        assert command_line[:5] == ["torchrun", "--nproc_per_node", "2", "--master_port", str(port)]
        assert command_line[-4:] == ["--load", str(saved), "--train-iters", "1000000"]
        assert str(open_checkpoint(saved)[0]) in job.lines[job.first("last checkpoint")]


OWN = (
    "import torch, ds_ext\n"
    "from deepspeed.pipe import LayerSpec\n"
    "from torch import nn\n"
    "config = {'train_micro_batch_size_per_gpu': 2, 'gradient_accumulation_steps': 2, 'steps_per_print': 10**9,\n"
    "  'optimizer': {'type': 'SGD', 'params': {'lr': 1e-3}}, 'wall_clock_breakdown': True,\n"
    "  'ds_ext': {'pipeline_parallel_size': 2, 'print_plan': False}}\n"
    "ds_ext.init_distributed()\n"
    "model = ds_ext.PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 2, config, loss_fn=nn.MSELoss())\n"
    "data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 4))\n"
    "engine, *_ = ds_ext.initialize(model=model, model_parameters=model.parameters(), training_data=data,\n"
    "  config=config)\n"
)


def warnings(result: Any) -> list[str]:
    """Return the warnings that ds_ext logged on a rank, without that of a key of the JSON."""
    lines = result.stderr.splitlines()
    return [line for line in lines if "| WARNING | ds_ext." in line and "wall_clock_breakdown" not in line]


def test_an_own_script(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """``while not engine.should_stop()``: a request of one rank ends all of them after the same step.

    Rank 0 logs step and rank once, and nothing of the checkpoint that a first start lacks.
    """
    (tmp_path / "own.py").write_text(
        f"{OWN}"
        "assert engine.load_checkpoint('own') == (None, None)\n"
        "while not engine.should_stop():\n"
        "    engine.train_batch()\n"
        "    if engine.global_steps == 3 and engine.global_rank == 1:\n"
        "        engine.request_stop()\n"
        "assert engine.should_stop()\n"
        "engine.save_checkpoint('own')\n"
        "print('steps', engine.global_steps)\n"
    )
    results = run_forked([[str(tmp_path / "own.py")]] * 2, tmp_path, port=free_port())
    assert [(result.returncode, result.stdout.split()[-2:]) for result in results] == [
        (0, ["steps", "4"])
    ] * 2
    assert open_checkpoint(tmp_path / "own")[0].name == "global_step4"
    (line,) = warnings(results[0])
    assert re.search(r"step 4: .*rank 1\b", line) and not warnings(results[1])
    assert [result.stderr.count("wall_clock_breakdown: ") for result in results] == [1, 0]


def test_an_evaluation_of_an_own_script_in_parts(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """The lines of docs/own_scripts.md: the mean of one evaluation, and None after a request in the second part."""
    page = (ROOT / "docs" / "own_scripts.md").read_text()
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def validate" in block
    )
    (tmp_path / "own.py").write_text(
        f"{OWN}{code}"
        "class Samples(torch.utils.data.Dataset):\n"
        "    stop_at = None\n"
        "    def __len__(self):\n"
        "        return 14\n"
        "    def __getitem__(self, number):\n"
        "        if number == self.stop_at:\n"
        "            engine.request_stop()\n"
        "        return torch.full((4,), float(number)), torch.ones(4)\n"
        "validation_dataset, evaluated = Samples(), []\n"
        "whole = float(engine.eval_batch(validation_dataset, num_micro_batches='all'))\n"
        "assert not engine.should_stop()\n"
        "assert abs(validate(4) / whole - 1) < 1e-6\n"
        "eval_batch = engine.eval_batch\n"
        "engine.eval_batch = lambda data, **words: evaluated.append(len(data)) or eval_batch(data, **words)\n"
        "validation_dataset.stop_at = 5 if engine.global_rank == 1 else None\n"
        "print('result', validate(4), *evaluated)\n"
    )
    results = run_forked([[str(tmp_path / "own.py")]] * 2, tmp_path, port=free_port())
    assert [result.returncode for result in results] == [0] * 2, results
    assert [result.stdout.split()[-4:] for result in results] == [["result", "None", "4", "4"]] * 2


def test_a_save_that_one_rank_begins_alone_is_named(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """A handler of the script that saves: the other ranks are in the next step, and wait for this one."""
    (tmp_path / "own.py").write_text(
        "import torch, ds_ext\n"
        "from torch import nn\n"
        "from deepspeed.pipe import LayerSpec\n"
        "from ds_ext.launch import process\n"
        "config = {'train_micro_batch_size_per_gpu': 2, 'gradient_accumulation_steps': 2, 'steps_per_print': 10**9,\n"
        "  'optimizer': {'type': 'SGD', 'params': {'lr': 1e-3}},\n"
        "  'ds_ext': {'pipeline_parallel_size': 3, 'transport_options': {'timeout_s': 8}}}\n"
        "def main():\n"
        "    ds_ext.init_distributed(60)\n"
        "    model = ds_ext.PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 3, config, loss_fn=nn.MSELoss())\n"
        "    data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 4))\n"
        "    engine, *_ = ds_ext.initialize(model=model, model_parameters=model.parameters(), training_data=data,\n"
        "      config=config)\n"
        "    engine.train_batch()\n"
        "    if process.rank() == 1:\n"
        "        engine.save_checkpoint('own', tag='alone')\n"
        "    engine.train_batch()\n"
        "process.run(main)\n"
    )
    begin = time.monotonic()
    results = run_forked([[str(tmp_path / "own.py")]] * 3, tmp_path, port=free_port())
    assert all(result.returncode for result in results)
    text = "".join(result.stderr for result in results)
    assert "rank 1 waits in: saving the checkpoint alone" in text, text
    assert time.monotonic() - begin < 60
