"""Ranks with different jobs are refused before the first step, with keys and ranks; a failed rank stops all hosts."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_ext.launch.process import EXIT_CONFIG, EXIT_FAILED
from tests.launch.forked import ForkedJob
from tests.launch.jobs import LAUNCHERS, ROOT, Job, command, tiny_config, write_json
from tests.selection import select

SCRIPT = str(ROOT / "train_gpt.py")
# Ranks would wait WAIT_S for each other. A refusal takes about 6 s on a quiet host, most of it for imports.
LIMIT_S, WAIT_S = 300.0, 900.0
RANKS = 4

Change = Callable[[dict[str, Any], Path], Any]
# What differs -> the change of the JSON, and the key that the error names.
DIFFERENCES: dict[str, tuple[Change, str]] = {
    "lr": (lambda c, _: c["optimizer"]["params"].update(lr=2e-3), "optimizer.params.lr"),
    "seed": (lambda c, _: c["ds_ext"]["train"].update(seed=5), "--seed"),
    "schedule": (lambda c, _: c["ds_ext"].update(schedule="gpipe"), "ds_ext.schedule"),
    "key": (lambda c, _: c.update(gradient_clipping=0.5), "gradient_clipping"),
    "missing key": (lambda c, _: c.pop("zero_optimization"), "zero_optimization.stage"),
    "data": (lambda c, other: c["ds_ext"]["train"].update(data_path=str(other)), "contents of --data-path"),
    "model size": (lambda c, _: c["ds_ext"]["train"].update(hidden_size=32), "--hidden-size"),
}


@pytest.fixture(scope="module")
def other_corpus(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same folder, and the bytes of its tokens in reverse."""
    made = tmp_path_factory.mktemp("other") / "data"
    shutil.copytree(corpus, made)
    data = next(made.glob("*.bin"))
    data.write_bytes(data.read_bytes()[::-1])
    return made


@pytest.mark.parametrize(
    "names", select([[*DIFFERENCES], *([name] for name in DIFFERENCES)], [[*DIFFERENCES]]), ids="+".join
)
def test_scripts_refuse_a_rank_that_differs(
    names: list[str], corpus: Path, other_corpus: Path, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    config = tiny_config(corpus, transport_options={"timeout_s": WAIT_S})
    usual = write_json(tmp_path / "usual.json", config)
    for name in names:
        DIFFERENCES[name][0](config, other_corpus)
    other = write_json(tmp_path / "other.json", config)
    flags = [["--deepspeed_config", str(path)] for path in (usual, other)]
    commands = [[SCRIPT, *flags[rank == RANKS - 1]] for rank in range(RANKS)]
    with ForkedJob(commands, tmp_path, port=free_port()) as job:
        results = job.wait(LIMIT_S)
        text = job.text
    assert [result.returncode for result in results] == [EXIT_CONFIG] * RANKS
    keys = {DIFFERENCES[name][1] for name in names}
    lines = [line.strip() for line in text.splitlines() if re.search(r" on ranks 0-2, .* on rank 3$", line)]
    assert keys <= {line.partition(": ")[0] for line in lines}, text
    assert len(lines) == len(set(lines))
    assert not any(line.startswith("step ") for line in text.splitlines()) and "Traceback" not in text, text


def run_on_hosts(commands: list[list[str]], port: int, tmp_path: Path) -> list[tuple[int, str]]:
    """Run a rank on each "host" and return exit codes and standard errors; no launcher ends the other ranks."""
    env = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with ForkedJob(commands, tmp_path, port=port, env=env) as job:
        return [(result.returncode, result.stderr) for result in job.wait(LIMIT_S)]


@pytest.mark.parametrize("failing", [0, 1])
def test_data_missing_on_one_host_is_one_error_that_ends_all(
    failing: int, corpus: Path, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    config = write_json(tmp_path / "job.json", tiny_config(corpus, transport_options={"timeout_s": WAIT_S}))
    words = [[SCRIPT, "--deepspeed_config", str(config)] for _ in range(2)]
    words[failing] += ["--data-path", "nowhere"]
    results = run_on_hosts(words, free_port(), tmp_path)
    assert [code for code, _ in results] == [EXIT_CONFIG, EXIT_CONFIG], results
    assert results[0][1].count("error: ") == 1 and "nowhere" in results[0][1], results
    assert results[1][1] == "", results


def test_another_error_before_joining_ends_all_hosts(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """An own script: a plain exception, with its traceback on its own host alone."""
    script = tmp_path / "own.py"
    script.write_text(
        "import os\nfrom ds_ext.launch import process\n"
        "def main():\n"
        "    if os.environ['RANK'] == '1':\n        open('/nowhere/data')\n"
        f"    import ds_ext\n    ds_ext.init_distributed({WAIT_S})\n"
        "process.run(main)\n"
    )
    results = run_on_hosts([[str(script)]] * 2, free_port(), tmp_path)
    assert [code for code, _ in results] == [EXIT_FAILED, EXIT_FAILED], results
    assert "rank 1 (host" in results[0][1] and "Traceback" not in results[0][1], results
    assert results[1][1].count("Traceback") == 1, results


def test_an_error_between_joining_and_the_next_roll_call_ends_all_hosts(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "import os\nimport ds_ext\nfrom ds_ext.launch import process\n"
        "def main():\n"
        f"    ds_ext.init_distributed({WAIT_S})\n"
        "    from torch import nn\n"
        "    if os.environ['RANK'] == '1':\n        open('/nowhere/data')\n"
        "    config = {'train_batch_size': 2, 'ds_ext': {'pipeline_parallel_size': 2}}\n"
        "    ds_ext.PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], config, loss_fn=nn.MSELoss())\n"
        "process.run(main)\n"
    )
    results = run_on_hosts([[str(script)]] * 2, free_port(), tmp_path)
    assert [code for code, _ in results] == [EXIT_FAILED, EXIT_FAILED], results
    assert "rank 1 failed: FileNotFoundError" in results[0][1] and "Traceback" not in results[0][1], results
    assert results[1][1].count("Traceback") == 1, results


def test_a_rank_that_never_comes_is_named(tmp_path: Path, free_port: Callable[[], int]) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "import os, sys, time\nfrom ds_ext.launch import process\n"
        "def main():\n"
        "    if os.environ['RANK'] == '2':\n        return 0\n"
        "    import ds_ext\n    ds_ext.init_distributed(5)\n"
        "process.run(main)\n"
    )
    results = run_on_hosts([[str(script)]] * 3, free_port(), tmp_path)
    assert [code for code, _ in results] == [EXIT_FAILED, EXIT_FAILED, 0], results
    assert re.search("rank 2 .* 5 s", results[0][1]), results
    assert "Traceback" not in results[0][1] + results[1][1] and results[1][1] == "", results


OWN_GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo")
import ds_ext.engine
from deepspeed import comm
ds_ext.engine.init_distributed()
ranks = [None] * dist.get_world_size()
comm.all_gather_object(ranks, comm.get_rank())
print(f"ranks {ranks[0]} {ranks[1]}\\n", end="", flush=True)  # in one write
"""


@pytest.mark.parametrize("launcher", select([*LAUNCHERS], ["deepspeed"]))
def test_a_script_may_start_the_process_group_itself(
    launcher: str, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    script = tmp_path / "own.py"
    script.write_text(OWN_GROUP)
    with Job(command(launcher, 2, free_port(), str(script)), tmp_path) as job:
        assert job.wait(LIMIT_S) == 0, job.text
        assert job.text.count("ranks 0 1") == 2
