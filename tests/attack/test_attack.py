"""Some attacks, and checks of the attacks themselves."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.selection import extensive

from . import draw
from .draw import GPT, Attack, Launch, draw_attack
from .events import Happened, Scene
from .job import Folder, Reference, References
from .judge import Judge, incomplete
from .run import run

SEEDS = (2728, 5743, 6826, 10973, 11004, 13331, 13539, 17295, 22167)
SEEDS += (23669, 24415, 26124, 29442, 29995, 31450, 33091, 38189, 39983)


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Return the undisturbed runs."""
    return References(tmp_path_factory.mktemp("attacks"))


def features(attack: Attack) -> Iterator[str]:
    """Yield what an attack consists of."""
    yield f"theme {attack.theme}"
    for launch in attack.launches:
        yield f"launcher {launch.launcher}"
        yield f"wrapper {launch.wrapper}"
        yield f"change {launch.change}"
        for event in launch.events:
            yield f"moment {event.moment.point}"
            for deed in event.deeds:
                yield f"deed {deed.what}"
                yield f"target {deed.target}"


@extensive
@pytest.mark.parametrize("seed", SEEDS)
def test_an_attack_finds_no_fault(references: References, tmp_path: Path, seed: int) -> None:
    outcome = run(draw_attack(seed), references, tmp_path / "attack")
    assert not outcome.faults, outcome.text


@pytest.mark.quick
def test_attacks_are_drawn_from_everything() -> None:
    attacks = [draw_attack(seed) for seed in range(1000)]
    assert attacks == [draw_attack(seed) for seed in range(1000)]
    drawn = {feature for attack in attacks for feature in features(attack)}
    assert {f"theme {theme}" for theme in draw.THEMES} <= drawn
    points = (*draw.IN_START, *draw.IN_RESTART, *draw.IN_STEP, *draw.IN_SAVE, *draw.OUTSIDE, "end")
    assert {f"moment {point}" for point in points} <= drawn
    deeds = (*draw.DEADLY, *draw.HARMLESS, *draw.IN_FOLDER, "second job")
    assert {f"deed {deed}" for deed in deeds} <= drawn
    targets = ("rank", "ranks", "keeper", "launcher", "node launcher", "group", "worker", "wrapper")
    assert {f"target {target}" for target in targets} <= drawn
    assert {f"wrapper {wrapper}" for wrapper in draw.WRAPPERS} <= drawn
    assert {f"change {change}" for change in draw.BEFORE_LAUNCH} <= drawn
    layouts = {launch.layout for attack in attacks for launch in attack.launches}
    assert layouts == set(draw.LAYOUTS)
    kinds = ("theme", "deed", "target")
    of_seeds = {feature for seed in SEEDS for feature in features(draw_attack(seed))}
    assert {f for f in drawn if f.startswith(kinds)} <= of_seeds


STEP_1, STEP_2, STEP_3 = (f"step {step}/6 | loss 1.0000 | lr 1" for step in (1, 2, 3))
ENDED = "error: a reason"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("lines", "code", "faults"),
    [
        ((STEP_1, STEP_2, ENDED), 1, 0),
        ((STEP_1, STEP_3, ENDED), 1, 1),
        ((STEP_1, STEP_2, STEP_1, ENDED), 1, 1),
        (
            (
                STEP_1,
                STEP_2,
                "recovered at step 1 from host memory (restart 1): 1 step lost; ...",
                STEP_2,
                ENDED,
            ),
            1,
            0,
        ),
        (
            (
                STEP_1,
                STEP_2,
                "recovered at step 1 from host memory (restart 1): 3 steps lost; ...",
                STEP_2,
                ENDED,
            ),
            1,
            1,
        ),
        (
            (
                STEP_1,
                STEP_2,
                "recovery: restart 1 found no snapshots of all ranks after 2 complete steps",
                STEP_1,
                ENDED,
            ),
            1,
            0,
        ),
        ((STEP_1, STEP_2.replace("1.0", "1.1"), ENDED), 1, 1),
        ((STEP_1, STEP_2), 1, 1),  # no reason
        ((STEP_1, STEP_2), 0, 2),  # not the last step, and no checkpoint
        ((STEP_1, "step 1: saved saved/step_1", STEP_2, ENDED), 1, 1),  # it is missing
        ((STEP_1, "resumed from saved/step_2 at step 2", STEP_3, ENDED), 1, 1),  # no launch has trained it
        ((STEP_1, '  File "/x/ds_ext/engine.py", line 1, in f', ENDED), 1, 1),
    ],
)
def test_the_judge_finds_faults(tmp_path: Path, lines: tuple[str, ...], code: int, faults: int) -> None:
    launch = Launch("1f1b")
    attack = Attack(0, "ranks", GPT, 2, 2, False, (launch,))
    references = References(tmp_path)
    references.add(GPT, "1f1b", Reference([1.0] * 9, tmp_path))
    judge = Judge(attack, Scene(Folder(tmp_path / "attack"), lambda: tmp_path), references)
    job: Any = SimpleNamespace(lines=lines, control=tmp_path / "launch_0.points", cluster=None)
    happened = Happened(launch, job)
    happened.code = code
    # A launcher that is killed is no reason to survive.
    happened.deeds = [(draw.Deed("KILL", "launcher"), draw.Moment(draw.LINE), 1)]
    judge.launch(happened)
    assert len(judge.faults) == faults, judge.faults


@pytest.mark.quick
def test_incomplete_checkpoints_are_found(tmp_path: Path) -> None:
    file = tmp_path / "layer"
    file.write_bytes(b"weights")
    record = {"bytes": 7, "crc32": zlib.crc32(b"weights")}
    assert len(list(incomplete(tmp_path))) == 1
    (tmp_path / "ds_ext.json").write_text(json.dumps({"files": {"layer": record}}))
    assert not list(incomplete(tmp_path))
    for content in (b"weight", b"Weights"):
        file.write_bytes(content)
        assert len(list(incomplete(tmp_path))) == 1
    file.unlink()
    assert len(list(incomplete(tmp_path))) == 1
