"""A folder that cannot hold checkpoints is refused before the first step; a save that fails later ends nothing."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ds_ext
from ds_ext.engine.checkpoint.folder import good_checkpoints
from ds_ext.errors import ConfigError
from ds_ext.launch.process import EXIT_CONFIG
from ds_ext.training.loop import EXIT_NOT_SAVED
from tests.launch.jobs import ROOT, Job, command
from tests.launch.test_roll_call import ends, start_on_hosts
from tests.ranks import RankPool

SCRIPT, LIMITED = str(ROOT / "train_gpt.py"), str(ROOT / "tests/launch/limited.py")
LIMIT_S = 300.0
ENOUGH_FOR_A_TRIAL = "100"


def steps(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("step ") and " | loss " in line]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_save_that_fails_is_reported_and_training_goes_on(
    rank: str, config: Path, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    flags = [
        "--deepspeed_config",
        str(config),
        "--save",
        "saved",
        "--save-interval",
        "2",
        "--train-iters",
        "3",
    ]
    words = command("deepspeed", 2, free_port(), LIMITED, rank, ENOUGH_FOR_A_TRIAL, SCRIPT, *flags)
    with Job(words, tmp_path) as job:
        job.seconds_until_gone(LIMIT_S)
        assert job.wait(5) == EXIT_NOT_SAVED, job.text
    assert len(steps(job.lines)) == 3
    reported = [line for line in job.lines if line.startswith(("error: step 2:", "error: step 3:"))]
    assert len(reported) == 2 and all(f"rank {rank}" in line for line in reported), job.text
    assert "Traceback" not in job.text
    assert good_checkpoints(tmp_path / "saved") == []


def test_save_interval_needs_save(config: Path, tmp_path: Path) -> None:
    words = [[SCRIPT, "--deepspeed_config", str(config), "--save-interval", "2"]]
    ((code, error),) = ends(start_on_hosts(words, 1, tmp_path))
    assert code == EXIT_CONFIG and "--save-interval: " in error and error.count("\n") == 1


def test_a_folder_that_hosts_do_not_share_is_refused_before_the_first_step(
    config: Path, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    hide = f'mount -t tmpfs none {saved} && exec "$@"'
    alone = ["unshare", "--mount", "sh", "-c", hide, "sh"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces are refused here")
    words = [SCRIPT, "--deepspeed_config", str(config), "--save", str(saved)]
    results = ends(start_on_hosts([words, words], free_port(), tmp_path, before=[[], alone]))
    assert [code for code, _ in results] == [EXIT_CONFIG, EXIT_CONFIG], results
    assert results[0][1].count("error: ") == 1 and "rank 1" in results[0][1], results
    # c10d prints a warning and a C++ stack where rank 0 has left first; rank 1 itself prints nothing.
    c10d = re.compile(r"\[W|Exception raised from |frame #\d+: |<omitting python frames>|$")
    assert [
        line for line in results[1][1].splitlines() if not c10d.match(re.sub(r"^\[rank\d\]:", "", line))
    ] == []
    assert list(saved.iterdir()) == []


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def try_folder(rank: int, folder: str) -> str | None:
    """The error of a folder; None when checkpoints of 16 x 260 KB of weights and states can be saved there."""
    from torch import nn

    config: dict[str, Any] = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "ds_ext": {
            "schedule": "bitpipe",
            "pipeline_parallel_size": 2,
            "transport_options": {"timeout_s": 30},
        },
    }
    layers = [nn.Linear(256, 256, bias=False) for _ in range(16)]
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.MSELoss())
    engine, *_ = ds_ext.initialize(model=model, model_parameters=model.parameters(), config=config)
    try:
        engine.try_checkpoint_folder(folder)
    except ConfigError as error:
        assert error.reported_by == 0
        return str(error)
    finally:
        engine.transport.close()
    return None


def test_room_for_one_checkpoint(ranks2: RankPool, tmp_path: Path) -> None:
    needed = 16 * 256 * 256 * 4 * 3  # weights and the two states of Adam
    with small_disk(tmp_path / "small", f"size={needed // 2}") as small:
        first, second = ranks2.run(try_folder, str(small))
        assert first is not None and first == second
        assert f"{needed:,} bytes" in first
        assert list(small.iterdir()) == []
    with small_disk(tmp_path / "large", f"size={needed * 2}") as large:
        assert ranks2.run(try_folder, str(large)) == [None, None]
    with small_disk(tmp_path / "read_only", "ro") as read_only:
        assert None not in ranks2.run(try_folder, str(read_only))


def test_a_run_whose_loss_is_not_finite_says_so_and_keeps_its_last_checkpoint(
    config: Path, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    flags = [
        "--deepspeed_config",
        str(config),
        "--save",
        "saved",
        "--save-interval",
        "1",
        "--train-iters",
        "40",
    ]
    config.write_text(config.read_text().replace('"lr": 0.001', '"lr": 1e30'))
    with Job(command("deepspeed", 2, free_port(), SCRIPT, *flags), tmp_path) as job:
        job.seconds_until_gone(LIMIT_S)
        assert job.wait(5) == 1, job.text
    assert len(steps(job.lines)) < 40
    assert "NonFiniteLoss" in job.text and "Traceback" not in job.text, job.text
    bad = [number for number, line in enumerate(steps(job.lines), 1) if " | loss nan" in line]
    assert good_checkpoints(tmp_path / "saved")[-1] == f"step_{bad[0] - 1}"
