"""A run whose samples do not fit the memory trains in slices, and is refused before launch without them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.launch.jobs import ROOT, Job, command, prepare_corpus, tiny_config, write_json
from tests.selection import extensive

FLAGS = ("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--train-iters", "1")
MORE = (
    "--eval-iters",
    "0",
    "--position-embedding-type",
    "rope",
    "--hidden-dropout",
    "0",
    "--attention-dropout",
    "0",
)
TOKENS = 32768
LIMIT_KB = 1_450_000  # that a rank may allocate; four ranks, two micro-batches of one sample


@extensive
def test_a_sample_that_does_not_fit_trains_in_slices(tmp_path: Path, free_port: Callable[[], int]) -> None:
    corpus = prepare_corpus(tmp_path, files=TOKENS // 100)
    config = tiny_config(corpus, schedule="1f1b", pipeline_parallel_size=4)
    config |= {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}
    del config["zero_optimization"]
    config["ds_ext"]["train"] = {"data_path": str(corpus)}
    path = str(write_json(tmp_path / "long.json", config))
    flags = ["--deepspeed_config", path, *FLAGS, *MORE, "--seq-length", str(TOKENS), "--vocab-size", "4096"]

    def run(*more: str) -> tuple[int, str]:
        words = command("torchrun", 4, free_port(), str(ROOT / "train_gpt.py"), *flags, *more)
        limited = ["bash", "-c", f'ulimit -d {LIMIT_KB}; exec "$@"', "bash", *words]
        with Job(limited, tmp_path) as job:
            return job.wait(600), job.text

    code, text = run()
    assert code != 0 and not re.search(r"^step 1/1", text, re.MULTILINE)
    fitting = re.search(r"memory: rank 3 needs .*--sequence-slices (\d+)", text)
    assert fitting is not None, text
    code, text = run("--sequence-slices", "16")
    assert code == 0 and re.search(r"^step 1/1", text, re.MULTILINE), text
