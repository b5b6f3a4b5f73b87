"""Documents from files, folders, jsonl files and the standard library."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_ext.errors import ConfigError
from ds_ext.recipes.data import sources, stdlib
from ds_ext.recipes.data.sources import MIN_DOCUMENT_CHARACTERS, hash_order, open_source, source_details


def test_text_file_is_divided_at_blank_lines_without_loss(tmp_path: Path) -> None:
    paragraphs = [f"paragraph {i} " + "word " * (i % 300) + "\n\n" for i in range(400)]
    (tmp_path / "a.txt").write_text("".join(paragraphs))
    documents = list(open_source(str(tmp_path / "a.txt")).documents())
    assert "".join(documents) == "".join(paragraphs)
    assert len(documents) > 5
    for document in documents[:-1]:
        assert document.endswith("\n\n")
        assert MIN_DOCUMENT_CHARACTERS <= len(document) < MIN_DOCUMENT_CHARACTERS + 2000


def test_folder_gives_text_files_recursively_in_a_fixed_order(tmp_path: Path) -> None:
    texts = {"a.txt": "one", "sub/b.md": "two", "sub/deep/c": "drei ü", "d.rst": "four", "e.py": "five"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes("ü".encode("latin-1"))
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("hidden")

    source = open_source(str(tmp_path))

    assert list(source.documents()) == [texts[name] for name in hash_order(texts, str)]
    assert list(source.documents()) == list(source.documents())


def test_jsonl_reads_the_key_in_file_order(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"body": f"text {i}", "n": i}) for i in range(5)) + "\n\n")
    assert list(open_source(str(path), "body").documents()) == [f"text {i}" for i in range(5)]
    with pytest.raises(ConfigError, match=r"line 1\b.*'text'.*body, n.*--json-key"):
        open_source(str(path))
    path.write_text('{"text": "good"}\n{"text": \n')
    with pytest.raises(ConfigError, match="line 2"):
        list(open_source(str(path)).documents())


def test_rows_of_a_folder(tmp_path: Path) -> None:
    """One document per row of a shard, in the order of the names' hashes; a file with one array has rows too."""
    names = ("b.jsonl", "sub/a.ndjson", "c.json")
    rows = {name: [{"text": f"{name} {i}"} for i in range(3)] for name in names}
    (tmp_path / "sub").mkdir()
    for name in names[:2]:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    (tmp_path / "c.json").write_text(json.dumps(rows["c.json"], indent=1), encoding="utf-8-sig")
    expected = {name: [row["text"] for row in rows[name]] for name in names}
    assert list(open_source(str(tmp_path / "c.json")).documents()) == expected["c.json"]
    documents = list(open_source(str(tmp_path)).documents())
    assert documents == [text for name in hash_order(names, str) for text in expected[name]]
    with pytest.raises(ConfigError, match=r"'body'.*text"):
        open_source(str(tmp_path), "body")

    # Beside other files, .json is text.
    (tmp_path / "README.md").write_text("read me")
    expected |= {"c.json": [(tmp_path / "c.json").read_text(encoding="utf-8")], "README.md": ["read me"]}
    documents = list(open_source(str(tmp_path)).documents())
    assert documents == [text for name in hash_order((*names, "README.md"), str) for text in expected[name]]
    (tmp_path / "c.json").write_text("[1,")
    with pytest.raises(ConfigError, match=r"c\.json"):
        open_source(str(tmp_path / "c.json"))


@pytest.mark.parametrize(("name", "content"), [("a.txt", b" \n"), ("a.jsonl", b""), ("b.txt", b"\0\1")])
def test_files_without_text_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"--source.*{name}"):
        open_source(str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"--source.*absent"):
        open_source(str(tmp_path / "absent"))


def test_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\0")
    with pytest.raises(ConfigError, match=r"--source.*\b1\b"):
        open_source(str(tmp_path))


def test_details_change_with_the_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    before = source_details(str(tmp_path))
    assert before == source_details(str(tmp_path))
    os.utime(tmp_path / "a.txt", ns=(0, 5))
    changed = source_details(str(tmp_path))
    assert changed["newest_mtime_ns"] == 5
    (tmp_path / "b.txt").write_text("two")
    assert source_details(str(tmp_path))["files"] == 2


def test_stdlib_has_ten_megabytes_of_modules_and_compiled_docs() -> None:
    source = open_source("stdlib")
    documents = list(source.documents())
    assert sum(len(text.encode()) for text in documents) == source.num_bytes >= 10_000_000
    assert source.details["modules"] == len(documents) > 300
    assert any("class ArgumentParser" in text for text in documents), "a module's source"
    assert any(text.startswith("math\n") and "sqrt" in text for text in documents), "a compiled module"
    assert not any(" object at 0x7f" in text for text in documents), "an address of this process"
    assert documents == list(open_source("stdlib").documents())


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Replace the standard library by one module, one test and one installed package."""
    for folder in ("test", "site-packages", "encodings"):
        (tmp_path / folder).mkdir()
    (tmp_path / "module.py").write_text("library = 1\n")
    (tmp_path / "_sysconfigdata_x.py").write_text("built = 'here'\n")
    (tmp_path / "data.py").write_text(f"x = '{'A' * 2000}'\n")
    (tmp_path / "test" / "test_a.py").write_text("tested = 1\n")
    (tmp_path / "test" / "bad.py").write_bytes(b"# coding: utf-8\n\xff\n")
    (tmp_path / "site-packages" / "other.py").write_text("foreign = 1\n")
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(stdlib.sys, "builtin_module_names", ("math",))
    yield tmp_path


def test_small_stdlib_is_filled_with_tests_but_not_with_foreign_code(
    small_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MIN_STDLIB_BYTES", 10)
    documents = list(open_source("stdlib").documents())
    assert {"library = 1\n", "tested = 1\n"} < set(documents)
    assert len(documents) == 3
    monkeypatch.setattr(sources, "STDLIB_BYTES", 10)
    assert "tested = 1\n" not in list(open_source("stdlib").documents())


def test_too_small_stdlib_is_refused_with_its_size(small_library: Path) -> None:
    with pytest.raises(ConfigError, match=r"0\.0 MB.*5 MB.*--source PATH"):
        open_source("stdlib")
