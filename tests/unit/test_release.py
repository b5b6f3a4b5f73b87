"""Release script, version range of CI and pre-commit hooks: what they refuse and that they match their sources."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
VERSION = "9.8.7"


def git(repository: Path, *words: str) -> str:
    author = (
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "tag.gpgsign=false",
    )
    done = subprocess.run(
        ["git", *author, *words], cwd=repository, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the script and a version that can be released."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "release", tmp_path / ".ci")
    (tmp_path / "ds_ext").mkdir()
    (tmp_path / "ds_ext" / "__init__.py").write_text(f'__version__ = "{VERSION}"\n')
    (tmp_path / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## {VERSION} - 2031-02-03\n\n## 0.1.0 - 2030-01-01\n"
    )
    (tmp_path / "CITATION.cff").write_text(f"version: {VERSION}\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "Begin")
    return tmp_path


def release(repository: Path) -> tuple[int, str]:
    done = subprocess.run([".ci/release", "--check"], cwd=repository, capture_output=True, text=True)
    return done.returncode, done.stderr


def test_a_clean_tree_with_a_dated_section_is_accepted(repository: Path) -> None:
    assert release(repository) == (0, "")
    assert git(repository, "tag") == ""


def changed_file(repository: Path) -> None:
    (repository / "CITATION.cff").write_text(f"version: {VERSION}\n# more\n")


def new_file(repository: Path) -> None:
    (repository / "new.py").touch()


def tagged(repository: Path) -> None:
    git(repository, "tag", "-a", f"v{VERSION}", "-m", "released")


def committed(name: str, text: str) -> Callable[[Path], None]:
    def change(repository: Path) -> None:
        (repository / name).write_text(text)
        git(repository, "commit", "-qam", "Change")

    return change


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (changed_file, "working tree"),
        (new_file, "working tree"),
        (tagged, "version"),
        (committed("CHANGELOG.md", f"## {VERSION} - unreleased\n"), "CHANGELOG.md"),
        (committed("CHANGELOG.md", "## 0.1.0 - 2030-01-01\n"), "CHANGELOG.md"),
        (committed("CITATION.cff", "version: 0.1.0\n"), "CITATION.cff"),
        (committed("ds_ext/__init__.py", "\n"), "ds_ext/__init__.py"),
    ],
)
def test_what_cannot_be_released_is_refused(
    repository: Path, change: Callable[[Path], None], key: str
) -> None:
    change(repository)
    status, error = release(repository)
    assert status == 1 and error.startswith(f"error: {key}: ")


@pytest.mark.parametrize(("end", "accepts"), [("oldest", "2.9.1"), ("newest", "2.15.0")])
def test_the_range_of_torch_is_that_of_setup_py(end: str, accepts: str) -> None:
    from packaging.requirements import Requirement

    command = [sys.executable, ".ci/torch_range.py", end]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (lowest,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "setup.py").read_text())
    requirement = Requirement(text.strip())
    assert requirement.name == "torch" and accepts in requirement.specifier
    assert (f"{lowest}.0" in requirement.specifier) == (end == "oldest")


def test_hooks_before_a_commit_run_the_tools_of_make_check() -> None:
    target = (ROOT / "Makefile").read_text().split("\ncheck:")[1].split("\n\n")[0]
    tools = re.findall(r"\$\(bin\)/(python -m \S+|\S+(?: (?:format|check))?)", target)
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    entries = [hook["entry"].removeprefix(".venv/bin/") for repo in config["repos"] for hook in repo["hooks"]]
    assert len(tools) == len(entries) == 6
    assert all(any(entry.startswith(tool) for entry in entries) for tool in tools), (tools, entries)
