"""Attacks on jobs over two hosts; ``python -m tests.attack --hosts`` draws more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attack.draw import draw_attack
from tests.attack.job import HOSTS, References
from tests.attack.run import run
from tests.hosts.cluster import Cluster
from tests.selection import extensive


@extensive
@pytest.mark.parametrize("seed", [1, 3, 5])
def test_an_attack_finds_no_fault(hosts: Callable[..., Cluster], tmp_path: Path, seed: int) -> None:
    """Signals with restarts, a host that is cut off, and a host that is replaced."""
    references = References(tmp_path / "references")
    outcome = run(draw_attack(seed, hosts=True), references, tmp_path / "attack", hosts(HOSTS))
    assert not outcome.faults, outcome.text
