"""Checks after an attack: steps, losses and checkpoints are those of an undisturbed run, and losses are reported."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from ds_ext.engine.checkpoint.file import TensorFile, read_plain
from ds_ext.engine.checkpoint.folder import LATEST, MANIFEST, check_contents, open_checkpoint
from ds_ext.errors import DsExtError

from .draw import DEADLY, DEEPSPEED, OWN, Attack, Launch, Moment
from .events import Happened, Scene, step_of
from .job import Reference, References

LOSS_TOLERANCE, WEIGHT_TOLERANCE = 2e-4, 2e-3  # after a resume with another layout
_PRINTED_TOLERANCE = 6e-5
_RECOVERED = re.compile(r"recovered at step (\d+) from host memory \(restart (\d+)\): (\d+) steps? lost")
_RESUMED = re.compile(r"resumed from (.+) at step (\d+)")
_AGAIN = re.compile(r".*restart \d+ continues from step (\d+)")
_LOST = re.compile(r".*(restart \d+ found no snapshots of all ranks|: no checkpoint)")
_SAVED = re.compile(r"step (\d+): saved (.+)")
_LOSS = re.compile(r"step +(\d+)/\d+ \| loss ([\d.]+)")
_REASON = re.compile(r"error: |rank \d+ stopped|rank \d+ failed\.|stopped(:| by)")
_OF_LAUNCHER = re.compile(r"exitcode|exits with return code|Signal \d+ \(SIG\w+\) received|got signal|SIG\w+")
_CRASH = re.compile(r'  File ".*/ds_ext/.*", line \d+, in ')
LAUNCHERS = ("launcher", "node launcher", "group")
UNHEARD = ("KILL", "HUP", "SEGV", "USR1")  # signals that end a process without a word


class Judge:
    """Faults of one attack.

    Args:
        attack: what was drawn.
        scene: its folder.
        references: undisturbed runs.
    """

    def __init__(self, attack: Attack, scene: Scene, references: References) -> None:
        self.attack, self.scene, self.references = attack, scene, references
        self.faults: list[str] = []
        self.layouts: list[str] = []  # of the launches so far
        self.last = 0  # highest step that a launch has printed
        self.promised: set[str] = set()  # checkpoints that were reported as saved

    def reference(self, layout: str) -> Reference:
        """Return the undisturbed run."""
        return self.references(self.attack.script, layout)

    def launch(self, happened: Happened) -> None:
        """Check one launch, after its end."""
        launch = happened.launch
        if happened.launch.layout not in self.layouts:
            self.layouts.append(launch.layout)
        if happened.hangs:
            self._add("hangs")
        if happened.left:
            self._add(f"left after 30 s: {happened.left}")
        self.faults += [f"current checkpoint cannot be read: {text}" for text in happened.unread]
        self._check_steps(happened)
        self._check_losses(happened)
        self._check_checkpoints()
        self._check_ending(happened)

    def _add(self, text: str) -> None:
        self.faults.append(text)

    # --- steps and losses ---

    def _check_steps(self, happened: Happened) -> None:
        """Every printed step follows the one before, or the step of a sentence."""
        launch, step, complete = happened.launch, 0, 0
        reported = not launch.load
        for line in list(happened.job.lines):
            if match := _RECOVERED.match(line):
                step, lost = int(match[1]), int(match[3])
                reported = True
                if abs(step + lost - complete) > 1:
                    self._add(f"{line[:80]}: but step {complete} was the last one printed")
            elif match := _RESUMED.match(line):
                step, reported = int(match[2]), True
                if step > max(complete, self.last):
                    self._add(f"{line}: no launch has reached this step")
                complete = step
                self._check_named(Path(match[1]), step)
            elif match := _AGAIN.match(line):
                step, reported = int(match[1]), True
            elif _LOST.match(line):
                step, reported = 0, True
            elif match := _SAVED.match(line):
                self.promised.add(Path(match[2]).name)
            elif (number := step_of(line)) is not None:
                if number != step + 1 or not reported:
                    self._add(f"step {number} follows step {step} without a sentence")
                step = complete = number
                self.last = max(self.last, step)

    def _check_named(self, path: Path, step: int) -> None:
        if path.name != f"step_{step}" and path.name != LATEST:
            self._add(f"resumed from {path} at step {step}")
        if path.name in self.scene.spoiled:
            self._add(f"resumed from {path}, which is damaged")

    def _check_losses(self, happened: Happened) -> None:
        """Losses of the metrics file and of the lines are those of the undisturbed run."""
        expected = self.reference(happened.launch.layout).losses
        tolerance = 0.0 if len(self.layouts) == 1 else LOSS_TOLERANCE
        file = happened.job.control.with_suffix(".jsonl")
        for number, line in enumerate(file.read_text().splitlines() if file.exists() else (), 1):
            try:
                row = json.loads(line)
            except ValueError:
                self._add(f"{file.name}:{number}: not JSON: {line[:40]!r}")
                continue
            difference = abs(row["loss"] - expected[row["step"] - 1])
            if difference > tolerance:
                self._add(f"metrics: loss of step {row['step']} differs by {difference}")
        for line in list(happened.job.lines):
            if match := _LOSS.match(line):
                difference = abs(float(match[2]) - expected[int(match[1]) - 1])
                if difference > tolerance + _PRINTED_TOLERANCE:
                    self._add(f"loss of step {match[1]} differs by {difference}: {line[:60]}")

    # --- checkpoints ---

    def _check_checkpoints(self) -> None:
        """Every checkpoint is complete and has the weights of the undisturbed run."""
        for name in self.scene.names():
            if name not in self.scene.spoiled and not self._is_foreign(name):
                self._check_checkpoint(self.scene.folder.saved / name)
        for name in self.promised:
            path = self.scene.folder.saved / name
            if not self.scene.changed and not path.exists():
                self._add(f"{name}: reported as saved, and missing")

    def _is_foreign(self, name: str) -> bool:
        return (self.attack.used or self.scene.changed) and self.scene.is_foreign(name)

    def _check_checkpoint(self, checkpoint: Path) -> None:
        problems = list(incomplete(checkpoint))
        try:
            check_contents(*open_checkpoint(checkpoint.parent, checkpoint.name))
        except DsExtError as error:
            problems.append(str(error))
        self.faults += [f"{checkpoint.name}: incomplete: {problem}" for problem in problems]
        if problems:
            return
        step, exact = int(checkpoint.name[5:]), len(self.layouts) == 1
        layout = next((name for name in self.layouts if exact), self.layouts[0])
        other = self.reference(layout).saved / checkpoint.name
        if step > len(self.reference(layout).losses):
            self._add(f"{checkpoint.name}: no launch trains this step")
        elif difference := unequal(checkpoint, other, exact):
            self._add(f"{checkpoint.name}: differs from the undisturbed run: {difference}")

    def _usable(self) -> list[str]:
        """Return the checkpoints that a launch may load."""
        return [
            name
            for name in self.scene.names()
            if name not in self.scene.spoiled and not any(incomplete(self.scene.folder.saved / name))
        ]

    # --- the end ---

    def _check_ending(self, happened: Happened) -> None:
        launch, code = happened.launch, happened.code
        if code is None:
            return
        last = f"step_{launch.steps}"
        targets = {deed.target for deed, _, _ in happened.deeds if deed.what in DEADLY}
        if code == 0 and launch.launcher == DEEPSPEED and targets & {"node launcher", "group"}:
            return  # the command of deepspeed takes a signal that ends its process on the host for success
        if code == 0:
            if self.last < launch.steps:
                self._add(f"exit code 0 after step {self.last} of {launch.steps}")
            there = last in self._usable() and not self._is_foreign(last)
            harmed = self.scene.gone or last in self.scene.spoiled  # by the attack, after the save
            if not there and not (harmed and last in self.promised):
                self._add(f"exit code 0 without the checkpoint {last}")
        elif self._must_succeed(happened):
            self._add(f"exit code {code}, although {self._survivable(happened)}")
        else:
            self._check_reason(happened)
        crashes = [line for line in happened.job.lines if _CRASH.match(line)]
        workers = any(deed.target == "worker" for deed, _, _ in happened.deeds)
        early = any(deed.what == "INT" for deed, _, _ in happened.deeds)
        if crashes and not workers and not early:
            self._add(f"traceback: {crashes[-1].strip()}")

    def _survivable(self, happened: Happened) -> str:
        deadly = [deed for deed, _, _ in happened.deeds if deed.what in DEADLY]
        return f"{len(deadly)} deadly signals and {happened.launch.restarts} restarts"

    def _must_succeed(self, happened: Happened) -> bool:
        """Return whether the launch has as many restarts as it needs, and a checkpoint that it can load."""
        launch = happened.launch
        if self.scene.changed or self.scene.spoiled:
            return False
        if launch.load and not self._could_load(launch):
            return False
        ends: set[Moment] = set()  # of all ranks
        for deed, moment, printed in happened.deeds:
            if printed == launch.steps and happened.job.cluster is not None:
                return False  # the other host may have finished, and its launcher starts no rank again
            if deed.what in ("lose host", "cut") or (deed.what != "STOP" and deed.target in LAUNCHERS):
                return False
            if deed.what == "replace host" or (deed.what in DEADLY and deed.target != "keeper"):
                ends.add(moment)
        if ends and launch.launcher == DEEPSPEED:
            return False
        return len(ends) <= launch.restarts

    def _could_load(self, launch: Launch) -> bool:
        if launch.change in ("damage", "cut", "lost latest", "empty latest"):
            return False
        return self.attack.script == OWN or bool(self._usable())

    def _check_reason(self, happened: Happened) -> None:
        """A line of the job or of its launcher says why it ended."""
        lines = list(happened.job.lines)
        reasons = [line for line in lines if _REASON.match(line)]
        if reasons:
            return
        signalled = {deed.target for deed, _, _ in happened.deeds}
        targets = {deed.target for deed, _, _ in happened.deeds if deed.what in UNHEARD}
        began = any(step_of(line) is not None for line in lines)
        complete = f"step_{happened.launch.steps}" in self.promised  # before the ranks noticed that
        if complete and signalled.intersection(LAUNCHERS):
            return
        if "group" in targets or (targets.intersection(LAUNCHERS) and not began):
            return
        unheard = {
            deed.rank for deed, _, _ in happened.deeds if deed.target == "rank" and deed.what in UNHEARD
        }
        nobody_else = len(unheard) == happened.launch.ranks or not began or "ranks" in targets
        if nobody_else and any(_OF_LAUNCHER.search(line) for line in lines):
            return
        self._add(f"exit code {happened.code} without a reason")

    def second_job(self, happened: Happened) -> None:
        """A second job with the same folder is refused."""
        job = happened.second
        assert job is not None
        if happened.second_code is None:
            self._add("the second job hangs")
        elif happened.second_code == 0:
            self._add("the second job saved to the folder of the first")
        if not any(line.startswith("error: ") for line in job.lines):
            self._add("the second job ends without an error")


def incomplete(checkpoint: Path) -> Iterator[str]:
    """Yield what a checkpoint lacks, by its manifest."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        yield f"{MANIFEST}: {error}"
        return
    for name, record in files.items():
        path = checkpoint / name
        if not path.is_file():
            yield f"{name} is missing"
            continue
        data = path.read_bytes()
        if (len(data), zlib.crc32(data)) != (record["bytes"], record["crc32"]):
            yield f"{name} has {len(data)} bytes of {record['bytes']}, or wrong ones"


def unequal(checkpoint: Path, other: Path, exact: bool) -> str:
    """Return how two checkpoints differ; an empty text if they have the same weights and, if exact, states."""
    names = [
        sorted(path.name for path in folder.iterdir() if _has_tensors(path)) for folder in (checkpoint, other)
    ]
    if exact and names[0] != names[1]:
        return f"files {sorted({*names[0]} ^ {*names[1]})}"
    for name in names[0]:
        if name not in names[1] or (not exact and name.startswith("optimizer")):
            continue
        states = [_tensors(folder / name) for folder in (checkpoint, other)]
        if states[0].keys() != states[1].keys():
            return f"tensors of {name}"
        for key, tensor in states[0].items():
            if exact and not torch.equal(tensor, states[1][key]):
                return f"{key} in {name}"
            if not exact and not torch.allclose(tensor, states[1][key], atol=WEIGHT_TOLERANCE):
                return f"{key} in {name} by {float((tensor - states[1][key]).abs().max())}"
    return ""


def _has_tensors(path: Path) -> bool:
    return path.name.startswith(("layer_", "optimizer_"))


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        file = TensorFile(path)
        return {name: file.read_all(name) for name in file.names}
    return read_plain(path)
