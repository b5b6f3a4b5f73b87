"""Launched jobs that are attacked, and undisturbed runs of the same jobs."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.hosts.cluster import Cluster
from tests.hosts.jobs import torchrun
from tests.launch.forked import ForkedJob
from tests.launch.jobs import BIN, ROOT, Job, prepare_corpus, processes, tiny_config, write_json

from .draw import ALL_STEPS, DEEPSPEED, GPT, LAYOUTS, Launch

HERE = Path(__file__).parent
SEED, OTHER_SEED = 1234, 4321  # of the attacked job, and of another run
SAMPLES = 16  # in a step
WRAPPERS = {"shell": '"$@"; exit $?', "exec": 'exec "$@"', "setsid": 'exec setsid --wait "$@"'}
WRAPPER = "#!/bin/sh\ncase $1 in --local_rank=*) shift ;; esac  # from deepspeed, before the command\n{}\n"
KEEPER, RANK_FILE, TORCHRUN_FILE = "keeper_process.py", str(HERE / "rank.py"), str(BIN / "torchrun")
HOSTS = 2


class Folder:
    """Folder of one attack: ``saved`` for checkpoints, ``other`` for everything else."""

    def __init__(self, path: Path) -> None:
        self.path, self.saved, self.other = path, path / "saved", path / "other"
        self.other.mkdir(parents=True)


def script_words(
    script: str,
    launch: Launch,
    folder: Folder,
    corpus: Path,
    seed: int,
    intervals: tuple[int, int],
    name: str,
) -> list[str]:
    """Write the JSON of a job and return the script with its flags.

    Args:
        intervals: steps between saves and between evaluations.
        name: of the files of this launch.
    """
    layout = LAYOUTS[launch.layout]
    config = tiny_config(corpus, **layout.ds_ext)
    config |= {"train_batch_size": SAMPLES, "zero_optimization": {"stage": 0}, **layout.config}
    config["ds_ext"]["train"] |= {"num_layers": 8, "eval_iters": 1}
    if launch.every:
        config["ds_ext"]["recovery"] = {"every": launch.every}
    path = write_json(folder.other / f"{name}.json", config)
    flags = {
        "--deepspeed_config": path,
        "--save": folder.saved,
        "--save-interval": intervals[0],
        "--eval-interval": intervals[1],
        "--train-iters": launch.steps,
        "--metrics-file": folder.other / f"{name}.jsonl",
        "--seed": seed,
        **({"--load": folder.saved} if launch.load else {}),
    }
    file = ROOT / script if script == GPT else HERE / script
    return [str(file), *(str(word) for pair in flags.items() for word in pair)]


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def launcher_words(launch: Launch, folder: Folder, words: Sequence[str]) -> list[str]:
    """Return the command that starts the ranks of a launch; ``words`` are rank.py, a script and its flags."""
    port, python = str(free_port()), []
    if launch.wrapper:
        wrapper = folder.other / f"{launch.wrapper}.sh"
        wrapper.write_text(WRAPPER.format(WRAPPERS[launch.wrapper]))
        wrapper.chmod(0o755)
        python = [str(wrapper), sys.executable]
    if launch.launcher == DEEPSPEED:
        options = [
            "--num_gpus",
            str(launch.ranks),
            "--master_port",
            port,
            *(["--no_python"] if python else []),
        ]
        return ["deepspeed", *options, *python, *words]
    options = ["--nproc_per_node", str(launch.ranks), "--master_port", port]
    options += ["--max-restarts", str(launch.restarts), *(["--no-python"] if python else [])]
    return ["torchrun", *options, *python, *words]


def hosts_words(
    launch: Launch, folder: Folder, words: Sequence[str], cluster: Cluster, control: Path
) -> list[str]:
    """Return a shell command that runs one torchrun on each host.

    If there is a file ``replaced.1`` when that of host 1 ends, it starts again, as on a new host.
    """
    slots = [launch.ranks // HOSTS] * HOSTS
    lines = []
    for host, command in torchrun(cluster.hosts, slots, *words, static=True):
        command[1:1] = ["--max-restarts", str(launch.restarts)]
        # torchrun signals its process group, whose id must exist in the namespace, so it gets a new session.
        entered = shlex.join([*cluster[host].enter(folder.other), "setsid", "--wait", *command])
        again = f"rm {shlex.quote(str(control))}/replaced.{host} 2>/dev/null"
        lines.append(f"( while {entered}; code=$?; {again}; do :; done; exit $code ) & ended_{host}=$!")
    waits = [f"wait $ended_{host}; code_{host}=$?" for host in range(HOSTS)]
    return ["sh", "-c", "\n".join([*lines, *waits, "exit $(( code_0 | code_1 ))"])]


class Attacked(Job):
    """Launched job whose ranks wait at points.

    Args:
        points: (start, rank, point, step) by number.
        cluster: hosts of the ranks; None: this machine.
    """

    def __init__(
        self,
        launch: Launch,
        folder: Folder,
        words: Sequence[str],
        name: str,
        points: dict[int, tuple[int, int, str, int]],
        cluster: Cluster | None = None,
    ) -> None:
        self.launch, self.cluster, self.control = launch, cluster, folder.other / f"{name}.points"
        self.control.mkdir()
        numbered = [[number, *point] for number, point in points.items()]
        (self.control / "points.json").write_text(json.dumps(numbered))
        self.seen: set[int] = set()  # processes of this job
        self.start = 0  # last start of the ranks
        words = [RANK_FILE, *words]
        if cluster is None:
            command = launcher_words(launch, folder, words)
        else:
            command = hosts_words(launch, folder, words, cluster, self.control)
        super().__init__(command, folder.other, ATTACK_FOLDER=str(self.control))

    def reached(self, number: int) -> bool:
        """Return whether a rank waits at a point, or has waited there."""
        return (self.control / f"{number}.reached").exists()

    def let_pass(self, number: int) -> None:
        """Let the rank continue that waits at a point, or that will reach it."""
        (self.control / f"{number}.passed").touch()

    def rank_pids(self) -> dict[int, int]:
        """Return rank -> process, of the ranks of the last start, without wrappers and workers."""
        ranks: dict[int, tuple[int, int]] = {}
        for process, variables in processes(self.mark).items():
            # Wrappers have it as a later word. The second may be "-u".
            if "RANK" in variables and RANK_FILE in command_of(process).split()[1:3]:
                ranks[process] = int(variables.get("TORCHELASTIC_RESTART_COUNT", 0)), int(variables["RANK"])
        self.start = max([self.start, *(start for start, _ in ranks.values())])
        return {
            rank: process
            for process, (start, rank) in ranks.items()
            if start == self.start and parent_of(process) not in ranks
        }

    def note(self) -> set[int]:
        """Return the living processes of this job, without keepers on this machine, and remember them."""
        alive = set(processes(self.mark))
        if self.process.poll() is None:
            alive.add(self.process.pid)
        if self.cluster is not None:
            alive.update(process for host in self.cluster.hosts for process in host.processes())
        self.seen |= alive
        return alive

    def keepers(self) -> list[int]:
        """Return the processes that keep snapshots for this job; they do not have its mark."""
        found = []
        for process in self.seen if self.cluster else map(int, filter(str.isdigit, os.listdir("/proc"))):
            words = command_of(process).split()
            if (
                len(words) > 1
                and words[-2].endswith(KEEPER)
                and (self.cluster or int(words[-1]) in self.seen)
            ):
                found.append(process)
        return found

    def targets(self, target: str, rank: int) -> list[int]:
        """Return the processes of a target of :class:`.draw.Deed`."""
        alive, pids = self.note(), self.rank_pids()
        if target == "ranks":
            return list(pids.values())
        if target == "rank":
            return [pids[rank]] if rank in pids else []
        if target == "keeper":
            return self.keepers() if self.cluster is None else self.keepers()[:1]
        if target == "worker":
            return [process for process in alive if rank in pids and parent_of(process) == pids[rank]]
        if target == "wrapper":
            parent = parent_of(pids[rank]) if rank in pids else 0
            return [parent] if parent in alive and parent != self.process.pid else []
        if target == "node launcher":
            return [p for p in alive if parent_of(p) == self.process.pid and "launch" in command_of(p)]
        if target == "launcher" and self.cluster is not None:
            host = self.cluster[self.host_of(rank)]
            return [p for p, command in host.processes().items() if command.split()[1:2] == [TORCHRUN_FILE]]
        return [self.process.pid]

    def host_of(self, rank: int) -> int:
        """Return the host of a rank."""
        return rank * HOSTS // self.launch.ranks

    def send(self, number: signal.Signals, target: str, rank: int) -> list[int]:
        """Send a signal. Returns the processes that got it."""
        sent = []
        for process in self.targets(target, rank):
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if target == "group" else os.kill)(process, number)
                sent.append(process)
        return sent

    def end(self) -> None:
        """Kill all processes."""
        for process in [*self.note(), *self.keepers()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()


def parent_of(process: int) -> int:
    """Return the parent of a process; 0 if it has exited."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def command_of(process: int) -> str:
    """Return the command line of a process; an empty text if it has exited."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text(errors="replace").replace("\0", " ")
    return ""


@dataclass(frozen=True)
class Reference:
    """Undisturbed run with a checkpoint of every step.

    Attributes:
        losses: of each step, from step 1 on.
        saved: folder of the checkpoints.
    """

    losses: list[float]
    saved: Path


class References:
    """Undisturbed runs, each trained at its first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[tuple[str, str, int], Reference] = {}

    @cached_property
    def corpus(self) -> Path:
        """Text of train_gpt.py."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return prepare_corpus(self._folder)

    def add(self, script: str, layout: str, reference: Reference) -> None:
        """Use a run that exists already."""
        self._runs[script, layout, SEED] = reference

    def __call__(self, script: str, layout: str, seed: int = SEED) -> Reference:
        """Return the run of a script with a layout."""
        key = script, layout, seed
        if key not in self._runs:
            folder = Folder(self._folder / f"{script}-{layout}-{seed}")
            launch = Launch(layout, steps=ALL_STEPS)
            words = script_words(script, launch, folder, self.corpus, seed, (1, ALL_STEPS), "reference")
            with ForkedJob([words] * launch.ranks, folder.other, port=free_port()) as job:
                results = job.wait()
                assert {result.returncode for result in results} == {0}, job.text
            rows = [json.loads(line) for line in (folder.other / "reference.jsonl").read_text().splitlines()]
            self._runs[key] = Reference([row["loss"] for row in rows], folder.saved)
        return self._runs[key]
