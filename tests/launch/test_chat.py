"""train_gpt.py on chat data: the same losses under bitpipe as on one rank."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chat_folders import TEMPLATES, write_tokenizer
from tests.launch.forked import run_forked
from tests.launch.jobs import ROOT, tiny_config, write_json
from tests.unit.recipes.data.test_prepare import run

SCRIPT = str(ROOT / "train_gpt.py")


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    """A prepared folder of conversations."""
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"what is {i}?"},
                {"role": "assistant", "content": f"it is the number {i}" + ", and more" * (i % 4)},
                {"role": "user", "content": "and?"},
                {"role": "assistant", "content": "no"},
            ]
        }
        for i in range(60)
    ]
    source = tmp_path / "chat.jsonl"
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    folder = write_tokenizer(tmp_path / "tokenizer", TEMPLATES["chatml"])
    run("--format", "chat", "--source", source, "--tokenizer", folder, "--output", tmp_path / "chat")
    return tmp_path / "chat"


def test_chat_trains_to_the_same_losses(chat: Path, tmp_path: Path, free_port: Callable[[], int]) -> None:
    losses = {}
    for schedule, ranks in (("1f1b", 1), ("bitpipe", 2)):
        config = tiny_config(chat, schedule=schedule, pipeline_parallel_size=ranks)
        config["ds_ext"]["train"] |= {"seq_length": 128, "hidden_dropout": 0.0, "attention_dropout": 0.0}
        metrics = tmp_path / f"{schedule}.jsonl"
        flags = ["--deepspeed_config", str(write_json(tmp_path / f"{schedule}.json", config))]
        results = run_forked(
            [[SCRIPT, *flags, "--metrics-file", str(metrics)]] * ranks, tmp_path, port=free_port()
        )
        assert [result.returncode for result in results] == [0] * ranks, results
        (line,) = (line for line in results[0].stdout.splitlines() if line.startswith("chat "))
        per_epoch = int(re.findall(r"in (\d+) samples of", line)[0])
        assert re.findall(r"([\d.]+) epochs in (\d+) samples", line) == [(f"{24 / per_epoch:.1f}", "24")]
        losses[schedule] = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert len(losses["1f1b"]) == 3
    assert losses["bitpipe"] == pytest.approx(losses["1f1b"], abs=1e-5)
