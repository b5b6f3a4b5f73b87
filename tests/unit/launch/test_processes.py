"""Launcher of a rank: past wrappers, detached profilers, and after its end. Small scripts stand for launchers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ds_ext import environment
from ds_ext.launch import failure, process
from ds_ext.launch.failure import describe_lost_neighbours

ROOT = Path(__file__).parents[3]
VARIABLES = {
    "torchrun": {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_PORT": "1"},
    "deepspeed": {"CROSS_RANK": "0", "MASTER_PORT": "1"},
}
# A launcher has loaded torch: here, it has mapped a file of that name.
LAUNCHER = """
import mmap, os, subprocess, sys
with open(sys.argv[1] + "/libtorch.so", "w+b") as file:
    file.truncate(4096)
    torch = mmap.mmap(file.fileno(), 4096)
print(os.getpid(), flush=True)
subprocess.run(sys.argv[3:], env=os.environ | dict(word.split("=") for word in sys.argv[2].split(",")))
"""
FIND = "from ds_ext.environment import find_launcher; print(*find_launcher() or ['none'], flush=True)"
RUN = "from ds_ext.launch import process; process.run(lambda: print('trained', flush=True))"
LINE = """
import os, sys
from ds_ext.environment import parent_of
def ancestors():
    process, found = os.getpid(), []
    while process:
        found.append(process := parent_of(process))
    return found
"""
# Runs after the launcher, or the process that started it, has exited.
ORPHAN = f"""{LINE}
before = ancestors()
print("ready", flush=True)
while ancestors() == before:
    pass
"""


def started(folder: Path, launcher: str, *rank: str, then: str = "") -> subprocess.Popen[str]:
    """Start a launcher of one rank; ``then`` is what it does after the rank."""
    variables = ",".join(f"{key}={value}" for key, value in {"RANK": "0", **VARIABLES[launcher]}.items())
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", *VARIABLES["torchrun"], *VARIABLES["deepspeed"])
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER + then, str(folder), variables, *rank],
        env=kept | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("launcher", VARIABLES)
def test_the_launcher_of_a_wrapped_rank(tmp_path: Path, launcher: str) -> None:
    script = f'echo $$; "$0" -c "{FIND}"; exit $?'
    with started(tmp_path, launcher, "bash", "-c", script, sys.executable) as process:
        agent, wrapper = line(process), line(process)
        assert line(process).split() == [wrapper, agent]
    with started(
        tmp_path, launcher, sys.executable, "-c", f"import os; print(os.getpid()); {FIND}"
    ) as process:
        agent, rank = line(process), line(process)
        assert line(process).split() == [rank, agent]


def test_the_launcher_of_a_rank_that_a_profiler_has_detached(tmp_path: Path) -> None:
    """The wrapper waits, and the rank becomes a child of the host's first process."""
    rank = f"{LINE}\nwhile int(os.environ['WRAPPER']) in ancestors():\n    pass\n{FIND}"
    script = 'echo $$; export WRAPPER=$$; (setsid "$0" -c "$1" &); exec sleep 600'
    with started(tmp_path, "torchrun", "bash", "-c", script, sys.executable, rank) as process:
        agent, wrapper = line(process), line(process)
        found = line(process).split()
        os.killpg(process.pid, signal.SIGKILL)
        assert found == [wrapper, agent]


@pytest.mark.parametrize("launcher", VARIABLES)
def test_a_launcher_that_exits_while_its_rank_imports(tmp_path: Path, launcher: str) -> None:
    with started(tmp_path, launcher, sys.executable, "-c", f"{ORPHAN}\n{RUN}") as process:
        assert line(process) == str(process.pid) and line(process) == "ready"
        process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == "stopped: the launcher exited.\n"


def test_a_wrapper_that_exits_before_its_rank_and_the_launcher(tmp_path: Path) -> None:
    run = "from ds_ext.launch import process; import time; process.run(lambda: print(1, flush=True) or time.sleep(600))"
    script = f'echo $$; "$0" -c "{run}"; exit $?'
    then = "import time; time.sleep(600)"
    with started(tmp_path, "torchrun", "bash", "-c", script, sys.executable, then=then) as process:
        wrapper = [line(process), line(process)][1]
        printed = [line(process)]
        os.kill(int(wrapper), signal.SIGKILL)
        printed.append(line(process))
        process.kill()
    assert printed == ["1", "stopped: the program that started this rank exited."]


@pytest.mark.parametrize("first", [os.getpid(), 2**22], ids=["running", "exited"])
def test_an_orphan_reports_in_place_of_a_rank_0_that_has_exited(first: int) -> None:
    ending = f"Ending(neighbours={{0: {first}}})"
    script = f"from ds_ext.launch.process import _end_orphan, Ending; _end_orphan({ending})"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"RANK": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, bool(result.stderr)) == (1, first == 2**22)


def test_a_deepspeed_command_that_exits_while_ranks_import(tmp_path: Path) -> None:
    """Its launcher goes on, and so would the ranks."""
    command = tmp_path / "deepspeed"
    command.write_text("import subprocess, sys; subprocess.run(sys.argv[1:])")
    launcher = tmp_path / "launch.py"
    launcher.write_text("import sys; del sys.argv[1:3]\n" + LAUNCHER)
    rank = [sys.executable, "-c", f"{ORPHAN}\n{RUN}"]
    words = [sys.executable, str(launcher), "deepspeed.launcher.launch", "--world_info=x"]
    variables = "RANK=0,CROSS_RANK=0,MASTER_PORT=1"
    with subprocess.Popen(
        [sys.executable, str(command), *words, str(tmp_path), variables, *rank],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert line(process).isdigit() and line(process) == "ready"
        process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == "stopped: the launcher exited.\n"


NODE = ["python", "-u", "-m", "deepspeed.launcher.launch", "--world_info=x"]


@pytest.mark.parametrize(
    ("launcher", "parent", "leader_runs", "expected"),
    [
        (["torchrun"], ["deepspeed"], False, [(3, 2)]),
        (NODE, ["python", "-u", "/bin/deepspeed", "train.py"], True, [(3, 2), (2, 1)]),
        (NODE, ["bash", "job.sh", "-c", "deepspeed"], True, [(3, 2)]),
        (NODE, ["init"], True, [(3, 2)]),
        (NODE, ["init"], False, []),
        ([*NODE, "--node_rank=1"], ["sshd"], False, [(3, 2)]),
        ([*NODE, "a", "--node_rank", "1"], ["sshd"], False, [(3, 2)]),
        ([*NODE, "a", "b", "train.py", "--node_rank=1"], ["init"], False, []),
    ],
)
def test_pairs_of_launchers(
    launcher: list[str],
    parent: list[str],
    leader_runs: bool,
    expected: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 3 is a child of process 2, whose parent is 1 and whose group is led by 9."""
    words = {2: launcher, 1: parent}
    monkeypatch.setattr(process, "find_launcher", lambda: (3, 2))
    monkeypatch.setattr(process, "words_of", words.__getitem__)
    monkeypatch.setattr(process, "parent_of", lambda number: number - 1)
    monkeypatch.setattr(process, "group_of", lambda number: 9)
    monkeypatch.setattr(process, "is_running", lambda number: leader_runs)
    assert process._launchers() == expected


@pytest.mark.parametrize(("state", "cause"), [("T", "signal"), ("t", "debugger"), ("Z", "exited")])
def test_the_cause_of_a_lost_rank(state: str, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(failure, "process_state", lambda process: (state, 1))
    assert cause in describe_lost_neighbours({1: 2**22})


def test_a_rank_does_not_report_its_own_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert [
        report.split(" exited")[0] for report in describe_lost_neighbours({0: 2**22, 1: 2**22}).split(";")
    ] == ["rank 1"]


@pytest.mark.parametrize("is_ending", [False, True])
def test_a_launcher_that_has_freed_its_memory_is_ending(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_ending: bool
) -> None:
    """Until it is gone, it is still the parent of its ranks. The program that started it may have loaded torch too."""
    files = {
        "self/maps": "",
        f"{os.getpid()}/environ": "",
        "700/stat": "700 (torchrun) R 600 700",
        "700/maps": "" if is_ending else "7f00-7f01 r-xp 0 0:0 1 /libtorch.so\n",
        "600/stat": "600 (pytest) S 1 600",
        "600/maps": "7f00-7f01 r-xp 0 0:0 1 /libtorch.so\n",
        "1/stat": "1 (init) S 0 1",
        "1/maps": "7f00-7f01 r-xp 0 0:0 1 /init\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(environment, "_PROC", tmp_path)
    monkeypatch.setattr(os, "getppid", lambda: 700)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert environment.find_launcher() == (None if is_ending else (os.getpid(), 700))
