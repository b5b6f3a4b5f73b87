"""Jobs that run with the JSON that ``plan`` prints need the memory that it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.jobs import ROOT, Job, command, environment, prepare_corpus
from tests.precisions import needs
from tests.selection import extensive

GPT = "--num-layers 16 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --vocab-size 4096"
LLAMA = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 1024 --vocab-size 16384 --swiglu --rope "
    "--normalization RMSNorm --num-query-groups 2 --untie-embeddings-and-output-weights"
)
DEVICES = "--devices 4 --global-batch-size 16 --tflops 0.027 --inside 550MB,2ms --collectives gloo"
JOBS = {
    "data parallel": f"--memory 250MB --tensor-parallel 1 --inside 1GB,500us {GPT}",
    "two pipes": f"--memory 250MB --tensor-parallel 1 {GPT}",
    "little memory": f"--memory 150MB {GPT}",
    "tensor parallel": f"--memory 120MB {GPT}",
    "large head": f"--memory 300MB --tensor-parallel 1 {LLAMA}",
}


@extensive
@needs("bf16")
@pytest.mark.parametrize("flags", JOBS.values(), ids=list(JOBS))
def test_the_printed_json_needs_the_printed_memory(
    tmp_path: Path, free_port: Callable[[], int], flags: str
) -> None:
    verb = [sys.executable, "-m", "ds_ext", "plan", "--json", *DEVICES.split(), *flags.split()]
    printed = subprocess.run(verb, cwd=ROOT, env=environment(), check=True, capture_output=True, text=True)
    plan = json.loads(printed.stdout)
    config, best = tmp_path / "planned.json", next(row for row in plan["best"] if row["fits"])
    config.write_text(json.dumps(plan["config"]))
    vocabulary = flags.split("--vocab-size ")[1].split()[0]
    words = ["--deepspeed_config", str(config), "--data-path", str(prepare_corpus(tmp_path, files=150))]
    words += ["--vocab-size", vocabulary, "--train-iters", "3", "--eval-iters", "0"]
    script = [str(ROOT / "tests/launch/measured.py"), str(tmp_path / "peak"), str(ROOT / "train_gpt.py")]
    with Job(command("torchrun", 4, free_port(), *script, *words), tmp_path) as job:
        assert job.wait(400) == 0, job.text
    peaks = [json.loads((tmp_path / f"peak.{rank}").read_text()) for rank in range(4)]
    assert max(peaks) == pytest.approx(best["memory_bytes"], rel=0.05), (best, peaks)
