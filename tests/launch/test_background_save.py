"""Saves in the background: the same files as in the foreground, complete when the run ends, whatever happens to it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_ext.engine.checkpoint.background import memory_problem
from ds_ext.engine.checkpoint.folder import check_contents, complete_checkpoints, open_checkpoint
from tests.launch.forked import ForkedJob, run_forked
from tests.launch.jobs import ROOT

STEPS = 5


def words(config: Path, saved: Path, *flags: str) -> list[str]:
    script = [str(ROOT / "train_gpt.py"), "--deepspeed_config", str(config), "--train-iters", str(STEPS)]
    return [*script, "--eval-iters", "0", "--save", str(saved), "--save-interval", "1", *flags]


def checksums(folder: Path, tag: str) -> dict[str, Any]:
    """Return the checksums of the files of a checkpoint, except those that differ from run to run."""
    checkpoint, manifest = open_checkpoint(folder, tag)
    check_contents(checkpoint, manifest)
    return {
        name: record
        for name, record in manifest["files"].items()
        if not name.startswith(("mp_rank", "random"))
    }


def test_the_files_are_those_of_the_foreground(
    config: Path, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """``--keep-checkpoints`` leaves the newest ones, and the folder of another program."""
    saved = {"front": tmp_path / "front", "back": tmp_path / "back"}
    (saved["back"] / "other").mkdir(parents=True)
    front = run_forked([words(config, saved["front"])] * 2, tmp_path, port=free_port())
    flags = ["--async-save", "--keep-checkpoints", "2"]
    back = run_forked([words(config, saved["back"], *flags)] * 2, tmp_path, port=free_port())
    assert [result.returncode for result in (*front, *back)] == [0] * 4, back[0].stderr
    assert back[0].stdout.count(": saved ") == STEPS
    assert complete_checkpoints(saved["front"]) == [f"step_{step}" for step in range(1, STEPS + 1)]
    assert complete_checkpoints(saved["back"]) == [f"step_{STEPS - 1}", f"step_{STEPS}"]
    assert open_checkpoint(saved["back"])[0].name == f"step_{STEPS}"
    left = {path.name for path in saved["back"].iterdir()} - {".ds_ext.lock", "latest", "other"}
    assert left == {f"step_{STEPS - 1}", f"step_{STEPS}"}
    for tag in (f"step_{STEPS - 1}", f"step_{STEPS}"):
        assert checksums(saved["front"], tag) == checksums(saved["back"], tag)


def test_a_failed_save_is_reported(config: Path, tmp_path: Path, free_port: Callable[[], int]) -> None:
    """The folder of the writer disappears; the next saves work, and the exit code is 3."""
    saved = tmp_path / "saved"
    with ForkedJob(
        [words(config, saved, "--async-save", "--train-iters", "40")] * 2, tmp_path, port=free_port()
    ) as job:
        deadline = time.monotonic() + 60
        while not (found := [*saved.glob(".step_*.tmp-*")]):
            assert time.monotonic() < deadline, job.text
        found[0].rename(tmp_path / "away")
        results = job.wait()
    assert [result.returncode for result in results] == [3, 3]
    assert len(complete_checkpoints(saved)) == 39
    assert open_checkpoint(saved)[0].name == "step_40" or "step 40: the checkpoint" in results[0].stderr
    assert not [*saved.glob(".step_*")]


def write_script(folder: Path, save: str) -> str:
    """Write a script that trains a step and then runs the lines ``save`` with ``engine``. Return its path."""
    script = folder / "own.py"
    lines = "".join(f"    {line}\n" for line in save.splitlines())
    script.write_text(
        "import os, torch, ds_ext\n"
        "from torch import nn\n"
        "from deepspeed.pipe import LayerSpec\n"
        "from ds_ext.launch import process\n"
        "from ds_ext.engine.checkpoint import background, background_process\n"
        "config = {'train_micro_batch_size_per_gpu': 2, 'gradient_accumulation_steps': 2, 'steps_per_print': 10**9,\n"
        "  'optimizer': {'type': 'SGD', 'params': {'lr': 1e-3}}, 'ds_ext': {'pipeline_parallel_size': 2}}\n"
        "def main():\n"
        "    ds_ext.init_distributed()\n"
        "    specs = [LayerSpec(nn.Linear, 2000, 2000)] * 4\n"
        "    model = ds_ext.PipelineModule(specs, config, loss_fn=nn.MSELoss())\n"
        "    data = torch.utils.data.TensorDataset(torch.ones(64, 2000), torch.ones(64, 2000))\n"
        "    engine, *_ = ds_ext.initialize(model=model, model_parameters=model.parameters(), training_data=data,\n"
        "      config=config)\n"
        "    engine.train_batch()\n"
        f"{lines}"
        "process.run(main)\n"
    )
    return str(script)


def test_a_failing_rank_completes_its_save(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """The step after the save fails in one rank: both wait for their writers."""
    script = write_script(
        tmp_path,
        "engine.save_checkpoint('own', background=True)\n"
        "if process.rank() == 1:\n"
        "    raise ValueError('after the save')\n"
        "engine.train_batch()\n",
    )
    results = run_forked([[script]] * 2, tmp_path, port=free_port())
    assert all(result.returncode for result in results)
    checkpoint, manifest = open_checkpoint(tmp_path / "own")
    check_contents(checkpoint, manifest)


def test_a_run_that_ends_after_a_killed_writer(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """The script does not wait for its save. The process that publishes gets the error of rank 1, and ends."""
    script = write_script(
        tmp_path,
        "if process.rank() == 1:\n"
        "    background._PROGRAM = 'import os, signal; os.kill(os.getpid(), signal.SIGKILL)'\n"
        "engine.save_checkpoint('own', background=True)\n",
    )
    results = run_forked([[script]] * 2, tmp_path, port=free_port())
    for result in results:
        assert "rank 1" in result.stderr and "SIGKILL" in result.stderr
    assert complete_checkpoints(tmp_path / "own") == [] and not [*(tmp_path / "own").glob(".global*")]


def test_a_rank_that_is_killed_takes_its_writer_along(
    config: Path, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    saved = tmp_path / "saved"
    flags = ["--async-save", "--train-iters", "100000"]
    with ForkedJob([words(config, saved, *flags)] * 2, tmp_path, port=free_port()) as job:
        job.wait_for(": saved ")
        writers: list[int] = []
        deadline = time.monotonic() + 60
        while not writers:
            assert time.monotonic() < deadline
            writers = [
                int(path.parts[2])
                for path in Path("/proc").glob("[0-9]*/cmdline")
                if _is_writer(path, job.pids)
            ]
        for process in job.pids:
            os.kill(process, signal.SIGKILL)
        job.wait()
    while any(_is_writer(Path(f"/proc/{process}/cmdline"), None) for process in writers):
        assert time.monotonic() < deadline
    checkpoint, manifest = open_checkpoint(saved)
    check_contents(checkpoint, manifest)


def _is_writer(cmdline: Path, parents: list[int] | None) -> bool:
    """Return whether a process is the writer of one of the ranks, or of any without ``parents``."""
    try:
        words = cmdline.read_bytes().decode().split("\0")
        parent = int((cmdline.parent / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return False
    return any("background_process" in word for word in words) and (parents is None or parent in parents)


@pytest.mark.parametrize(
    ("answers", "names"),
    [
        ([("a", 10, 25), ("a", 10, 20), ("b", 30, 30)], []),
        ([("a", 10, 19), ("a", 10, 25)], ["host a", " 20 ", " 19 "]),
        ([("a", 10, 25), ("b", 31, 30)], ["host b", " 31 ", " 30 "]),
    ],
)
def test_memory_of_the_copies(answers: list[tuple[str, int, int]], names: list[str]) -> None:
    problem = memory_problem(answers)
    assert bool(problem) == bool(names) and all(name in problem for name in names)
