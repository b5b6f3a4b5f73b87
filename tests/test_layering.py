"""Import rules: which folder of ds_ext may import which, and no cycle between files."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EVERYTHING = {"*"}

# Unit -> its allowed imports: other units by name, other packages as "package:", "*" for everything. A unit is a
# folder or module directly in ds_ext, or a deeper one that has rules of its own.
ALLOWED: dict[str, set[str]] = {
    "__init__": {"hf", "engine", "observe"},
    "__main__": EVERYTHING,
    "errors": set(),
    "environment": {"psutil:"},
    "gpus": set(),
    "pipe_schedules": {"errors"},
    "pipe_schedules/bridge": {"errors", "pipe_schedules", "deepspeed:"},
    "config": {"errors", "pipe_schedules", "parallel", "hjson:", "pydantic:"},
    "config/schedulers": {"errors", "torch:"},
    "config/deepspeed_check": {
        *("errors", "config", "config/schedulers", "pydantic:", "torch:", "deepspeed:"),
    },
    "parallel": {"errors", "pipe_schedules"},
    "model": {"errors", "parallel"},
    "planner": {
        *("errors", "pipe_schedules", "config", "parallel", "comm/rounds", "model"),
    },
    "planner/solver": {"errors", "pipe_schedules", "planner", "ortools:"},
    "comm/host_watch": {"environment", "errors"},
    "comm/rounds": set(),
    "comm/gloo_cuda": {"torch:"},
    "comm": {"environment", "errors", "comm/host_watch", "comm/rounds", "torch:"},
    "launch": {"environment", "errors", "comm/host_watch", "torch:"},
    "tensor_parallel": {"errors", "comm/gloo_cuda", "torch:"},
    "experts": {"tensor_parallel", "torch:"},
    "recipes/models": {
        *(
            "errors",
            "parallel",
            "model",
            "tensor_parallel",
            "torch:",
        ),
        *("deepspeed.pipe:", "deepspeed.runtime.pipe.module:"),
    },
    "recipes": set(),
    "recipes/data": {
        "environment",
        "errors",
        "recipes/data/finetune",
        "model",
        "numpy:",
        "torch:",
        "megatron:",
        "tokenizers:",
        "transformers:",
        "sentencepiece:",
        "rich:",
    },
    "recipes/data/finetune": {
        *("environment", "errors", "hf/folder", "recipes/convert", "recipes/data", "recipes/models"),
    },
    "observe/trace": {"errors", "pipe_schedules"},
    "observe/run_record": {"environment"},
    "observe/report": {"errors", "pipe_schedules", "observe/trace", "observe/run_record"},
    "observe": {"errors", "gpus", "parallel", "observe/run_record", "torch:"},
    "engine/types": set(),
    "engine/wrappers": {"engine/types"},
    "engine/checkpoint/folder": {"errors", "engine/types", "engine/wrappers"},
    "engine": {
        *("errors", "pipe_schedules", "pipe_schedules/bridge", "config", "parallel", "planner", "comm"),
        *("environment", "config/deepspeed_check", "config/schedulers"),
        *(
            "comm/host_watch",
            "launch",
            "tensor_parallel",
            "experts",
            "observe/trace",
            "engine/checkpoint/folder",
        ),
        *("engine/types", "engine/wrappers"),
        *("numpy:", "packaging.version:", "torch:", "deepspeed:"),
    },
    "hf": {
        *("errors", "engine", "engine/wrappers", "experts", "hf/folder", "tensor_parallel"),
        *("torch:", "deepspeed.pipe:", "transformers:", "safetensors:", "peft:"),
    },
    "hf/folder": {
        *("errors", "engine", "model", "torch:", "safetensors:"),
    },
    "recipes/convert": {
        *(
            "errors",
            "engine",
            "engine/checkpoint/folder",
            "engine/wrappers",
            "recipes/models",
            "model",
            "recipes/data",
        ),
        "hf/folder",
        "recipes/convert/decoder",
        *("torch:", "safetensors:"),
    },
    "recipes/convert/decoder": {
        *(
            "errors",
            "engine",
            "engine/checkpoint/folder",
            "hf",
            "hf/folder",
            "recipes/convert",
            "torch:",
            "transformers:",
            "peft:",
        ),
    },
    "recipes/training": {
        *("__init__", "errors", "pipe_schedules", "config", "parallel", "planner", "launch", "engine"),
        *(
            "recipes/convert",
            "hf",
            "hf/folder",
            "engine/checkpoint/folder",
            "recipes/models",
            "model",
            "tensor_parallel",
        ),
        *("model", "recipes/data", "environment", "observe", "torch:"),
    },
    "cli": {
        "environment",
        "errors",
        "gpus",
        "pipe_schedules",
        "planner",
        "planner/solver",
        "model",
        "parallel",
        "comm",
        "launch",
        "observe/trace",
        "observe/report",
        "torch:",
    },
}


def unit_of(parts: tuple[str, ...]) -> str:
    """Return the deepest unit of a module path below ds_ext, as ("pipe_schedules", "bridge")."""
    units = ("/".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next((unit for unit in units if unit in ALLOWED), parts[0] if parts else "__init__")


def imports(path: Path, *, for_types: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import at any depth; with ``for_types`` also those of the type checker."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    tree = ast.parse(path.read_text())
    unread = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not for_types
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module.split(".")[0] == "ds_ext":
                # `from ds_ext.a import b`: b may be a module, so the longer name decides.
                for alias in node.names:
                    yield node.lineno, f"{module}.{alias.name}"
            else:
                yield node.lineno, module


def refused(unit: str, name: str) -> bool:
    allowed = ALLOWED[unit]
    parts = tuple(name.split("."))
    if "*" in allowed or parts[0] in sys.stdlib_module_names:
        return False
    if parts[0] == "ds_ext":
        target = unit_of(parts[1:])
        return target in ALLOWED and target != unit and target not in allowed
    return not any(
        f"{name}:".startswith(package) or name.startswith(f"{package[:-1]}.") for package in allowed
    )


def cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of two or more nodes that reach each other (strongly connected components)."""
    reach = {node: _reachable(edges, node) for node in edges}
    groups = {frozenset(other for other in reach[node] if node in reach.get(other, ())) for node in edges}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reachable(edges: Mapping[str, set[str]], start: str) -> set[str]:
    found, waiting = set[str](), [start]
    while waiting:
        for node in edges.get(waiting.pop(), set()) - found:
            found.add(node)
            waiting.append(node)
    return found


FILES = sorted((ROOT / "ds_ext").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_stay_within_the_layers(path: Path) -> None:
    unit = unit_of(path.relative_to(ROOT / "ds_ext").with_suffix("").parts)
    assert unit in ALLOWED, f"{unit} is a new unit: state its imports in ALLOWED"
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for line, name in imports(path)
        if refused(unit, name)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other() -> None:
    # A package's face (__init__.py) only re-exports its files, which may import each other through their own names.
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in FILES
        if path.name != "__init__.py"
    }
    edges = {
        module: {
            target
            for _, name in imports(path, for_types=True)
            for target in (name, name.rpartition(".")[0])
            if target in modules and target != module
        }
        for module, path in modules.items()
    }
    assert cycles(edges) == []


def test_cycles_are_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


@pytest.mark.parametrize(
    ("unit", "name", "expected"),
    [
        ("pipe_schedules", "torch", True),
        ("pipe_schedules", "ds_ext.errors.ScheduleError", False),
        ("pipe_schedules", "ds_ext.pipe_schedules.bridge", True),
        ("pipe_schedules", "json", False),
        ("config", "ds_ext.planner.auto.choose_for_job", True),
        ("config", "torch", True),
        ("comm", "deepspeed", True),
        ("recipes/models", "deepspeed.pipe", False),
        ("recipes/models", "deepspeed", True),
        ("recipes/models", "ds_ext.engine.engine", True),
        ("engine", "ds_ext.recipes.models.gpt", True),
        ("engine", "ds_ext.recipes.training.loop.Trainer", True),
        ("engine", "ds_ext.pipe_schedules.bridge.Schedule", False),
        ("recipes/training", "ds_ext.recipes.models.gpt", False),
    ],
)
def test_the_rule_itself(unit: str, name: str, expected: bool) -> None:
    assert refused(unit, name) is expected


def loaded_after(statement: str) -> set[str]:
    script = f"import sys; {statement}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "module", ["ds_ext", "ds_ext.config.job", "ds_ext.pipe_schedules", "ds_ext.model.config"]
)
def test_pure_imports_do_not_load_torch(module: str) -> None:
    roots = {name.split(".")[0] for name in loaded_after(f"import {module}")}
    assert not roots & {"torch", "deepspeed", "numpy"}


def test_reading_a_json_loads_no_planner() -> None:
    loaded = loaded_after("from ds_ext.config.job import load_config; load_config('configs/bitpipe.json')")
    assert not {name for name in loaded if name.startswith(("ds_ext.planner", "torch"))}


# Variables of launchers, which ds_ext.environment reads. launch/slurm.py, launch/launcher.py and an agent of `doctor`
# set some of them.
LAUNCHER_VARIABLES = (
    "WORLD_SIZE",
    "LOCAL_SIZE",
    "LOCAL_RANK",
    "CROSS_SIZE",
    "GROUP_RANK",
    "TORCHELASTIC_",
    "MASTER_PORT",
)
SETS_VARIABLES = ("launch/slurm.py", "launch/launcher.py", "cli/hosts/agent.py", "engine/start.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_environment_reads_proc_and_the_variables_of_launchers(path: Path) -> None:
    name = str(path.relative_to(ROOT / "ds_ext"))
    if name == "environment.py":
        return
    tree = ast.parse(path.read_text())
    texts = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names = {text for text in texts if "\n" not in text and " " not in text}
    assert not {text for text in names if text.startswith("/proc")}
    if name not in SETS_VARIABLES:
        assert not {
            text for text in names if text.startswith(LAUNCHER_VARIABLES) or text.endswith("WORLD_SIZE")
        }
