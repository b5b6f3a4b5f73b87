"""Carrying out of the events of a launch, and what is read meanwhile."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from ds_ext.engine.checkpoint.folder import LATEST, MANIFEST, open_checkpoint
from ds_ext.errors import DsExtError

from .draw import IN_HOSTS, LINE, OUTSIDE, SAVING, STARTED, Deed, Event, Launch, Moment
from .job import Attacked, Folder, parent_of

LIMIT_S = 240.0  # for a launch; others may use the cores
START_LIMIT_S = 120.0  # a rank that restarts waits so long for one on another host, which may have finished
STACKS_S = 3.0
_MOUNT_S = 10.0
_POLL_S = 0.02
_LOOK_EVERY_S = 0.2
_TINY_BYTES = 100
LOST, CURRENT = "step_77", re.compile(r"step_\d+")


class Scene:
    """Folder of an attack and what the attack has done to it.

    Attributes:
        foreign: folder of checkpoints of another run.
        damaged: checkpoints that the attack has damaged, with the number of the folder's inode.
        changed: the attack has changed the folder, so that saves may fail.
        gone: the attack has taken the folder away.
        read_only: the folder is mounted read-only.
    """

    def __init__(self, folder: Folder, foreign: Callable[[], Path]) -> None:
        self.folder, self.foreign = folder, foreign
        self.damaged: dict[str, int] = {}
        self.changed = self.gone = self.read_only = False

    def names(self) -> list[str]:
        """Return the names of the checkpoints, by step."""
        paths = self.folder.saved.glob("step_*") if self.folder.saved.is_dir() else ()
        return sorted((path.name for path in paths), key=lambda name: int(name[5:]))

    @property
    def spoiled(self) -> set[str]:
        """Damaged checkpoints that have not been replaced since."""
        paths = {name: self.folder.saved / name for name in self.damaged}
        return {
            name for name, path in paths.items() if path.exists() and path.stat().st_ino == self.damaged[name]
        }

    def is_foreign(self, name: str) -> bool:
        """Return whether a checkpoint is that of the other run."""
        paths = [folder / name / MANIFEST for folder in (self.foreign(), self.folder.saved)]
        return all(path.exists() for path in paths) and paths[0].read_bytes() == paths[1].read_bytes()

    def has_foreign(self) -> bool:
        """Return whether the current checkpoint is that of the other run."""
        latest = self.folder.saved / LATEST
        return latest.is_file() and self.is_foreign(latest.read_text())

    def fill(self) -> None:
        """Put checkpoints of another run into the folder."""
        copy = self.folder.saved.with_name(f"foreign_{time.monotonic_ns()}")
        shutil.copytree(self.foreign(), copy)
        while True:
            try:
                copy.rename(self.folder.saved)
                return
            except OSError:  # a job has made the folder again
                self._away()

    def change(self, what: str) -> None:
        """Change the folder, or the file ``latest``."""
        saved, latest, names = self.folder.saved, self.folder.saved / LATEST, self.names()
        if what == "vanish":
            self._away()
        elif what == "replace":
            self._away()
            self.fill()
        elif what == "read-only":
            saved.mkdir(exist_ok=True)
            self._read_only()
        elif what == "link folder" and saved.is_dir() and not saved.is_symlink():
            saved.rename(saved.with_name("elsewhere"))
            saved.symlink_to("elsewhere")
        elif what == "no latest":
            latest.unlink(missing_ok=True)
        elif what == "link latest" and names:
            latest.unlink(missing_ok=True)
            latest.symlink_to(names[-1])
        elif what == "lost latest" and names:
            latest.write_text(LOST)
        elif what == "empty latest" and names:
            latest.write_text("")
        elif what in ("damage", "cut") and names:
            current = latest.read_text() if latest.is_file() else ""
            self._damage(saved / (current if current in names else names[-1]), what == "cut")

    def _away(self) -> None:
        self.changed = self.gone = True
        if self.folder.saved.exists():
            self.folder.saved.rename(self.folder.saved.with_name(f"away_{time.monotonic_ns()}"))

    def _damage(self, checkpoint: Path, cut: bool) -> None:
        files = sorted(checkpoint.glob("layer_*")) or sorted(checkpoint.iterdir())
        data = bytearray(files[0].read_bytes())
        data[len(data) // 2] ^= 1
        files[0].write_bytes(data[: len(data) // 2] if cut else data)
        self.damaged[checkpoint.name] = checkpoint.stat().st_ino

    def _read_only(self) -> None:
        saved, self.changed = str(self.folder.saved), True
        if os.getuid():
            self.folder.saved.chmod(0o555)
        else:  # for whom the permissions do not count
            subprocess.run(["mount", "--bind", saved, saved], check=True)
            deadline = time.monotonic() + _MOUNT_S
            while subprocess.run(["mount", "-o", "remount,bind,ro", saved], capture_output=True).returncode:
                if time.monotonic() > deadline:
                    break  # and the folder stays as it was
                time.sleep(_POLL_S)  # a rank has a file open in it
        self.read_only = True

    def restore(self) -> None:
        """Make the folder writable again."""
        if self.read_only and os.getuid():
            self.folder.saved.chmod(0o755)
        elif self.read_only:
            subprocess.run(["umount", "--lazy", str(self.folder.saved)], check=True)
        self.read_only = False


class Happened:
    """Record of a launch.

    Attributes:
        deeds: those that took effect, with their moments and the last printed step, in their order.
        idle: those without effect, because there was no such process.
        missed: events whose moment did not come.
        code: exit code of the launcher; None if it did not end.
        left: command lines of the processes that were left 30 s after the end.
        hangs: whether the job passed its limit; its output then ends with its stacks.
        unread: errors of reads of the current checkpoint.
    """

    def __init__(self, launch: Launch, job: Attacked) -> None:
        self.launch, self.job = launch, job
        self.deeds: list[tuple[Deed, Moment, int]] = []
        self.idle: list[Deed] = []
        self.missed: list[Event] = []
        self.code: int | None = None
        self.left: list[str] = []
        self.unread: set[str] = set()
        self.second: Attacked | None = None
        self.second_code: int | None = None
        self.hangs = False


class Attacker:
    """Carries out the events of a launch.

    Args:
        points: the events with a point of rank.py, by number.
        others: the other events.
        second_job: starts another job with the same folder.
    """

    def __init__(
        self,
        job: Attacked,
        scene: Scene,
        events: dict[int, Event],
        second_job: Callable[[], Attacked],
    ) -> None:
        self.job, self.scene, self.second_job = job, scene, second_job
        self.pending = dict(events)
        self.seen: dict[int, float] = {}
        self.happened = Happened(job.launch, job)
        self._look_s = 0.0
        self._continue: list[tuple[float, int]] = []

    def run(self) -> Happened:
        """Carry out all events, and wait for the end of the launcher."""
        of_starts = START_LIMIT_S * self.job.launch.restarts if self.job.cluster else 0
        deadline = time.monotonic() + LIMIT_S + of_starts
        while self.job.process.poll() is None and time.monotonic() < deadline:
            for number, event in list(self.pending.items()):
                if self._is_due(number, event.moment):
                    del self.pending[number]
                    self._carry_out(event)
                    if event.moment.point not in OUTSIDE:
                        self.job.let_pass(number)
            self._wake()
            self._look()
            time.sleep(_POLL_S)
        self.happened.missed = list(self.pending.values())
        for number in self.pending:
            self.job.let_pass(number)
        if self.job.process.poll() is None:
            # torchrun itself waits five minutes for a host that is cut off, after its ranks have ended.
            self.happened.hangs = self.job.cluster is None or bool(self.job.rank_pids())
            self._print_stacks()
            return self.happened
        while self._continue:
            self._wake()
            time.sleep(_POLL_S)
        self._wait_for_all()
        self.happened.code = self.job.wait(5)
        return self.happened

    # --- moments ---

    def _is_due(self, number: int, moment: Moment) -> bool:
        if moment.point not in OUTSIDE:
            return self.job.reached(number)
        if number not in self.seen and self._has_come(moment):
            self.seen[number] = time.monotonic()
        return number in self.seen and time.monotonic() - self.seen[number] >= moment.delay_s

    def _has_come(self, moment: Moment) -> bool:
        all_exist = len(self.job.rank_pids()) == self.job.launch.ranks
        if self.job.start < moment.start:
            return False
        if moment.point == STARTED:
            return all_exist
        if moment.point == SAVING:
            return any(self.scene.folder.saved.glob(".step_*.tmp-*"))
        assert moment.point == LINE
        return self.last_step() >= moment.step

    def last_step(self) -> int:
        """Return the number in the last line of a step; 0 without one."""
        steps = [step_of(line) for line in list(self.job.lines)]
        return next((step for step in reversed(steps) if step is not None), 0)

    # --- deeds ---

    def _carry_out(self, event: Event) -> None:
        for deed in event.deeds:
            if deed.what == "second job":
                self._run_second_job()
                effect = True
            elif deed.what == "full":
                effect = self._fill_disk(deed.rank)
            elif deed.what in IN_HOSTS:
                effect = self._harm_host(deed)
            elif deed.target:
                effect = self._signal(deed)
            else:
                self.scene.change(deed.what)
                effect = True
            if effect:
                self.happened.deeds.append((deed, event.moment, self.last_step()))
            else:
                self.happened.idle.append(deed)

    def _signal(self, deed: Deed) -> bool:
        sent = self.job.send(signal.Signals[f"SIG{deed.what}"], deed.target, deed.rank)
        if deed.what == "STOP":
            self._continue += [(time.monotonic() + deed.stopped_s, process) for process in sent]
        return bool(sent)

    def _harm_host(self, deed: Deed) -> bool:
        """Take a host from the job."""
        cluster, host = self.job.cluster, self.job.host_of(deed.rank)
        assert cluster is not None
        if deed.what == "cut":
            cluster.cut(host)
        else:
            if deed.what == "replace host":
                (self.job.control / f"replaced.{host}").touch()
            cluster[host].end_processes()
        return True

    def _wake(self) -> None:
        now = time.monotonic()
        for due_s, process in [entry for entry in self._continue if entry[0] <= now]:
            self._continue.remove((due_s, process))
            for stopped in (process, parent_of(process)):  # nsenter stops with its child
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stopped, signal.SIGCONT)

    def _fill_disk(self, rank: int) -> bool:
        """Let a rank write no more than a few bytes into any file."""
        for process in self.job.targets("rank", rank):
            with contextlib.suppress(ProcessLookupError):
                hard = resource.prlimit(process, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(process, resource.RLIMIT_FSIZE, (_TINY_BYTES, hard))
                self.scene.changed = True
                return True
        return False

    def _run_second_job(self) -> None:
        job = self.happened.second = self.second_job()
        try:
            deadline = time.monotonic() + LIMIT_S
            while job.process.poll() is None and time.monotonic() < deadline:
                job.note()
                time.sleep(_POLL_S)
            self.happened.second_code = job.process.poll()
        finally:
            job.end()

    # --- reading and waiting ---

    def _look(self) -> None:
        """Note the processes, and open the current checkpoint as a script that watches the folder would."""
        now, folder = time.monotonic(), self.scene.folder.saved
        if now < self._look_s:
            return
        self._look_s = now + _LOOK_EVERY_S
        self.job.note()
        if self.scene.changed or self.scene.spoiled or self.job.launch.change:
            return
        for attempt in (0, 1):  # it may just be replaced by one of the same name
            try:
                if (folder / LATEST).is_file():
                    open_checkpoint(folder)
                return
            except (DsExtError, OSError) as error:
                if attempt:
                    self.happened.unread.add(str(error))
                time.sleep(_LOOK_EVERY_S)

    def _print_stacks(self) -> None:
        """Print the stacks of all ranks, and kill everything."""
        self.job.send(signal.SIGUSR1, "ranks", 0)
        time.sleep(STACKS_S)
        self.job.end()

    def _wait_for_all(self) -> None:
        """Wait until no process of the job is left, for 30 s at most."""
        begin = time.monotonic()
        while alive := [*self.job.note(), *self.job.keepers()]:
            if time.monotonic() - begin > 30:
                self.happened.left = [_described(process) for process in alive]
                self.job.end()
                return
            time.sleep(0.1)


_STEP = re.compile(r"step +(\d+)/\d+ \| loss ")


def step_of(line: str) -> int | None:
    """Return the step of a progress line; None for another line."""
    match = _STEP.match(line)
    return int(match[1]) if match else None


def _described(process: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{process}/cmdline").read_text(errors="replace").replace("\0", " ")
        status = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        return f"{process} ({status}) {words}"
    return f"{process}"
