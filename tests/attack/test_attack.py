"""Some attacks, and checks of the attacks themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.selection import EVERYTHING

from . import draw
from .draw import Attack, draw_attack
from .job import References
from .run import run

SEEDS = (1,)


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


@pytest.mark.skipif(not EVERYTHING, reason="make test-all")
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
    targets = ("rank", "keeper", "launcher", "node launcher", "group", "worker", "wrapper")
    assert {f"target {target}" for target in targets} <= drawn
    assert {f"wrapper {wrapper}" for wrapper in draw.WRAPPERS} <= drawn
    assert {f"change {change}" for change in draw.BEFORE_LAUNCH} <= drawn
    layouts = {launch.layout for attack in attacks for launch in attack.launches}
    assert layouts == set(draw.LAYOUTS)
    assert {feature for seed in SEEDS for feature in features(draw_attack(seed)) if "deed" in feature} == {
        feature for feature in drawn if "deed" in feature
    }
