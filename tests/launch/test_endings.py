"""However a job ends, its ranks end with it, and the cause is the first thing that a person reads."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.launch.forked import run_forked
from tests.launch.jobs import LAUNCHERS, Job, command
from tests.launch.toy import EVERY
from tests.selection import extensive, select

TOY = str(Path(__file__).with_name("toy.py"))
ENDLESS = "1000000"
LIMIT_S = 60.0  # on one core; an idle host needs 2
LAUNCHER_S = 30.0  # that launchers give a rank, also a stopped one, before they kill it


@pytest.fixture
def start(tmp_path: Path, free_port: Callable[[], int]) -> Callable[..., Job]:
    """Start the toy script: start(launcher, ranks, steps, time limit of messages, failing rank, failing step)."""

    def launch(launcher: str, ranks: int, *words: str) -> Job:
        return Job(command(launcher, ranks, free_port(), TOY, *words), tmp_path)

    return launch


@pytest.mark.parametrize(
    ("launcher", "whole_group"),
    [
        pytest.param(launcher, whole, id=f"{launcher}-{'terminal' if whole else 'launcher-only'}")
        for launcher, whole in select([*product(LAUNCHERS, [False, True])], [("deepspeed", False)])
    ],
)
def test_interrupt_ends_every_rank(start: Callable[..., Job], launcher: str, whole_group: bool) -> None:
    with start(launcher, 2, ENDLESS, "60") as job:
        job.wait_for("step 3 done")
        assert len(job.ranks()) == 2
        send = os.killpg if whole_group else os.kill
        send(job.process.pid, signal.SIGINT)
        job.seconds_until_gone(LIMIT_S)
        assert job.wait(5) != 0
        if whole_group or launcher == "torchrun":
            assert len(re.findall(r"^stopped .*SIGINT", job.text, re.MULTILINE)) == 1
        else:
            # A signal to DeepSpeed's command alone ends it without ending its ranks.
            assert len(re.findall(r"^stopped: .*launcher", job.text, re.MULTILINE)) == 1
        assert "rank 1" not in job.text


@pytest.mark.parametrize("launcher", select([*LAUNCHERS], ["deepspeed"]))
def test_killed_launcher_takes_its_ranks_along(start: Callable[..., Job], launcher: str) -> None:
    with start(launcher, 2, ENDLESS, "60") as job:
        job.wait_for("step 3 done")
        job.process.send_signal(signal.SIGKILL)
        job.seconds_until_gone(LIMIT_S)
        job.wait(5)
        assert any(re.match("stopped: .*launcher", line) for line in job.lines)
        assert "Error" not in job.text


@extensive
def test_a_rank_that_another_orphan_ends_says_why(start: Callable[..., Job]) -> None:
    """DeepSpeed's command has gone; its process on this host ends rank 0 because rank 1 has noticed it first."""
    with start("deepspeed", 2, ENDLESS, "60") as job:
        job.wait_for("step 3 done")
        first, second = job.ranks().values()
        os.kill(first, signal.SIGSTOP)
        job.process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_S
        while os.path.exists(f"/proc/{second}") or not has_pending(first, signal.SIGTERM):
            assert time.monotonic() < deadline, job.text
            time.sleep(0.01)
        os.kill(first, signal.SIGCONT)
        job.seconds_until_gone(LIMIT_S)
        job.wait(5)
        assert len(re.findall(r"^stopped: .*launcher", job.text, re.MULTILINE)) == 1
        assert "Error" not in job.text


def has_pending(process: int, number: int) -> bool:
    """Return whether a signal has been sent to a process and not been delivered."""
    status = Path(f"/proc/{process}/status").read_text()
    return bool(int(re.findall(r"^ShdPnd:\s*(\w+)", status, re.MULTILINE)[0], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launcher_that_is_killed_while_its_ranks_import(start: Callable[..., Job], launcher: str) -> None:
    with start(launcher, 2, ENDLESS, "600") as job:
        while len(job.ranks()) < 2:
            assert job.process.poll() is None, job.text
        job.process.send_signal(signal.SIGKILL)
        job.seconds_until_gone(LIMIT_S)
        assert "step 1 done" not in job.text


@pytest.mark.parametrize("handler", [False, True])
def test_sigusr1_leaves_an_own_script_running(
    tmp_path: Path, free_port: Callable[[], int], handler: bool
) -> None:
    """Without ``process.run()``: it prints the stacks, or runs the script's handler."""
    script = [
        "import os, signal, ds_ext",
        "ds_ext.init_distributed()",
        "os.kill(os.getpid(), signal.SIGUSR1)",
    ]
    if handler:
        script.insert(1, "signal.signal(signal.SIGUSR1, lambda *_: print('handled'))")
    (tmp_path / "own.py").write_text("\n".join([*script, "print('running')"]))
    (result,) = run_forked([[str(tmp_path / "own.py")]], tmp_path, port=free_port())
    assert (result.returncode, result.stdout.split()) == (0, [*(["handled"] * handler), "running"])
    assert ('own.py", line 3' in result.stderr) == (not handler)


@pytest.mark.parametrize("launcher", select([*LAUNCHERS], ["torchrun"]))
def test_killed_rank_is_named(start: Callable[..., Job], launcher: str) -> None:
    with start(launcher, 2, ENDLESS, "60") as job:
        job.wait_for("step 3 done")
        time.sleep(4)  # the ranks learn their neighbours' process ids
        os.kill(job.ranks()[1], signal.SIGKILL)
        job.seconds_until_gone(LIMIT_S)
        assert job.wait(5) != 0
        message = job.lines[job.first("rank 0 stopped")]
        # Rank 0 reports the lost connection or the launcher's signal, whichever comes first.
        assert re.search("stopped: rank 1 .*(TransportError|SIGTERM)", message), job.text
        assert "TransportError" not in message or re.search(r"\((.+, )?step \d+\)$", message), message
        # torchrun's own report has a traceback of its own; ours has none.
        assert "process.py" not in job.text


@pytest.mark.parametrize(("launcher", "failing"), select([*product(LAUNCHERS, [0, 1])], [("torchrun", 1)]))
def test_exception_is_told_first_and_in_full_once(
    start: Callable[..., Job], launcher: str, failing: int
) -> None:
    with start(launcher, 3, ENDLESS, "60", str(failing), "3") as job:
        job.seconds_until_gone(600)
        assert job.wait(5) == 1
        first = job.first("failed", "stopped", "Error")
        assert job.lines[first] == f"rank {failing} failed."
        assert job.lines[first + 1].startswith("Traceback")
        before_launcher = job.lines[: job.first("Killing subprocess", "closing signal", "failed (exitcode")]
        ours = [line for line in before_launcher if line.startswith("Traceback")]
        assert len(ours) == 1
        assert "ValueError: the layer is at fault" in before_launcher
        where = f"rank {failing} (device {failing} of its pipeline) failed in F0@{failing}, step 4 ("
        assert any(line.startswith(where) for line in before_launcher)
        if launcher == "torchrun":
            root_cause = job.lines[job.first("Root Cause") :]
            assert f"  rank      : {failing} (local_rank: {failing})" in root_cause
            assert "  ValueError: the layer is at fault" in root_cause


@extensive
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_of_ranks_that_fail_together_the_first_speaks_first(start: Callable[..., Job], launcher: str) -> None:
    with start(launcher, 3, ENDLESS, "60", str(EVERY), "3") as job:
        job.seconds_until_gone(600)
        assert job.wait(5) == 1
        ours = job.lines[: job.first("Killing subprocess", "closing signal", "failed (exitcode")]
        reports = [line for line in ours if re.match(r"rank \d failed", line)]
        assert re.fullmatch(r"rank \d failed\.", reports[0]), job.text
        assert all(
            re.fullmatch(r"rank \d failed too: ValueError: all are at fault", line) for line in reports[1:]
        )
        assert "ValueError: all are at fault" in ours


@pytest.mark.parametrize(
    ("launcher", "stuck"), select([("deepspeed", 0), ("torchrun", 2)], [("torchrun", 2)])
)
def test_stuck_rank_is_named_after_the_time_limit(
    start: Callable[..., Job], launcher: str, stuck: int
) -> None:
    # Rank 0 holds the rendezvous store under deepspeed: the others cannot ask anybody then.
    limit_s = 6
    with start(launcher, 3, ENDLESS, str(limit_s)) as job:
        job.wait_for("step 3 done")
        time.sleep(4)  # the ranks learn their neighbours' process ids
        process = job.ranks()[stuck]
        os.kill(process, signal.SIGSTOP)
        stopped = time.monotonic()
        job.wait_for("TransportError", timeout_s=limit_s + LIMIT_S)
        assert time.monotonic() - stopped > limit_s - 1
        message = job.lines[job.first("TransportError")]
        assert f"stopped: rank {stuck} " in message
        # In a collective, a rank whose neighbor has given up first reports the closed connection.
        assert " 6 s" in message or "imed out" in message or "in a collective" in message
        if "recv from" in message:  # and not in what all do together
            assert re.search(r"\(Recv\w+ \d@\d from device \d, step \d+\)$", message)
            if launcher == "torchrun" or message.startswith("rank 1"):  # which keeps the store; see report()
                job.wait_for("<-- ERROR HERE")
        while len(job.ranks()) > 1:
            assert time.monotonic() - stopped < limit_s + LAUNCHER_S + LIMIT_S, job.text
            time.sleep(0.1)
        os.kill(process, signal.SIGKILL)
        job.seconds_until_gone(LIMIT_S)
