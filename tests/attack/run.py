"""One attack from its seed to its verdict."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tests.hosts.cluster import Cluster

from .draw import GPT, OUTSIDE, Attack, Launch, Moment
from .events import Attacker, Happened, Scene
from .job import OTHER_SEED, SEED, Attacked, Folder, References, script_words
from .judge import Judge

_SECOND = Launch("one")


@dataclass
class Outcome:
    """Verdict of an attack.

    Attributes:
        faults: none if the job behaved.
        launches: what happened in each.
    """

    faults: list[str] = field(default_factory=list)
    launches: list[Happened] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Output of all launches."""
        parts = []
        for number, happened in enumerate(self.launches):
            done = [f"{deed} at {moment}, printed step {step}" for deed, moment, step in happened.deeds]
            parts += [f"--- launch {number}: exit code {happened.code}; {'; '.join(done) or 'undisturbed'}"]
            parts += [*happened.job.lines]
            if happened.second is not None:
                parts += [f"--- second job: exit code {happened.second_code}", *happened.second.lines]
        return "\n".join(parts)


def run(attack: Attack, references: References, path: Path, cluster: Cluster | None = None) -> Outcome:
    """Run an attack in a new folder, and judge it. With a cluster, the ranks are on its hosts."""
    shutil.rmtree(path, ignore_errors=True)
    folder = Folder(path)
    scene = Scene(folder, lambda: references(attack.script, attack.launches[0].layout, OTHER_SEED).saved)
    references(attack.script, attack.launches[0].layout)
    outcome, judge = Outcome(), Judge(attack, scene, references)
    if attack.used:
        scene.fill()
    try:
        for number, launch in enumerate(attack.launches):
            if launch.load and scene.has_foreign():
                break  # to load it would be right
            scene.change(launch.change)
            happened = _launch(attack, launch, number, scene, references, cluster)
            outcome.launches.append(happened)
            scene.restore()
            if cluster is not None:
                cluster.mend(1)
            judge.launch(happened)
            if happened.second is not None:
                judge.second_job(happened)
    finally:
        scene.restore()
    outcome.faults = judge.faults
    return outcome


def _launch(
    attack: Attack,
    launch: Launch,
    number: int,
    scene: Scene,
    references: References,
    cluster: Cluster | None,
) -> Happened:
    events = dict(enumerate(launch.events))
    points = {n: _listed(event.moment) for n, event in events.items() if event.moment.point not in OUTSIDE}
    intervals = attack.save_interval, attack.eval_interval

    def words(launch: Launch, script: str, seed: int, name: str) -> list[str]:
        return script_words(script, launch, scene.folder, references.corpus, seed, intervals, name)

    def second_job() -> Attacked:
        name = f"second_{number}"
        return Attacked(_SECOND, scene.folder, words(_SECOND, GPT, OTHER_SEED, name), name, {})

    name = f"launch_{number}"
    own = words(launch, attack.script, SEED, name)
    job = Attacked(launch, scene.folder, own, name, points, cluster)
    try:
        return Attacker(job, scene, events, second_job).run()
    finally:
        job.end()


def _listed(moment: Moment) -> tuple[int, int, str, int]:
    return moment.start, moment.rank, moment.point, moment.step
