"""Who may import whom: each unit of ds_ext lists what it may use besides the standard library."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PURE = {
    "errors",
    "batch_sizes",
    "config",
    "deepspeed_json",
    "deepspeed_sections",
    "arguments",
    "flags",
    "megatron_flags",
    "layout",
    "fbd_layout",
    "checkpoint_folder",
    "partition",
    "plan",
    "auto",
    "choice",
    "choose",
    "pipe_schedules",
    "stage_costs",
}
EVERYTHING = {"*"}

# unit -> what it may import: other units by name, other packages as "package:"; "*" is everything.
ALLOWED: dict[str, set[str]] = {
    "__init__": {"engine"},
    "errors": set(),
    "batch_sizes": {"errors"},
    "pipe_schedules": {"errors"},
    "pipe_schedules/bridge": {"errors", "pipe_schedules", "deepspeed:"},
    "config": {
        "errors",
        "config_sections",
        "deepspeed_json",
        "pipe_schedules",
        "auto",
        "choice",
        "pydantic:",
    },
    "config_sections": {"errors", "pydantic:"},
    "deepspeed_json": {"errors", "deepspeed_nested"},
    "deepspeed_nested": {"errors"},
    "deepspeed_sections": {"errors", "deepspeed_json"},
    "arguments": PURE,
    "flags": {"errors", "megatron_flags"},
    "megatron_flags": set(),
    "layout": PURE,
    "fbd_layout": {"errors", "layout", "pipe_schedules"},
    "fbd_hosts": {"errors", "fbd_layout", "layout"},
    "fbd_price": {"errors", "pipe_schedules"},
    "checkpoint_folder": {"errors"},
    "partition": {"errors", "pipe_schedules"},
    "plan": PURE | {"rich:"},
    "comm/host_watch": {"errors"},
    "comm": {"errors", "comm/host_watch", "torch:"},
    "tensor_parallel": {"errors", "torch:"},
    "models/te": {"errors", "models", "tensor_parallel", "torch:"},
    "models": {
        "errors",
        "models/te",
        "tensor_parallel",
        "torch:",
        "deepspeed.pipe:",
        "deepspeed.runtime.pipe.module:",
    },
    "data/layout": set(),
    "data": {
        "errors",
        "data/layout",
        "numpy:",
        "torch:",
        "megatron:",
        "tokenizers:",
        "sentencepiece:",
        "rich:",
    },
    "observe/trace": {"errors", "pipe_schedules"},
    "engine": PURE
    | {
        "pipe_schedules/bridge",
        "observe/trace",
        "comm",
        "comm/host_watch",
        "failure",
        "launch",
        "tensor_parallel",
        "numpy:",
        "torch:",
        "deepspeed:",
    },
    "failure": {"errors", "comm/host_watch", "launch", "torch:"},
    "launch": {"errors", "torch:"},
    "process": {"errors", "failure"},
    "preflight": PURE | {"failure"},
    "observe": PURE | {"torch:", "rich:"},
    "training": EVERYTHING,
    "pretraining": EVERYTHING,
    "optimise": {"errors", "pipe_schedules", "ortools:"},
    "choice": {"errors", "pipe_schedules"},
    "stage_costs": {"errors", "pipe_schedules", "partition"},
    "choose": {"errors", "pipe_schedules", "choice", "stage_costs"},
    "auto": {
        "errors",
        "pipe_schedules",
        "choice",
        "choose",
        "deepspeed_sections",
        "layout",
        "partition",
        "data/layout",
    },
    "parallel_sizes": {"errors", "pipe_schedules", "choice", "choose"},
    "fbd_plan": {"errors", "pipe_schedules", "choice", "parallel_sizes", "stage_costs"},
    "fbd_verdict": {"errors", "pipe_schedules", "choice", "parallel_sizes", "fbd_plan"},
    "model_flags": {"errors", "pipe_schedules"},
    "bench": EVERYTHING,
    "checkpoint_fit": {"errors", "checkpoint_folder", "engine", "models", "data", "torch:"},
    "convert": {"errors", "checkpoint_folder", "engine", "models", "data", "torch:", "safetensors:"},
    "schedule_flags": {"errors", "pipe_schedules", "model_flags", "schedule_requests", "stage_costs"},
    "schedule_requests": {"errors", "pipe_schedules"},
    "verbs": {
        "errors",
        "fbd_price",
        "pipe_schedules",
        "optimise",
        "choice",
        "model_flags",
        "schedule_flags",
        "stage_costs",
    },
    "choosing_verbs": {
        "fbd_verdict",
        *("errors", "pipe_schedules", "verbs", "choice", "parallel_sizes", "model_flags", "schedule_flags"),
        *("plan_text", "stage_costs"),
    },
    "plan_text": {"choice", "parallel_sizes", "pipe_schedules"},
    "trace_verbs": {"errors", "choice", "observe/trace"},
    "doctor": {"errors", "comm", "torch:"},
    "__main__": EVERYTHING,
}


def unit_of(parts: tuple[str, ...]) -> str:
    """The unit of a module path below ds_ext, as ("pipe_schedules", "bridge")."""
    joined = "/".join(parts[:2])
    return joined if joined in ALLOWED else parts[0] if parts else "__init__"


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, at any depth, except those for the type checker only."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    tree = ast.parse(path.read_text())
    unread = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
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


FILES = sorted((ROOT / "ds_ext").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_stay_within_the_layers(path: Path) -> None:
    unit = unit_of(path.relative_to(ROOT / "ds_ext").with_suffix("").parts)
    assert unit in ALLOWED, f"a new unit, {unit}: say in ALLOWED what it may import"
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for line, name in imports(path)
        if refused(unit, name)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("unit", "name", "expected"),
    [
        ("pipe_schedules", "torch", True),
        ("pipe_schedules", "ds_ext.errors.ScheduleError", False),
        ("pipe_schedules", "ds_ext.pipe_schedules.bridge", True),
        ("pipe_schedules", "json", False),
        ("comm", "deepspeed", True),
        ("models", "deepspeed.pipe", False),
        ("models", "deepspeed", True),
        ("models", "ds_ext.engine.engine", True),
        ("engine", "ds_ext.models.gpt", True),
        ("engine", "ds_ext.pipe_schedules.bridge.Schedule", False),
        ("training", "ds_ext.models.gpt", False),
    ],
)
def test_the_rule_itself(unit: str, name: str, expected: bool) -> None:
    assert refused(unit, name) is expected


def loaded_after(statement: str) -> set[str]:
    script = f"import sys; {statement}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return {name.split(".")[0] for name in result.stdout.split()}


@pytest.mark.parametrize("module", ["ds_ext", "ds_ext.config", "ds_ext.pipe_schedules"])
def test_pure_imports_do_not_load_torch(module: str) -> None:
    assert not loaded_after(f"import {module}") & {"torch", "deepspeed", "numpy"}
