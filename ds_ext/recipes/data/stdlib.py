"""Text from the Python standard library: source code of Python modules and docstrings of compiled modules."""

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
MAX_LINE_CHARACTERS = 1000  # longer lines contain encoded data
# Importing readline writes to the terminal. The others exist for CPython's tests.
SKIPPED_MODULES = ("readline", "_test", "_xx", "xx")


def library_modules(root: Path, filler: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the library modules under ``root``, or, with ``filler``, of its tests and codec tables."""
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if FOREIGN_FOLDERS.intersection(parts) or bool(FILLER_FOLDERS.intersection(parts)) != filler:
            continue
        # This file is generated at build time and contains the paths and compilers of the build machine.
        if path.name.startswith("_sysconfigdata"):
            continue
        text = _read_source(path)
        if text.strip() and max(map(len, text.split("\n"))) <= MAX_LINE_CHARACTERS:
            yield "/".join(parts), text


def _read_source(path: Path) -> str:
    """Return the text in the declared encoding; empty if the encoding is wrong, as in some tests of CPython."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""


def compiled_docs(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, docstrings) of the modules without Python source."""
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
    """Return the distinct docstrings of a module, each with the name and signature of its object."""
    entries: dict[str, str] = {}  # docstring -> its text with the first object that has it
    for name, member in _documented_members(module):
        docstring = inspect.getdoc(member)
        if docstring and docstring not in entries:
            signature = getattr(member, "__text_signature__", None) or ""
            entries[docstring] = f"{name}{signature}\n\n{docstring}\n\n"
    return "\n".join(entries.values())


def _documented_members(module: ModuleType) -> Iterator[tuple[str, object]]:
    yield module.__name__, module
    for name, member in sorted(vars(module).items()):
        if inspect.isclass(member):
            yield f"class {name}", member
            for attribute, value in sorted(vars(member).items()):
                if callable(value) or inspect.isdatadescriptor(value):
                    yield f"{name}.{attribute}", value
        elif inspect.isroutine(member):
            yield name, member
