"""Check of docstrings and wording for what a program can see: ``python -m tests.prose``, part of ``make check``.

Rules: a module has a docstring, and so has what docs/api.md lists, with its public methods, which name the errors of
ours that they raise; the first word of a docstring is no relative word; no banned phrase anywhere in code or docs.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADLESS = {
    *("as", "by", "how", "if", "none", "of", "that", "those", "what", "when"),
    *("where", "whether", "which", "who", "whose"),
}
BANNED = (
    *(
        "at leisure",
        "in one go",
        "nobody",
        "of its own",
        "of their own",
        "on the way",
        "so many",
        "such a",
        "such an",
    ),
    *("there and back", "way out", "ways out"),
)
ERRORS = frozenset(
    node.name
    for node in ast.parse((ROOT / "ds_ext" / "errors.py").read_text()).body
    if isinstance(node, ast.ClassDef)
)
DOCUMENTED = frozenset(re.findall(r"^::: (\S+)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def problems(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, problem) of one file of Python, Markdown or C++."""
    text = path.read_text()
    for number, line in enumerate(text.splitlines(), 1):
        for phrase in BANNED:
            if re.search(rf"\b{phrase}\b", line, re.IGNORECASE):
                yield number, f"the phrase {phrase!r}"
    if path.suffix == ".py":
        tree = ast.parse(text)
        yield from _docstring_problems(tree, 1, "module", public=bool(tree.body))
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield from _definition_problems(tree, name, documented=False)


def _definition_problems(parent: ast.AST, prefix: str, documented: bool) -> Iterator[tuple[int, str]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, Definition):
            name = f"{prefix}.{node.name}"
            public = name in DOCUMENTED or (documented and not node.name.startswith("_"))
            yield from _docstring_problems(
                node, node.lineno, node.name, public=public and not _is_trivial(node)
            )
            yield from _definition_problems(node, name, public and isinstance(node, ast.ClassDef))
        else:
            yield from _definition_problems(node, prefix, documented)


def _docstring_problems(
    node: Definition | ast.Module, line: int, name: str, *, public: bool
) -> Iterator[tuple[int, str]]:
    docstring = ast.get_docstring(node)
    if docstring is None:
        if public:
            yield line, f"{name}: no docstring"
        return
    first = re.match(r"\W*(\w+)", docstring)
    if first and first[1].lower() in HEADLESS:
        yield line, f"{name}: the docstring starts with {first[1]!r}"
    if public and not isinstance(node, ast.ClassDef | ast.Module):
        for error in sorted(set(_raised(node)) - set(re.findall(r"\w+", docstring))):
            yield line, f"{name}: the docstring does not name {error}"


def _raised(node: ast.AST) -> Iterator[str]:
    """Yield the names of our errors that a function raises itself, not in a function inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call):
            function = child.exc.func
            if isinstance(function, ast.Name) and function.id in ERRORS:
                yield function.id
        if not isinstance(child, Definition | ast.Lambda):
            yield from _raised(child)


def _is_trivial(node: Definition) -> bool:
    """Return whether a definition implements what its base documents, or is a stub of a Protocol."""
    if isinstance(node, ast.ClassDef):
        return False
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    stub = len(node.body) == 1 and ast.unparse(node.body[0]) == "..."
    return stub or "overload" in decorators or "override" in decorators


def main(paths: list[str]) -> int:
    """Print every problem in the files of ``paths`` (folders: all below). Returns 1 if there is one."""
    files = [
        file
        for path in map(Path, paths)
        for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
        if file.suffix in (".py", ".md", ".hpp", ".cpp") and file != Path(__file__)
    ]
    found = [(file, *problem) for file in files for problem in problems(file.resolve())]
    for file, line, problem in found:
        print(f"{file}:{line}: {problem}")
    print(f"{len(files)} files, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(
        main(
            sys.argv[1:]
            or [
                "ds_ext",
                "benchmarks",
                "docs",
                "README.md",
                "CHANGELOG.md",
                "kernels",
                "examples",
                "train_gpt.py",
                "train_bert.py",
            ]
        )
    )
