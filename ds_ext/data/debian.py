"""English manuals of the Linux kernel and of Python from Debian's or Ubuntu's archive; needs apt, not root.

The text is licensed under GPL-2 (kernel) and the PSF licence (Python) and is no part of this project;
meta.json keeps the packages' versions and hashes.
"""

import gzip
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ds_ext.data.sources import Source, hash_order
from ds_ext.errors import ConfigError

# Each depends on the package of the release's own version, which holds the text.
META_PACKAGES = {"linux-doc": r"linux-doc-[\d.]+", "python3-doc": r"python3\.\d+-doc"}
TEXT_SUFFIXES = (".rst", ".txt", ".rst.gz", ".txt.gz")
DOWNLOAD_LIMIT_S = 900

logger = logging.getLogger(__name__)


def debian_source() -> Source:
    """Download, unpack and read the manuals (about 36 MB of text from 50 MB of packages).

    Raises:
        ConfigError: this is not a system with apt, or the archive cannot be reached.
    """
    for program in ("apt-get", "apt-cache", "dpkg-deb"):
        if shutil.which(program) is None:
            raise ConfigError(
                f"--source debian-docs needs Debian or Ubuntu: there is no {program} on this system. "
                "Use --source stdlib, or --source PATH with text of your own."
            )
    with tempfile.TemporaryDirectory(prefix="ds_ext_debian_") as folder:
        packages = _download(Path(folder))
        documents: dict[str, str] = {}
        details = []
        for package in packages:
            details.append(_describe(package))
            unpacked = Path(folder) / package.stem
            _run(["dpkg-deb", "-x", str(package), str(unpacked)], Path(folder))
            documents |= dict(_texts(unpacked))
    ordered = hash_order(documents.items(), lambda item: item[0])
    # Sphinx keeps a copy of each page that it has rendered.
    texts = list(dict.fromkeys(text for _, text in ordered))
    return Source(
        "debian-docs", lambda: texts, sum(len(text.encode()) for text in texts), {"packages": details}
    )


def _download(folder: Path) -> list[Path]:
    """Download the packages into `folder`; when apt knows none yet, with a fresh package list of our own."""
    try:
        return _download_with(folder, [])
    except ConfigError as error:
        logger.info("%s; trying with a fresh package list", error)
    options = [f"-oDir::State::lists={folder}/lists", f"-oDir::Cache={folder}/cache"]
    for name in ("lists", "cache"):
        (folder / name / ("partial" if name == "lists" else "archives/partial")).mkdir(parents=True)
    _run(["apt-get", *options, "update"], folder)
    return _download_with(folder, options)


def _download_with(folder: Path, options: Sequence[str]) -> list[Path]:
    names = [_versioned_package(name, pattern, folder, options) for name, pattern in META_PACKAGES.items()]
    _run(["apt-get", *options, "download", *names], folder)
    return sorted(folder.glob("*.deb"))


def _versioned_package(name: str, pattern: str, folder: Path, options: Sequence[str]) -> str:
    """linux-doc -> linux-doc-6.1; a release where `name` is no meta-package has the text in `name` itself."""
    depends = _run(["apt-cache", *options, "depends", name], folder)
    found = re.search(rf"Depends: ({pattern})$", depends, re.MULTILINE)
    return found.group(1) if found else name


def _run(command: Sequence[str], folder: Path) -> str:
    """Standard output of `command`; its error output becomes a ConfigError."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        result = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"`{' '.join(command)}` did not end within {DOWNLOAD_LIMIT_S} s") from error
    if result.returncode:
        last_lines = " ".join(result.stderr.strip().splitlines()[-3:])
        raise ConfigError(
            f"`{' '.join(command)}` failed: {last_lines}. Is the archive reachable? Use --source stdlib "
            "without network."
        )
    return result.stdout


def _describe(package: Path) -> dict[str, Any]:
    """Name, version and sha256 of a .deb file."""
    fields = _run(["dpkg-deb", "-f", str(package), "Package", "Version"], package.parent)
    values = dict(line.split(": ", 1) for line in fields.strip().splitlines())
    sha256 = hashlib.sha256(package.read_bytes()).hexdigest()
    return {"name": values["Package"], "version": values["Version"], "sha256": sha256}


def _texts(unpacked: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of the English pages below `unpacked`."""
    for path in unpacked.rglob("*"):
        name = path.relative_to(unpacked).as_posix()
        is_page = name.endswith(TEXT_SUFFIXES) and "/translations/" not in name
        if not is_page or path.is_symlink() or not path.is_file():
            continue
        content = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
        text = content.decode("utf-8", errors="replace")
        if text.strip():
            yield name, text
