"""Sources of documents: text files, folders, jsonl, the Python standard library.

Documents of a folder and of the standard library are sorted by the hash of their names. A split by position (the
last documents validate) is therefore random, and the same on every machine.
"""

import hashlib
import json
import logging
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ds_ext.data.stdlib import compiled_docs, library_modules
from ds_ext.errors import ConfigError

STDLIB = "stdlib"
STDLIB_BYTES = 10_000_000
LEAST_STDLIB_BYTES = 5_000_000
SNIFFED_BYTES = 8192
TEXT_PIECE_CHARACTERS = 16_384
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Documents that can be read more than once.

    Attributes:
        name: what the user asked for.
        documents: starts a new pass over the documents.
        num_bytes: size of the text, exact or (for jsonl) with its markup, for progress.
        details: what identifies this state of the source (sizes, dates, versions, hashes); JSON values.
    """

    name: str
    documents: Callable[[], Iterable[str]]
    num_bytes: int
    details: dict[str, Any] = field(default_factory=dict)


def open_source(name: str, json_key: str = "text") -> Source:
    """Open a source: "stdlib", or the path of a text file, a jsonl file or a folder.

    Raises:
        ConfigError: it does not exist or has no text.
    """
    if name == STDLIB:
        return _standard_library()
    path = Path(name)
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise ConfigError(
            f"--source: no such file or folder (got {name}). Give a text file, a .jsonl file, a folder, or {STDLIB}."
        )
    return _jsonl(path, json_key) if path.suffix in JSONL_SUFFIXES else _text_file(path)


def source_details(name: str) -> dict[str, Any]:
    """Return sizes and dates that change when the files of a path do; empty for the standard library."""
    path = Path(name)
    if name == STDLIB or not path.exists():
        return {}
    files = [path] if path.is_file() else list(_files_below(path))
    stats = [file.stat() for file in files]
    newest = max((stat.st_mtime_ns for stat in stats), default=0)
    return {"files": len(files), "bytes": sum(stat.st_size for stat in stats), "newest_mtime_ns": newest}


def hash_order(items: Iterable[T], name: Callable[[T], str]) -> list[T]:
    """`items` in the order of the sha256 of their names: shuffled, and the same everywhere."""
    return sorted(items, key=lambda item: hashlib.sha256(name(item).encode()).digest())


def read_text(path: Path) -> str | None:
    """The file's text, or None when it is not text in UTF-8."""
    content = path.read_bytes()
    if b"\0" in content[:SNIFFED_BYTES]:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _standard_library() -> Source:
    """Return the running Python's standard library, at least 10 MB where it has that much.

    Tests and codec tables read less like text, so they only fill up what the rest leaves of the wanted size.
    """
    root = Path(sysconfig.get_path("stdlib"))
    named = hash_order([*library_modules(root), *compiled_docs(root)], lambda document: document[0])
    total = sum(len(text.encode()) for _, text in named)
    for name, text in hash_order(library_modules(root, filler=True), lambda document: document[0]):
        if total >= STDLIB_BYTES:
            break
        named.append((name, text))
        total += len(text.encode())
    if total < LEAST_STDLIB_BYTES:
        raise ConfigError(
            f"the standard library in {root} has {total / 1e6:.1f} MB of text; {LEAST_STDLIB_BYTES / 1e6:.0f} MB "
            "are needed. Install its sources (Debian: libpython3-stdlib, libpython3.11-testsuite), or give "
            "text of your own with --source PATH."
        )
    texts = [text for _, text in named]
    details = {"python": platform.python_version(), "modules": len(texts)}
    return Source(STDLIB, lambda: texts, total, details)


def _text_file(path: Path) -> Source:
    """One text file, cut at blank lines into documents of 16 thousand characters or more."""
    text = read_text(path)
    if text is None or not text.strip():
        raise ConfigError(f"{path} is {'empty' if text is not None else 'not text in UTF-8'}")
    pieces = list(_pieces(text))
    return Source(str(path), lambda: pieces, path.stat().st_size, source_details(str(path)))


def _pieces(text: str) -> Iterator[str]:
    """Consecutive parts of `text` that end at a blank line once they are long enough; none is lost."""
    start = 0
    while start < len(text):
        border = text.find("\n\n", start + TEXT_PIECE_CHARACTERS)
        stop = len(text) if border < 0 else border + 2
        yield text[start:stop]
        start = stop


def _folder(folder: Path) -> Source:
    """All text files below `folder`, one document each; hidden and binary files are left out."""
    files = hash_order(_files_below(folder), lambda path: path.relative_to(folder).as_posix())

    def documents() -> Iterator[str]:
        for path in files:
            text = read_text(path)
            if text is None:
                logger.info("%s is not text in UTF-8 and is left out", path)
            elif text.strip():
                yield text

    if next(documents(), None) is None:
        raise ConfigError(f"{folder} has no text: none of its {len(files)} files is text in UTF-8")
    details = source_details(str(folder))
    return Source(str(folder), documents, details["bytes"], details)


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent) / name for name in files if not name.startswith("."))


def _jsonl(path: Path, key: str) -> Source:
    """One JSON object a line, its text in `key`; documents in the order of the file."""

    def documents() -> Iterator[str]:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _jsonl_text(line, key, f"{path}, line {number}")

    if next(documents(), None) is None:
        raise ConfigError(f"{path} is empty")
    return Source(str(path), documents, path.stat().st_size, source_details(str(path)))


def _jsonl_text(line: str, key: str, place: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"{place} is not JSON: {error}. A jsonl file has one object on each line."
        ) from error
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise ConfigError(f"{place} has no text under {key!r}, only: {keys}. Name the key with --json-key.")
    return text
