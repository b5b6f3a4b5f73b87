"""A folder that cannot hold checkpoints is refused before the first step; a save that fails later ends nothing."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_ext
from ds_ext.engine.checkpoint.folder import complete_checkpoints
from ds_ext.engine.checkpoint.lock import LOCK
from ds_ext.errors import ConfigError
from ds_ext.launch.process import EXIT_CONFIG, EXIT_FAILED
from ds_ext.recipes.training.loop import EXIT_NOT_SAVED
from tests.launch.forked import run_forked
from tests.launch.jobs import ROOT, environment
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
    words = [LIMITED, rank, ENOUGH_FOR_A_TRIAL, SCRIPT, *flags]
    results = run_forked([words] * 2, tmp_path, port=free_port())
    assert {result.returncode for result in results} == {EXIT_NOT_SAVED}, results
    assert len(steps(results[0].stdout.splitlines())) == 3
    errors = [line for line in results[0].stderr.splitlines() if line.startswith("error: step")]
    assert [re.findall(r"step \d+|rank \d", line)[:2] for line in errors] == [
        ["step 2", f"rank {rank}"],
        ["step 3", f"rank {rank}"],
    ]
    assert not any("Traceback" in result.stderr for result in results)
    assert complete_checkpoints(tmp_path / "saved") == []


def test_a_save_that_fails_ends_the_job_if_asked_to(
    config: Path, tmp_path: Path, free_port: Callable[[], int]
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
    words = [LIMITED, "1", ENOUGH_FOR_A_TRIAL, SCRIPT, *flags, "--stop-if-not-saved"]
    results = run_forked([words] * 2, tmp_path, port=free_port())
    assert {result.returncode for result in results} == {EXIT_FAILED}, results
    assert len(steps(results[0].stdout.splitlines())) == 2


def test_save_interval_needs_save(config: Path, tmp_path: Path) -> None:
    (result,) = run_forked([[SCRIPT, "--deepspeed_config", str(config), "--save-interval", "2"]], tmp_path)
    assert result.returncode == EXIT_CONFIG
    assert result.stderr.count("--save-interval: ") == 1


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
    variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [*before, sys.executable, *words],
            env=environment(RANK=str(rank), **variables),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, before in enumerate(([], alone))
    ]
    try:
        errors = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    results = [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]
    assert [code for code, _ in results] == [EXIT_CONFIG, EXIT_CONFIG], results
    assert results[0][1].count("error: ") == 1 and "rank 1" in results[0][1], results
    # c10d prints a warning and a C++ stack where rank 0 has left first; rank 1 itself prints nothing.
    c10d = re.compile(r"\[W|Exception raised from |frame #\d+: |<omitting python frames>|$")
    assert [
        line for line in results[1][1].splitlines() if not c10d.match(re.sub(r"^\[rank\d\]:", "", line))
    ] == []
    assert [path.name for path in saved.iterdir()] == [LOCK]


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


def try_states(rank: int, folder: str, what: str) -> str:
    """Return the error of a folder before the first step, of a job with a state that cannot be saved."""
    from torch import nn

    class WithState(nn.Linear):
        def get_extra_state(self) -> Any:
            return nn.Linear

    kind = "Adafactor" if what == "optimizer" else "AdamW"
    params = {"lr": 1e-3} | ({} if what == "optimizer" else {"torch_adam": True})
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "optimizer": {"type": kind, "params": params},
        "ds_ext": {"pipeline_parallel_size": 2, "print_plan": False},
    }
    layers = [(WithState if what == "layer" else nn.Linear)(4, 4) for _ in range(4)]
    model = ds_ext.PipelineModule(layers, config, loss_fn=nn.MSELoss())
    engine, *_ = ds_ext.initialize(model=model, model_parameters=model.parameters())
    if what == "scheduler":
        engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2)
        engine.lr_scheduler.own = {"inner": nn.Linear}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConfigError) as caught:
        engine.try_checkpoint_folder(folder)
    engine.transport.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("optimizer", "'row_var' of Adafactor"),
        ("layer", "WithState.get_extra_state() of layer "),
        ("scheduler", "lr_scheduler['own']['inner']: "),
    ],
)
def test_a_state_that_cannot_be_saved_is_named_before_training(
    ranks2: RankPool, tmp_path: Path, what: str, named: str
) -> None:
    first, second = ranks2.run(try_states, str(tmp_path), what)
    assert named in first and first == second
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    assert str(tmp_path) not in first  # the folder is not the cause


OPTIMIZERS = [
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "RMSprop",
    "Rprop",
    "SGD",
    "NAdam",
    "Adadelta",
    "ASGD",
    "Adamax",
]


def problems(rank: int) -> dict[str, str]:
    """Return optimizers whose states are refused, and check that the real ones do not change."""
    from torch import nn

    from ds_ext.engine.checkpoint.optimizer_states import OptimizerStates

    found = {}
    for name in (name for name in OPTIMIZERS if hasattr(torch.optim, name)):
        layer = nn.Linear(4, 4)
        layer(torch.ones(2, 4)).sum().backward()
        optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 2)  # wraps step()
        calls: list[None] = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append(None))
        before, states = layer.weight.tolist(), repr(optimizer.state)
        problem = OptimizerStates(optimizer).problem()
        if problem or calls or repr(optimizer.state) != states or layer.weight.tolist() != before:
            found[name] = problem
    return found


def test_other_optimizers_are_not_refused_nor_changed(ranks2: RankPool) -> None:
    assert ranks2.run(problems) == [{}, {}]


def test_room_for_one_checkpoint(ranks2: RankPool, tmp_path: Path) -> None:
    needed = 16 * 256 * 256 * 4 * 3  # weights and the two states of Adam
    with small_disk(tmp_path / "small", f"size={needed // 2}") as small:
        first, second = ranks2.run(try_folder, str(small))
        assert first is not None and first == second
        assert f"{needed:,} bytes" in first
        assert [path.name for path in small.iterdir()] == [LOCK]
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
    results = run_forked([[SCRIPT, *flags]] * 2, tmp_path, port=free_port())
    assert [result.returncode for result in results] == [1, 1], results
    lines, errors = steps(results[0].stdout.splitlines()), "".join(result.stderr for result in results)
    assert len(lines) < 40
    assert "NonFiniteLoss" in errors and "Traceback" not in errors, errors
    bad = [number for number, line in enumerate(lines, 1) if " | loss nan" in line]
    assert complete_checkpoints(tmp_path / "saved")[-1] == f"step_{bad[0] - 1}"
