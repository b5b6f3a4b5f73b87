"""Fixtures shared by all tests."""

from __future__ import annotations

import compileall
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Read by torch and DeepSpeed when they are imported, here and in the fork server of the ranks.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("FUZZ_PATIENCE", "4")  # of jobs beside the tests of other processes

import tests.reduced_host.sitecustomize as reduced_host
from tests.ranks import RankPool, Ranks
from tests.selection import covering

# Even if PYTHONDONTWRITEBYTECODE is set. Otherwise each process that a test starts compiles 200 modules, and each run
# compiles all tests.
for folder in ("ds_ext", "benchmarks", "tests"):
    compileall.compile_dir(Path(__file__).parents[1] / folder, quiet=2)
writes_bytecode, sys.dont_write_bytecode = not sys.dont_write_bytecode, False

if reduced_host.WITHOUT:  # also in the processes that the tests start
    search = [str(Path(reduced_host.__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, search))

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")


# Most tests in these folders start processes and are slow; those marked as quick are the exception.
SLOW_FOLDERS = ("adopters", "browser", "distributed", "fuzz", "gpu", "launch")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests as slow by their folder, and reduce the products of their parameters."""
    cases = defaultdict[Any, list[pytest.Function]](list)
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in SLOW_FOLDERS:
            if item.get_closest_marker("quick") is None:
                item.add_marker(pytest.mark.slow)
            if isinstance(item, pytest.Function):
                cases[item.parent, item.originalname].append(item)
    selected = {item for group in cases.values() for item in covering(group, 1, _values)}
    dropped = {item for group in cases.values() for item in group} - selected
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


def pytest_collection_finish() -> None:
    """Write no bytecode of what tests import, unless the environment allows it."""
    sys.dont_write_bytecode = not writes_bytecode


def _values(item: pytest.Function) -> tuple[Any, ...]:
    """Return the identities of the values of each ``parametrize`` of a test."""
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    lists = [name.replace(" ", "").split(",") if isinstance(name, str) else name for name in names]
    values = item.callspec.params if names else {}
    return tuple(tuple(id(values[name]) for name in each) for each in lists) or (0,)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print in one line what was skipped and why."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[text.removeprefix("Skipped: ")] += 1
    if reasons:
        listed = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skipped: {listed}")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(4).run(fn, *args)` calls fn(rank, *args) on four gloo ranks; see tests/ranks.py."""
    pools = Ranks()
    yield pools
    pools.close()


@pytest.fixture
def ranks2(ranks: Ranks) -> RankPool:
    """Two gloo ranks."""
    return ranks(2)


@pytest.fixture
def ranks4(ranks: Ranks) -> RankPool:
    """Four gloo ranks."""
    return ranks(4)


@pytest.fixture
def ranks8(ranks: Ranks) -> RankPool:
    """Eight gloo ranks."""
    return ranks(8)
