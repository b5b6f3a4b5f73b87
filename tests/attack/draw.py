"""Random attacks: a job, its launches one after another, and what happens to each at which moment."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

STEPS, ALL_STEPS = 6, 9  # of the first launch, and of a later one
GPT, OWN = "train_gpt.py", "own.py"
TORCHRUN, DEEPSPEED = "torchrun", "deepspeed"


@dataclass(frozen=True)
class Layout:
    """Number of ranks, and entries of the JSON."""

    ranks: int
    ds_ext: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)


def _pipeline(schedule: str, devices: int, ranks: int = 0, tp: int = 1, **config: Any) -> Layout:
    sizes = {"pipeline_parallel_size": devices, "tensor_parallel_size": tp}
    return Layout(ranks or devices * tp, {"schedule": schedule, **sizes}, config)


LAYOUTS = {
    "one": _pipeline("1f1b", 1),
    "1f1b": _pipeline("1f1b", 2),
    "bitpipe": _pipeline("bitpipe", 2, zero_optimization={"stage": 1}),
    "zb_v": _pipeline("zb_v", 2),
    "dp": _pipeline("1f1b", 1, ranks=2, zero_optimization={"stage": 1}),
    "tp": _pipeline("1f1b", 1, tp=2),
    "bf16": _pipeline("bitpipe_zb", 2, bf16={"enabled": True}, zero_optimization={"stage": 1}),
    "gpipe3": _pipeline("gpipe", 3),
    "bitpipe4": _pipeline("bitpipe", 4, zero_optimization={"stage": 1}),
    "tp_pp": _pipeline("1f1b", 2, tp=2, zero_optimization={"stage": 1}),
    "fbd": _pipeline("fbd", 2, ranks=4),
}
OF_OWN = ("one", "1f1b", "bitpipe", "zb_v", "dp", "gpipe3")  # layouts without tensor parallelism or bf16
WRAPPERS = ("", "", "", "shell", "exec", "setsid")

# Points of rank.py.
IN_START, IN_RESTART = ("import", "recover"), ("import", "recover", "load", "recovered")
IN_STEP = ("forward", "backward", "reduce", "optimizer", "snapshot", "snapshot taken", "complete", "evaluate")
IN_SAVE = ("save", "file", "publish", "manifest", "renamed", "current", "saved")
ON_RANK_0 = ("publish", "manifest", "renamed", "current")
# Moments that are seen from outside, and followed by a delay: line of a step, all ranks exist, a save has begun.
LINE, STARTED, SAVING = "line", "started", "saving"
OUTSIDE = (LINE, STARTED, SAVING)

DEADLY = ("KILL", "KILL", "KILL", "TERM", "INT", "HUP", "SEGV")
HARMLESS = ("STOP", "USR1")
IN_FOLDER = ("vanish", "replace", "full", "read-only", "no latest", "link latest", "damage")
IN_HOSTS = ("lose host", "replace host", "cut")
BEFORE_LAUNCH = ("no latest", "link latest", "lost latest", "empty latest", "damage", "cut", "link folder")


@dataclass(frozen=True)
class Moment:
    """Moment of a start of the ranks: a point of rank.py on a rank, or one of OUTSIDE with a delay; ``step`` 0: any."""

    point: str
    start: int = 0
    step: int = 0
    rank: int = 0
    delay_s: float = 0.0


@dataclass(frozen=True)
class Deed:
    """Part of an event: a signal to a process, a change of the folder, or "second job".

    Attributes:
        what: name of a signal, one of IN_FOLDER or IN_HOSTS, or "second job".
        target: "rank", "ranks", "keeper", "launcher", "node launcher", "group", "worker" or "wrapper".
        rank: number of the rank, or of the rank that has the worker or wrapper, or whose disk is full, or on the host.
        stopped_s: seconds until SIGCONT follows SIGSTOP.
    """

    what: str
    target: str = "rank"
    rank: int = 0
    stopped_s: float = 0.0


@dataclass(frozen=True)
class Event:
    """Deeds at a moment."""

    moment: Moment
    deeds: tuple[Deed, ...]


@dataclass(frozen=True)
class Launch:
    """One start of a launcher.

    Attributes:
        load: pass ``--load``.
        change: change of the folder before, one of BEFORE_LAUNCH.
    """

    layout: str
    launcher: str = TORCHRUN
    wrapper: str = ""
    restarts: int = 0
    every: int = 0
    steps: int = STEPS
    load: bool = False
    change: str = ""
    events: tuple[Event, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return LAYOUTS[self.layout].ranks


@dataclass(frozen=True)
class Attack:
    """Launches of one job, with one folder.

    Attributes:
        used: the folder contains checkpoints of another run at first.
    """

    seed: int
    theme: str
    script: str
    save_interval: int
    eval_interval: int
    used: bool
    launches: tuple[Launch, ...]


class Draw:
    """Random choices of one attack."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.save_interval = self.random.choice([1, 2, 2, 3])
        self.eval_interval = self.random.choice([2, 3])
        self.script = self.random.choice([GPT, GPT, OWN])

    def attack(self, themes: dict[str, Callable[[Draw], list[Launch]]]) -> Attack:
        """Return the attack."""
        theme = self.random.choice(list(themes))
        launches = themes[theme](self)
        used = self.random.random() < 0.3 and not any(launch.change for launch in launches)
        return Attack(
            self.seed, theme, self.script, self.save_interval, self.eval_interval, used, tuple(launches)
        )

    # --- launches ---

    def launch(self, **settings: Any) -> Launch:
        """Return a launch without events."""
        layouts = OF_OWN if self.script == OWN else tuple(LAYOUTS)
        weights = [4 if LAYOUTS[name].ranks == 2 else 1 for name in layouts]
        (layout,) = self.random.choices(layouts, weights)
        wrapper, launcher = self.random.choice(WRAPPERS), self.random.choice([TORCHRUN, TORCHRUN, DEEPSPEED])
        launch = Launch(layout, launcher, wrapper)
        if "restarts" in settings:
            launch = replace(launch, launcher=TORCHRUN, every=self.random.choice([0, 1, 1, 1, 2]))
        return replace(launch, **settings)

    def again(self, before: Launch, same: float = 0.6, **settings: Any) -> Launch:
        """Return a launch that continues, with the same layout or another one."""
        other = self.launch(restarts=self.random.choice([0, 1]))
        if self.random.random() < same:
            other = replace(other, layout=before.layout)
        if "bf16" in (other.layout, before.layout):
            other = replace(other, layout=before.layout)  # rounding errors would hide differences
        every = other.every if other.restarts else 0
        return replace(other, **{"load": True, "steps": ALL_STEPS, "every": every, **settings})

    # --- events ---

    def moment(self, launch: Launch, start: int = 0, first: int = 1, last: int = 0) -> Moment:
        """Return a moment of a start; in a step from ``first`` to ``last``."""
        chance = self.random.random()
        step = self.random.randint(first, max(first, last or launch.steps))
        rank = self.random.randrange(launch.ranks)
        if chance < 0.25:
            delay_s = self.random.uniform(0, 0.15)
            return Moment(self.random.choice([LINE, LINE, SAVING]), start, step, 0, delay_s)
        if chance < 0.35:
            if self.random.random() < 0.5:
                return Moment(STARTED, start, delay_s=self.random.uniform(0, 4))
            return Moment(self.random.choice(IN_RESTART if start else IN_START), start, 0, rank)
        if chance < 0.42 and last in (0, launch.steps):
            return Moment("end", start, 0, rank)
        point = self.random.choice(self.random.choice([IN_STEP, IN_SAVE]))
        if point in IN_SAVE:
            due = [n for n in range(step, launch.steps) if n % self.save_interval == 0]
            step = (*due, launch.steps)[0]
        if point == "evaluate":
            step = 0
        return Moment(point, start, step, 0 if point in ON_RANK_0 else rank)

    def kill(self, launch: Launch, target: str = "rank") -> Deed:
        """Return a deadly signal to a process; instead of one rank, sometimes to all."""
        if target == "rank" and self.random.random() < 0.1:
            target = "ranks"
        return Deed(self.random.choice(DEADLY), target, self.random.randrange(launch.ranks))

    def disturb(self, launch: Launch, *targets: str) -> Deed:
        """Return a signal that no process should mind."""
        target = self.random.choice(targets or ("rank",))
        signal = self.random.choice(HARMLESS) if target == "rank" else "STOP"
        stopped_s = self.random.uniform(0.2, 2.0)
        return Deed(signal, target, self.random.randrange(launch.ranks), stopped_s if signal == "STOP" else 0)

    def kills(self, launch: Launch, count: int) -> tuple[Event, ...]:
        """Return a kill in each of the first starts, and sometimes a signal that no process should mind."""
        firsts = sorted(self.random.sample(range(1, launch.steps + 1), count))
        events = []
        for start, first in enumerate(firsts):
            moment = self.moment(launch, start, first)
            deeds = (self.kill(launch),)
            if self.random.random() < 0.2:
                deeds += (self.kill(launch),)
            events.append(Event(moment, deeds))
        if self.random.random() < 0.3:
            moment = Moment(LINE, 0, self.random.randint(1, firsts[0]), 0, 0.0)
            events.insert(0, Event(moment, (self.disturb(launch, "rank", "keeper", "launcher"),)))
        return tuple(events)


def _ranks(draw: Draw) -> list[Launch]:
    count = draw.random.choice([1, 1, 2, 3])
    launch = draw.launch(restarts=count + draw.random.choice([0, 1]))
    launches = [replace(launch, events=draw.kills(launch, count))]
    return launches + ([draw.again(launch)] if draw.random.random() < 0.2 else [])


def _keeper(draw: Draw) -> list[Launch]:
    launch = draw.launch(restarts=2, every=draw.random.choice([1, 1, 2]))
    moment = draw.moment(launch)
    deeds = [draw.kill(launch, "keeper")]
    later: list[Event] = []
    if draw.random.random() < 0.5:
        deeds.append(draw.kill(launch))
    else:
        later = [Event(draw.moment(launch, 0, max(1, moment.step)), (draw.kill(launch),))]
    return [replace(launch, events=(Event(moment, tuple(deeds)), *later))]


def _disturbed(draw: Draw) -> list[Launch]:
    launch = draw.launch(**({"restarts": 1} if draw.random.random() < 0.5 else {}))
    targets = ("rank", "rank", "launcher", *(["keeper"] if launch.every else []))
    moments = [replace(draw.moment(launch), start=0) for _ in range(draw.random.choice([1, 2, 3]))]
    events = [
        Event(moment, (draw.disturb(launch, *targets),))
        for moment in moments
        if moment.point not in ("import", STARTED)  # a rank has no handler of SIGUSR1 yet
    ]
    return [replace(launch, events=tuple(events))]


def _launcher(draw: Draw) -> list[Launch]:
    launch = draw.launch(**({"restarts": 1} if draw.random.random() < 0.5 else {}))
    targets = ["launcher", "launcher", "group"]
    if launch.launcher == DEEPSPEED:
        targets.append("node launcher")
    target = draw.random.choice(targets)
    signal = draw.random.choice([*DEADLY, "USR1"])
    launch = replace(launch, events=(Event(draw.moment(launch), (Deed(signal, target),)),))
    return [launch, draw.again(launch)] if draw.random.random() < 0.6 else [launch]


def _workers(draw: Draw) -> list[Launch]:
    draw.script = OWN
    launch = draw.launch(restarts=1)
    launch = replace(launch, wrapper=draw.random.choice([launch.wrapper, "shell", "setsid"]))
    target = draw.random.choice(["worker", "worker", "wrapper"] if launch.wrapper else ["worker"])
    deed = Deed(draw.random.choice(DEADLY), target, draw.random.choice([0, launch.ranks - 1]))
    return [replace(launch, events=(Event(draw.moment(launch), (deed,)),))]


def _exhausted(draw: Draw) -> list[Launch]:
    restarts = draw.random.choice([0, 1, 1, 2])
    launch = draw.launch(restarts=restarts)
    launch = replace(launch, every=launch.every if restarts else 0, events=draw.kills(launch, restarts + 1))
    return [launch, draw.again(launch)]


def _sizes(draw: Draw) -> list[Launch]:
    launch = draw.launch()
    if draw.random.random() < 0.7:
        launch = replace(launch, events=draw.kills(launch, 1))
    launches = [launch, draw.again(launch, same=0.0)]
    if draw.random.random() < 0.3:
        again = launches[1]
        again = replace(again, restarts=1, every=draw.random.choice([0, 1]))
        kill = draw.moment(again, 0, STEPS + 1)
        launches[1] = replace(again, events=(Event(kill, (draw.kill(again),)),))
    return launches


def _folder(draw: Draw) -> list[Launch]:
    launch = draw.launch(**({"restarts": draw.random.choice([1, 2])} if draw.random.random() < 0.6 else {}))
    what = draw.random.choice(IN_FOLDER)
    moment = draw.moment(launch, 0, 1)
    deeds = [Deed(what, "rank" if what == "full" else "", draw.random.randrange(launch.ranks))]
    if draw.random.random() < 0.5:
        deeds.append(draw.kill(launch))
        if launch.every and draw.random.random() < 0.7:
            deeds.append(draw.kill(launch, "keeper"))
    launches = [replace(launch, events=(Event(moment, tuple(deeds)),))]
    return launches if what == "replace" else [*launches, draw.again(launch, same=1.0, events=())]


def _latest(draw: Draw) -> list[Launch]:
    launch = draw.launch()
    if draw.random.random() < 0.5:
        launch = replace(launch, events=draw.kills(launch, 1))
    return [launch, draw.again(launch, change=draw.random.choice(BEFORE_LAUNCH))]


def _second(draw: Draw) -> list[Launch]:
    launch = draw.launch(**({"restarts": 1} if draw.random.random() < 0.5 else {}))
    moment = draw.moment(launch)
    while moment.point in (*IN_START, *OUTSIDE, "end"):
        moment = draw.moment(launch)
    events = [Event(moment, (Deed("second job", ""),))]
    if draw.random.random() < 0.5:
        events.append(Event(draw.moment(launch, 0, max(1, moment.step)), (draw.kill(launch),)))
    return [replace(launch, events=tuple(events))]


THEMES: dict[str, Callable[[Draw], list[Launch]]] = {
    "ranks": _ranks,
    "keeper": _keeper,
    "disturbed": _disturbed,
    "launcher": _launcher,
    "workers": _workers,
    "exhausted": _exhausted,
    "sizes": _sizes,
    "folder": _folder,
    "latest": _latest,
    "second": _second,
}


def _on_hosts(draw: Draw) -> list[Launch]:
    layouts = ["1f1b", "bitpipe", "bitpipe", "dp"] + ["tp_pp"] * (draw.script == GPT)
    layout = draw.random.choice(layouts)
    count = draw.random.choice([0, 1, 1, 2])
    launch = Launch(layout, restarts=count, every=draw.random.choice([0, 1, 1, 2]) if count else 0)
    second = draw.random.randrange(launch.ranks // 2, launch.ranks)  # the rendezvous is on the first host
    if count == 0:
        deeds = [
            draw.kill(launch),
            draw.kill(launch, "launcher"),
            Deed("lose host", "", second),
            Deed("cut", "", second),
        ]
        events: tuple[Event, ...] = (Event(draw.moment(launch), (draw.random.choice(deeds),)),)
    elif draw.random.random() < 0.4:
        moment = draw.moment(launch, 0, 2)
        while moment.point in (*IN_START, STARTED):
            moment = draw.moment(launch, 0, 2)
        deeds = [Deed("replace host", "", second)]
        events = (Event(moment, tuple(deeds)),)
    else:
        events = draw.kills(launch, count)
        if launch.every and draw.random.random() < 0.3:
            events = (Event(draw.moment(launch), (draw.kill(launch, "keeper"),)), *events)
    again = replace(launch, load=True, steps=ALL_STEPS, events=())
    return [replace(launch, events=events), *([again] if count == 0 else [])]


def draw_attack(seed: int, hosts: bool = False) -> Attack:
    """Return the attack of a seed, on one host or on two."""
    return Draw(seed).attack({"hosts": _on_hosts} if hosts else THEMES)
