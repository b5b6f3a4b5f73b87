"""Texts of the Python standard library: sources of its modules and documentation strings of the compiled ones."""

import importlib
import inspect
import sys
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

FOREIGN_FOLDERS = frozenset(("site-packages", "dist-packages", "__pycache__"))
FILLER_FOLDERS = frozenset(("test", "tests", "idle_test", "encodings"))
# Lines longer than this hold encoded data.
LONGEST_LINE = 1000
# readline writes to the terminal when imported, the others exist for CPython's own tests.
SKIPPED_MODULES = ("readline", "_test", "_xx", "xx")


def library_modules(root: Path, filler: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the modules below `root`: the library, or with `filler` its tests and codec tables."""
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if FOREIGN_FOLDERS.intersection(parts) or bool(FILLER_FOLDERS.intersection(parts)) != filler:
            continue
        # Written when Python was built: it names folders and compilers of that machine.
        if path.name.startswith("_sysconfigdata"):
            continue
        text = _read_source(path)
        if text.strip() and max(map(len, text.split("\n"))) <= LONGEST_LINE:
            yield "/".join(parts), text


def _read_source(path: Path) -> str:
    """The text in the encoding that the file declares; empty when that is wrong, as some tests have it."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""


def compiled_docs(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) with the documentation strings of modules that have no Python source."""
    built_in = set(sys.builtin_module_names)
    shared = {path.name.split(".")[0] for path in (root / "lib-dynload").glob("*.so")}
    for name in sorted(built_in | shared):
        if name.startswith(SKIPPED_MODULES):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                module = importlib.import_module(name)
        except ImportError:
            continue
        text = _module_docs(module)
        if text:
            yield f"{name}.so", text


def _module_docs(module: ModuleType) -> str:
    """Each documentation string of `module` once, under the name and signature of what it describes."""
    seen: set[str] = set()
    lines: list[str] = []

    def add(name: str, thing: object) -> None:
        text = inspect.getdoc(thing)
        if text and text not in seen:
            seen.add(text)
            lines.append(f"{name}{getattr(thing, '__text_signature__', None) or ''}\n\n{text}\n\n")

    add(module.__name__, module)
    for name, thing in sorted(vars(module).items()):
        if inspect.isclass(thing):
            add(f"class {name}", thing)
            for member, value in sorted(vars(thing).items()):
                if callable(value) or inspect.isdatadescriptor(value):
                    add(f"{name}.{member}", value)
        elif inspect.isroutine(thing):
            add(name, thing)
    return "\n".join(lines)
