"""DeepSpeed's Muon: imported by every job with ZeRO, compiled only by those that use it."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

SCRIPT = """
import json, sys, torch
from ds_ext.engine.deepspeed_api.muon import import_muon
from deepspeed.runtime import compiler

at_import = compiler.compile
import_muon()
has_compiler = "torch._inductor.compile_fx" in sys.modules
from deepspeed.runtime.zero.muon import original_muon
torch.compile, compiled = lambda function: compiled.append(function.__name__) or function, []
torch.manual_seed(0)
gradient = torch.randn(4, 6)
results = [original_muon.zeropower_via_newtonschulz5(gradient, 30).tolist() for _ in range(2)]
print(json.dumps([has_compiler, compiler.compile is at_import, compiled, results]))
"""


def test_muon_is_compiled_at_its_first_call_and_not_imported_with_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True)
    has_compiler, is_restored, compiled, (first, second) = json.loads(done.stdout)
    assert not has_compiler
    assert is_restored
    assert compiled == ["zeropower_via_newtonschulz5"]
    assert first == second
    # The iteration brings all singular values near 1.
    values = torch.linalg.svdvals(torch.tensor(first))
    assert values.min() > 0.6 and values.max() < 1.3
