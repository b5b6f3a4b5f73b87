"""Folders of checkpoints that several runs use: what a run continues from, and who may save."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from ds_ext.engine.checkpoint.folder import complete_checkpoints, read_manifest
from ds_ext.launch.process import EXIT_CONFIG
from ds_ext.observe.run_record import read_starts
from tests.launch.forked import ForkedJob, run_forked
from tests.launch.jobs import ROOT, tiny_config, write_json
from tests.selection import extensive


def words(config: Path, steps: int, *flags: str) -> list[str]:
    interval = ["--save", "saved", "--save-interval", "1", "--eval-iters", "0"]
    return [
        str(ROOT / "train_gpt.py"),
        "--deepspeed_config",
        str(config),
        "--train-iters",
        str(steps),
        *interval,
        *flags,
    ]


def one_rank(corpus: Path, tmp_path: Path) -> Path:
    config = tiny_config(corpus)
    config["ds_ext"]["pipeline_parallel_size"] = 1
    config["ds_ext"]["schedule"] = "1f1b"
    return write_json(tmp_path / "one.json", config)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_restart_continues_only_from_checkpoints_of_its_run(
    corpus: Path, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    config = one_rank(corpus, tmp_path)

    def start(run: str, restart: int, iterations: int, *flags: str) -> tuple[list[int], str]:
        folder = tmp_path / run / f"attempt_{restart}" / "0"
        folder.mkdir(parents=True)
        env = {
            "TORCHELASTIC_RESTART_COUNT": str(restart),
            "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
        }
        metrics = tmp_path / f"{run}_{restart}.jsonl"
        command = words(config, iterations, "--metrics-file", str(metrics), *flags)
        (result,) = run_forked([command], tmp_path, port=free_port(), env=env)
        assert result.returncode == 0, result
        return steps(metrics), result.stderr

    assert start("first", 0, 3)[0] == [1, 2, 3]
    assert start("first", 1, 4, "--load", "saved")[0] == [4]
    (loaded,) = read_starts(tmp_path / "first_1.run.json")
    assert [event["step"] for event in loaded["checkpoints"] if event["event"] == "loaded"] == [3]
    # The first start of another run has ended in step 6, before it saved.
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "ds_ext_run.json").write_text('{"id": "second", "step": 5, "loaded": []}\n')
    trained, text = start("second", 1, 2)
    assert trained == [1, 2] and re.search(r"steps 1 to 5 are lost", text), text
    assert re.search(r"of another run, .*: step_1, step_2$", text, re.MULTILINE), text
    saved = tmp_path / "saved"
    runs = {name: read_manifest(saved / name)["job"]["run"] for name in complete_checkpoints(saved)}
    assert list(runs) == ["step_3", "step_4", "step_1", "step_2"]
    assert runs["step_1"] == runs["step_2"] == "second" != runs["step_3"] == runs["step_4"]
    assert [start["run"] for start in read_starts(tmp_path / "second_1.run.json")] == ["second"]


@extensive
def test_a_second_job_may_not_save_to_the_folder_of_a_running_one(
    corpus: Path, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    config = one_rank(corpus, tmp_path)
    with ForkedJob([words(config, 10**6)], tmp_path, port=free_port()) as first:
        first.wait_for("step 2: saved")
        (second,) = run_forked([words(config, 2)], tmp_path, port=free_port())
        assert second.returncode == EXIT_CONFIG and f"process {first.pids[0]} " in second.stderr, second
        assert second.stderr.count(str(tmp_path / "saved")) == 1, second
        saves = first.text.count(": saved ")
        first.wait_for(f"step {saves + 1}: saved")
    (second,) = run_forked([words(config, 2, "--load", "saved")], tmp_path, port=free_port())
    assert second.returncode == 0, second
