"""Steps of ``make test-gpu``: failures, time limits and the report."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ds_ext.__main__ import main
from tests.gpu.__main__ import LIMIT_S, steps
from tests.gpu.steps import Step, report, run_steps


def step(name: str, code: str, limit_s: float = 60.0, figures: bool = False) -> Step:
    return Step(name, [sys.executable, "-I", "-S", "-c", code], limit_s, figures)


def test_steps_go_on_after_a_failure_and_a_limit(tmp_path: Path) -> None:
    pid = str(tmp_path / "pid")
    start_child = "import subprocess; p = subprocess.Popen(['sleep', '300'])"
    child = f"{start_child}; open({pid!r}, 'w').write(str(p.pid)); p.wait()"
    steps = [
        step("fails", "print('fine'); print('error: a | b'); print('more'); raise SystemExit(1)"),
        step("hangs", child, limit_s=2.0),
        step("skips", "print('SKIPPED [1] no GPU\\n1 skipped in 0.1s')"),
        step("figures", "print('1f1b 42 tokens/s')", figures=True),
    ]
    start = time.monotonic()
    results = run_steps(steps, 100.0)
    assert time.monotonic() - start < 60
    assert [result.outcome for result in results] == ["failed", "over limit", "skipped", "passed"]
    assert results[0].detail == "error: a | b" and results[2].detail == "SKIPPED [1] no GPU"
    assert not is_running(int((tmp_path / "pid").read_text()))  # the whole session of the step ended
    lines = report(results, {"device": "none"}).splitlines()
    assert lines[0] == "- device: none" and "    1f1b 42 tokens/s" in lines
    rows = [line for line in lines if line.startswith("| ")]
    assert len(rows) == 2 + len(steps) and all(row.replace("\\|", "").count("|") == 5 for row in rows)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_limit_on_all_steps() -> None:
    results = run_steps([step("first", "import time; time.sleep(60)"), step("second", "pass")], 1.0)
    assert [result.outcome for result in results] == ["over limit", "over limit"]
    assert results[1].seconds == 0.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("gpus", [1, 4])
def test_benchmarks_lack_only_the_gpu(gpus: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert sum(one.limit_s for one in steps(gpus)) <= LIMIT_S
    commands = [list(one.command) for one in steps(gpus) if one.figures]
    assert [command[4] for command in commands] == ["transport", "schedules", "training"]
    for command in commands:
        assert ("none" in command) == (gpus == 1 and "--rivals" in command)
        assert main(command[3:]) == 2
        assert capsys.readouterr().err.startswith("error: --device: ")


def test_a_host_without_a_gpu() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.gpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1
