"""Sources of documents: text files, folders, jsonl files and the Python standard library.

Documents of a folder and of the standard library are sorted by the hash of their names. A split by position is
therefore random, and the same on every machine.
"""

import hashlib
import json
import logging
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...errors import ConfigError
from .stdlib import compiled_docs, library_modules

STDLIB = "stdlib"
STDLIB_BYTES = 10_000_000
MIN_STDLIB_BYTES = 5_000_000
CHECKED_BYTES = 8192  # a null byte among these marks a binary file
MIN_DOCUMENT_CHARACTERS = 16_384
# Files with rows. In a folder with other files, .json is text, such as settings among source code.
JSONL_SUFFIXES = (".jsonl", ".ndjson")
ROW_SUFFIXES = (*JSONL_SUFFIXES, ".json")

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Documents that can be read several times.

    Attributes:
        name: value of ``--source``.
        documents: function that starts a new pass over the documents.
        num_bytes: size of the text, or of the whole jsonl file; used for progress.
        details: JSON values that identify the current content: sizes, dates, versions.
    """

    name: str
    documents: Callable[[], Iterable[str]]
    num_bytes: int
    details: dict[str, Any]


def open_source(name: str, json_key: str = "text") -> Source:
    """Open a text file, a file with rows, a folder of these, or the standard library."""
    if name == STDLIB:
        return _standard_library()
    path = Path(name)
    if not path.exists():
        raise ConfigError(
            f"--source: no such file or folder (got {name}). Use a text file, a .jsonl file, a folder or {STDLIB}."
        )
    files = _files(path)
    has_rows_only = all(file.suffix in ROW_SUFFIXES for file in files)
    suffixes = ROW_SUFFIXES if has_rows_only else JSONL_SUFFIXES

    def documents() -> Iterator[str]:
        for file in files:
            if file.suffix in suffixes:
                for position, row in read_rows(file):
                    with located(position):
                        text = _row_text(row, json_key)
                    yield text
            elif (text := read_text(file)) is None:
                logger.info("skipped, not UTF-8 text: %s", file)
            elif text.strip():
                yield from _divided(text) if path.is_file() else (text,)

    if next(documents(), None) is None:
        raise ConfigError(
            f"--source: no UTF-8 text (got {path}, {len(files)} files). Use a text file, a file with one JSON object "
            "per line, or a folder of these."
        )
    details = source_details(name)
    return Source(str(path), documents, details["bytes"], details)


def source_details(name: str) -> dict[str, Any]:
    """Return the number, total size and newest change time of a path's files; empty for the standard library."""
    path = Path(name)
    if name == STDLIB or not path.exists():
        return {}
    stats = [file.stat() for file in _files(path)]
    newest = max((stat.st_mtime_ns for stat in stats), default=0)
    return {"files": len(stats), "bytes": sum(stat.st_size for stat in stats), "newest_mtime_ns": newest}


def hash_order(items: Iterable[T], name: Callable[[T], str]) -> list[T]:
    """Return ``items`` sorted by the sha256 of their names: shuffled, and the same on every machine."""
    return sorted(items, key=lambda item: hashlib.sha256(name(item).encode()).digest())


def read_text(path: Path) -> str | None:
    """Return None unless the file is UTF-8 text."""
    content = path.read_bytes()
    if b"\0" in content[:CHECKED_BYTES]:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _standard_library() -> Source:
    """Return the standard library of the running Python. Tests and codec tables only fill up to ``STDLIB_BYTES``."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = hash_order([*library_modules(root), *compiled_docs(root)], lambda document: document[0])
    num_bytes = sum(len(text.encode()) for _, text in documents)
    for name, text in hash_order(library_modules(root, filler=True), lambda document: document[0]):
        if num_bytes >= STDLIB_BYTES:
            break
        documents.append((name, text))
        num_bytes += len(text.encode())
    if num_bytes < MIN_STDLIB_BYTES:
        raise ConfigError(
            f"--source {STDLIB}: {root} contains too little text (got {num_bytes / 1e6:.1f} MB, needs "
            f"{MIN_STDLIB_BYTES / 1e6:.0f} MB). Install the sources (Debian: libpython3-stdlib, "
            "libpython3.11-testsuite), or use your own text with --source PATH."
        )
    texts = [text for _, text in documents]
    details = {"python": platform.python_version(), "modules": len(texts)}
    return Source(STDLIB, lambda: texts, num_bytes, details)


def _divided(text: str) -> Iterator[str]:
    """Split a text file at blank lines into documents of at least ``MIN_DOCUMENT_CHARACTERS`` characters."""
    start = 0
    while start < len(text):
        border = text.find("\n\n", start + MIN_DOCUMENT_CHARACTERS)
        stop = len(text) if border < 0 else border + 2
        yield text[start:stop]
        start = stop


def row_files(path: Path) -> list[Path]:
    return [file for file in _files(path) if file.suffix in ROW_SUFFIXES]


def _files(path: Path) -> list[Path]:
    """Return the file ``path``, or the visible files under a folder in the order of their hashes."""
    if path.is_file():
        return [path]
    files: list[Path] = []
    for parent, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent) / name for name in names if not name.startswith(".")]
    return hash_order(files, lambda file: file.relative_to(path).as_posix())


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (file and line for errors, value) of every line that is not empty, or of every element of one array."""
    with path.open(encoding="utf-8-sig") as lines:
        is_array = lines.read(CHECKED_BYTES).lstrip().startswith("[")
        lines.seek(0)
        if is_array:
            with located(str(path)):
                rows = _parsed_json(lines.read(), "a JSON array")
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
            return
        for number, line in enumerate(lines, 1):
            if line.strip():
                position = f"{path}, line {number}"
                with located(position):
                    value = _parsed_json(line, "JSON")
                yield position, value


@contextmanager
def located(position: str) -> Iterator[None]:
    """Put a file and line before the text of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{position}: {error}") from error


def _parsed_json(text: str, kind: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"not {kind} ({error}). Write one JSON object per line.") from error


def _row_text(record: Any, key: str) -> str:
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        keys = f"the keys {', '.join(record)}" if isinstance(record, dict) else type(record).__name__
        raise ConfigError(
            f"no text under {key!r} (got {keys}). Set the key with --json-key, or add --format chat for messages."
        )
    return text
