"""Pytest plugin (-p tests.native.sanitized) that loads the native module from the folder DS_EXT_NATIVE_DIR."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import ds_ext.comm

(path,) = Path(os.environ["DS_EXT_NATIVE_DIR"]).glob("ds_ext/comm/_native*.so")
spec = importlib.util.spec_from_file_location("ds_ext.comm._native", path)
assert spec is not None and spec.loader is not None
module = importlib.util.module_from_spec(spec)
sys.modules["ds_ext.comm._native"] = module
spec.loader.exec_module(module)
ds_ext.comm.__dict__["_native"] = module
