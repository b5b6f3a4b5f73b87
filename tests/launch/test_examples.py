"""The examples, run as their headers say, on small inputs."""

from __future__ import annotations

import difflib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.forked import run_forked
from tests.launch.jobs import ROOT, environment
from tests.selection import extensive, select

WITHOUT_OPS = str(Path(__file__).with_name("without_ops.py"))
EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(tmp_path: Path, free_port: Callable[[], int]) -> Callable[..., str]:
    """Run an example on ``ranks`` ranks in ``tmp_path`` and return the output of rank 0: run(script, flags...)."""

    def run(script: str, *flags: str, ranks: int = 4) -> str:
        words = [str(EXAMPLES / script), *flags]
        results = run_forked([words] * ranks, tmp_path, port=free_port())
        assert [result.returncode for result in results] == [0] * ranks, results
        assert not any(losses(result.stdout) for result in results[1:])
        return results[0].stdout

    return run


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+/\d+ \| loss ([\d.]+)", text, re.MULTILINE)]


def command(*words: str, cwd: Path, **env: str) -> str:
    result = subprocess.run(
        words, cwd=cwd, env=environment(**env), text=True, stdout=subprocess.PIPE, timeout=300
    )
    assert result.returncode == 0, result
    return result.stdout


@extensive
def test_own_model_with_two_schedules_and_traces(run: Callable[..., str], tmp_path: Path) -> None:
    """One JSON fits every schedule, and an own schedule gives the same losses."""
    own = run("own_model.py", "--deepspeed_config", str(EXAMPLES / "own_model.json"))
    assert own.startswith("schedule  bitpipe, 8 micro-batches of 8 ")
    assert len(losses(own)) == 5 and losses(own)[-1] < losses(own)[0] / 10
    eager = run("own_model.py", "--deepspeed_config", str(EXAMPLES / "own_schedule" / "eager_1f1b.json"))
    assert eager.startswith("schedule  eager_1f1b, 8 micro-batches of 8 ")
    assert losses(eager) == pytest.approx(losses(own), rel=1e-2)

    traced = run("own_model.py", "--deepspeed_config", str(EXAMPLES / "trace" / "traced.json"))
    assert losses(traced) == pytest.approx(losses(own), rel=1e-2)
    read = command(sys.executable, str(EXAMPLES / "trace" / "read_trace.py"), "traces", cwd=tmp_path)
    found = json.loads(read.splitlines()[-1])
    assert found["slowest_link"] and 0 <= found["slowest_stage"]["stage"] < 8


def test_own_schedule_is_compared_with_1f1b(tmp_path: Path) -> None:
    text = command(sys.executable, str(EXAMPLES / "own_schedule" / "eager_1f1b.py"), cwd=tmp_path)
    spans = dict(re.findall(r"^(1f1b|eager_1f1b) ([\d.]+) ", text, re.MULTILINE))
    assert float(spans["eager_1f1b"]) < float(spans["1f1b"])


@extensive
def test_uneven_model(run: Callable[..., str], tmp_path: Path) -> None:
    """The first stages, with cheap layers, get more of them than the last."""
    config = json.loads((EXAMPLES / "own_model.json").read_text())
    config["ds_ext"]["print_plan"] = "all"
    (tmp_path / "job.json").write_text(json.dumps(config))
    text = run("uneven_model.py", "--deepspeed_config", "job.json")
    assert losses(text)[-1] < losses(text)[0] / 2
    ranges = re.findall(r"^  stage \d+ .* (\d+)(?:-(\d+))?$", text, re.MULTILINE)
    counts = [int(last or first) - int(first) + 1 for first, last in ranges]
    assert len(counts) == 8 and sum(counts) == 16 and counts[0] > counts[-1]


@pytest.mark.parametrize(("suffix", "expected"), [("py", (2, 1)), ("json", (1, 2))])
def test_few_lines_of_deepspeeds_tutorial_change(suffix: str, expected: tuple[int, int]) -> None:
    before, after = (
        (EXAMPLES / "deepspeed_tutorial" / f"{name}.{suffix}").read_text().splitlines()
        for name in ("before", "after")
    )
    diff = [line[0] for line in difflib.ndiff(before, after)]
    assert (diff.count("-"), diff.count("+")) == expected


@extensive
def test_deepspeeds_tutorial_has_the_same_losses(tmp_path: Path, free_port: Callable[[], int]) -> None:
    folder = EXAMPLES / "deepspeed_tutorial"
    printed = {}
    for name in ("before", "after"):
        # DeepSpeed's engine is slow in forked ranks.
        launcher = ["torchrun", "--nproc_per_node", "4", "--master_port", str(free_port())]
        flags = ["--deepspeed_config", str(folder / f"{name}.json"), "--steps", "3"]
        printed[name] = command(*launcher, WITHOUT_OPS, str(folder / f"{name}.py"), *flags, cwd=tmp_path)
    steps = {name: re.findall(r"loss:? ([\d.]+)", text) for name, text in printed.items()}
    assert len(steps["before"]) == 1
    for before, after in zip(steps["before"], steps["after"], strict=True):
        assert float(before) == pytest.approx(float(after), rel=1e-3, abs=2e-6)


@extensive
def test_a_killed_rank(tmp_path: Path, free_port: Callable[[], int]) -> None:
    folder = EXAMPLES / "recovery"
    words = [str(folder / "killed.py"), "--deepspeed_config", str(folder / "killed.json")]
    launcher = ["torchrun", "--nproc_per_node", "4", "--master_port", str(free_port()), "--max-restarts", "1"]
    text = command(*launcher, *words, cwd=tmp_path)
    assert re.findall(r"^recovered at step (\d+) .*: (\d+) steps lost; rank (\d+) ", text, re.MULTILINE) == [
        ("10", "0", "2")
    ]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 21))


@pytest.mark.parametrize("rank", select([0, 4], [4]))
def test_finetune_decoder(run: Callable[..., str], tmp_path: Path, rank: int) -> None:
    pytest.importorskip("peft")
    text = run("finetune_decoder.py", "--create", "--steps", "10", "--lora", str(rank), ranks=2)
    assert losses(text)[-1] < losses(text)[0]
    assert (tmp_path / "finetuned" / "latest").exists()
    assert (tmp_path / "finetuned" / "adapter" / "adapter_model.safetensors").exists() == bool(rank)


@extensive
def test_finetune_a_llama(tmp_path: Path, corpus: Path, free_port: Callable[[], int]) -> None:
    transformers: Any = pytest.importorskip("transformers")
    from ds_ext.recipes.data.tokenizer import load_tokenizer
    from tests.hf_models import random_llama

    sizes = {"num_hidden_layers": 8, "max_position_embeddings": 32}
    random_llama("llama3", vocab_size=load_tokenizer(corpus).vocab_size, **sizes).save_pretrained(
        tmp_path / "model"
    )
    (tmp_path / "model" / "tokenizer.json").write_bytes((corpus / "tokenizer.json").read_bytes())
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_text("the pipe takes a batch and hands it on " * 40)
    flags = ["--seq-length", "16", "--train-iters", "2", "--eval-iters", "1", "--split", "80,20,0"]
    script = str(EXAMPLES / "llama" / "finetune.sh")
    ports = {"PORT": str(free_port())}
    text = command("bash", script, "model", "texts", "out", *flags, cwd=tmp_path, **ports)
    assert len(losses(text)) == 2
    trained = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out" / "hf")
    assert trained.config.num_hidden_layers == 8
