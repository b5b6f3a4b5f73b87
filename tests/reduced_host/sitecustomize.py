"""Hide precisions that this processor supports: DS_EXT_TEST_WITHOUT=fp16,bf16 (see CONTRIBUTING.md).

tests/conftest.py imports this module and adds its folder to PYTHONPATH, where Python finds it at the start of every
process that a test starts. DeepSpeed's CPU accelerator then reports the listed precisions as unsupported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

ACCELERATOR = "deepspeed.accelerator.cpu_accelerator"
WITHOUT = os.environ.get("DS_EXT_TEST_WITHOUT", "")


def hide(accelerator: type, names: str) -> None:
    """Make an accelerator class report the comma-separated precisions as unsupported."""
    for name in filter(None, names.split(",")):
        method = f"is_{name}_supported"
        if not hasattr(accelerator, method):
            raise ValueError(
                f"DS_EXT_TEST_WITHOUT: unknown precision (got {name!r}). Use fp16, bf16 or both."
            )
        setattr(accelerator, method, lambda accelerator: False)


class PatchedLoader(importlib.machinery.SourceFileLoader):
    """Loader of the accelerator's module that changes its class after the import."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        hide(module.CPU_Accelerator, WITHOUT)


class AcceleratorFinder(importlib.abc.MetaPathFinder):
    """Finder of the accelerator's module; leaves every other module to the next finder."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == ACCELERATOR else None
        if spec is not None and spec.origin is not None:
            spec.loader = PatchedLoader(name, spec.origin)
        return spec


if WITHOUT:
    sys.meta_path.insert(0, AcceleratorFinder())
