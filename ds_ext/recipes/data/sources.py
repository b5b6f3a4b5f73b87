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
    if name == STDLIB:
        return _standard_library()
    path = Path(name)
    if path.is_dir():
        return _folder(path, json_key)
    if not path.is_file():
        raise ConfigError(
            f"--source: no such file or folder (got {name}). Use a text file, a .jsonl file, a folder or {STDLIB}."
        )
    return _jsonl(path, json_key) if path.suffix in ROW_SUFFIXES else _text_file(path)


def source_details(name: str) -> dict[str, Any]:
    """Return the number, total size and newest change time of a path's files; empty for the standard library."""
    path = Path(name)
    if name == STDLIB or not path.exists():
        return {}
    files = [path] if path.is_file() else list(_files_below(path))
    stats = [file.stat() for file in files]
    newest = max((stat.st_mtime_ns for stat in stats), default=0)
    return {"files": len(files), "bytes": sum(stat.st_size for stat in stats), "newest_mtime_ns": newest}


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


def _text_file(path: Path) -> Source:
    """Return a text file, split at blank lines into documents of at least ``MIN_DOCUMENT_CHARACTERS`` characters."""
    text = read_text(path)
    if text is None or not text.strip():
        problem = "the file is empty" if text is not None else "the file is not UTF-8 text"
        raise ConfigError(f"--source: {problem} (got {path}). Use a file with UTF-8 text.")
    documents = list(_divided(text))
    return Source(str(path), lambda: documents, path.stat().st_size, source_details(str(path)))


def _divided(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        border = text.find("\n\n", start + MIN_DOCUMENT_CHARACTERS)
        stop = len(text) if border < 0 else border + 2
        yield text[start:stop]
        start = stop


def _folder(folder: Path, key: str) -> Source:
    """Return the text files under ``folder``, one document per file or row, excluding hidden and binary files."""
    files = _ordered_files(folder)
    has_rows_only = all(path.suffix in ROW_SUFFIXES for path in files)
    suffixes = ROW_SUFFIXES if has_rows_only else JSONL_SUFFIXES

    def documents() -> Iterator[str]:
        for path in files:
            if path.suffix in suffixes:
                yield from _row_texts(path, key)
                continue
            text = read_text(path)
            if text is None:
                logger.info("skipped, not UTF-8 text: %s", path)
            elif text.strip():
                yield text

    if next(documents(), None) is None:
        raise ConfigError(
            f"--source: the folder contains no UTF-8 text (got {folder} with {len(files)} files). Use a folder of "
            "text files."
        )
    details = source_details(str(folder))
    return Source(str(folder), documents, details["bytes"], details)


def row_files(path: Path) -> list[Path]:
    """Return the file ``path``, or the files with rows under a folder in the order of their hashes."""
    files = [path] if path.is_file() else _ordered_files(path)
    return [file for file in files if file.suffix in ROW_SUFFIXES]


def _ordered_files(folder: Path) -> list[Path]:
    return hash_order(_files_below(folder), lambda path: path.relative_to(folder).as_posix())


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent) / name for name in files if not name.startswith("."))


def _jsonl(path: Path, key: str) -> Source:
    if next(_row_texts(path, key), None) is None:
        raise ConfigError(
            f"--source: the file is empty (got {path}). Use a file with one JSON object per line."
        )
    size_bytes = path.stat().st_size
    return Source(str(path), lambda: _row_texts(path, key), size_bytes, source_details(str(path)))


def _row_texts(path: Path, key: str) -> Iterator[str]:
    return (_row_text(row, key, position) for position, row in read_rows(path))


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (file and line for errors, value) of every line that is not empty, or of every element of one array."""
    with path.open(encoding="utf-8-sig") as lines:
        is_array = lines.read(CHECKED_BYTES).lstrip().startswith("[")
        lines.seek(0)
        if is_array:
            try:
                rows = json.load(lines)
            except ValueError as error:
                raise ConfigError(
                    f"{path}: not a JSON array ({error}). Write one JSON object per line."
                ) from None
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
            return
        for number, line in enumerate(lines, 1):
            if line.strip():
                position = f"{path}, line {number}"
                try:
                    value = json.loads(line)
                except ValueError as error:
                    problem = f"{position}: not JSON ({error}). Write one JSON object per line."
                    raise ConfigError(problem) from error
                yield position, value


def _row_text(record: Any, key: str, position: str) -> str:
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        keys = f"the keys {', '.join(record)}" if isinstance(record, dict) else type(record).__name__
        raise ConfigError(
            f"{position}: no text under {key!r} (got {keys}). Set the key with --json-key, or add --format chat for "
            "messages."
        )
    return text
