"""Tests and benchmarks on one GPU, and their report: ``python -m tests.gpu [REPORT.md]``."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.training import TORCH_RIVALS
from tests.gpu.steps import Result, Step, report, run_steps

LIMIT_S = 25 * 60.0
_FOLDER = Path(__file__).parent
_PYTHON = sys.executable


def _pytest(name: str, limit_s: float, *files: str) -> Step:
    paths = [str(_FOLDER / file) for file in files]
    return Step(name, [_PYTHON, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *paths], limit_s)


def _bench(limit_s: float, *flags: str) -> Step:
    command = [_PYTHON, "-m", "ds_ext", "bench", *flags, "--device", "cuda"]
    return Step(f"bench {flags[0]}", command, limit_s, figures=True)


def steps(gpus: int) -> tuple[Step, ...]:
    """Return the steps for a number of GPUs. Rivals need one GPU per rank, because gloo cannot send their tensors."""
    rivals = ",".join(("deepspeed_1f1b", *TORCH_RIVALS))
    two, four = (
        ("--rivals", rivals if gpus >= ranks else "none", "--num-devices", f"{ranks}") for ranks in (2, 4)
    )
    return (
        Step("doctor", [_PYTHON, "-m", "ds_ext", "doctor"], 60),
        _pytest("construction", 90, "test_construction.py"),
        _pytest("transport", 150, "test_transport.py"),
        _pytest("schedules", 200, "test_schedules.py"),
        _pytest("bf16 and ZeRO-1", 90, "test_precision.py"),
        _pytest("memory", 90, "test_memory.py"),
        _pytest("compile", 120, "test_compile.py"),
        _pytest("recovery", 60, "test_recovery.py"),
        _pytest("attention", 60, "test_attention.py"),
        _pytest("slices", 110, "test_slices.py"),
        _pytest("Transformer Engine", 60, "test_te.py"),
        _bench(60, "transport", "--repeats", "3"),
        _bench(120, "schedules", "--schedules", "1f1b,zb_h1,bitpipe,bitpipe_zb", "--steps", "3", *two),
        _bench(200, "training", "--schedules", "1f1b,bitpipe,bitpipe_zb", *four),
    )


def main(arguments: list[str]) -> int:
    """Run all steps and write the report. Returns 1 if a step failed; 0 also without a GPU."""
    if not torch.cuda.is_available():
        build = "sees no CUDA device" if torch.version.cuda else "is a build without CUDA"
        print(f"torch {torch.__version__} {build}: nothing was tested.")
        return 0
    path = Path(arguments[0] if arguments else "build/gpu_report.md")
    results = run_steps(steps(torch.cuda.device_count()), LIMIT_S, _show)
    text = report(results, _facts())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(text, f"Report: {path}", sep="\n")
    return int(any(result.outcome in ("failed", "over limit") for result in results))


def _show(result: Result) -> None:
    print(f"{result.step.name}: {result.outcome}, {result.seconds:.0f} s  {result.detail}", flush=True)


def _facts() -> dict[str, str]:
    """Return the device, the driver and the versions."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.split("\n")[0]
    except (OSError, subprocess.TimeoutExpired):
        driver = "unknown"
    packages = ("torch", "deepspeed", "ds_ext")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return {
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}",
        "driver": driver,
        "versions": f"{versions}, CUDA {torch.version.cuda}, Python {platform.python_version()}",
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
