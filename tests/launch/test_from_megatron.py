"""Launch scripts with Megatron's flags: each prints the plan of its job at the original sizes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.launch.jobs import ROOT, environment

FOLDER = ROOT / "examples" / "from_megatron"


def plan(script: str, data: Path, *flags: str) -> str:
    """Return the output of a dry run."""
    # The test data are too small to be split.
    words = [
        "bash",
        str(FOLDER / script),
        "--dry-run",
        "--verbose",
        "--split",
        "1,0,0",
        "--eval-iters",
        "0",
        *flags,
    ]
    env = environment(DATA=str(data))
    done = subprocess.run(words, cwd=data, env=env, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done
    return done.stdout


def parameters(text: str) -> list[int]:
    """Return the parameters on each rank of every device."""
    found: dict[int, int] = {}
    for devices, count in re.findall(r"^  ([\d, -]+?) +([\d,]{9,})  ", text, re.MULTILINE):
        for part in devices.split(", "):
            first, _, last = part.partition("-")
            found |= dict.fromkeys(range(int(first), int(last or first) + 1), int(count.replace(",", "")))
    return [found[device] for device in sorted(found)]


@pytest.mark.parametrize(
    ("script", "schedule", "world", "copies", "layers", "hidden"),
    [
        (
            "gpt_bitpipe.sh",
            "bitpipe, 16 micro-batches of 1 ",
            "8 = 8 pipeline x 1 tensor x 1 data",
            2,
            96,
            3072,
        ),
        ("gpt_dpp.sh", "dpp, 16 micro-batches of 2 ", "8 = 2 pipeline x 4 tensor x 1 data", 1, 16, 2048),
        (
            "gpt_fbd.sh",
            "fbd, 16 micro-batches of 2 ",
            "6 = 2 pipeline x (1 forward + 1 x 2 backward)",
            2,
            16,
            2048,
        ),
        ("gpt_3d.sh", "1f1b, 8 micro-batches of 4 ", "8 = 2 pipeline x 2 tensor x 2 data", 1, 24, 1024),
    ],
)
def test_gpt(
    corpus: Path, script: str, schedule: str, world: str, copies: int, layers: int, hidden: int
) -> None:
    text = plan(script, corpus)
    assert f"schedule  {schedule}" in text and f"world {world}" in text
    tensor = 1 if script == "gpt_fbd.sh" else int(world.partition(" pipeline x ")[2][0])
    counts = parameters(text)
    if (
        script == "gpt_fbd.sh"
    ):  # a merged forward rank holds the whole weights, and two backward ranks hold half each
        assert counts[0] == pytest.approx(2 * counts[1], rel=0.02)
        counts = [counts[0], counts[0], counts[2], counts[2]]
    matrices = copies * 12 * layers * hidden**2
    assert sum(counts) * tensor == pytest.approx(matrices, rel=0.03)
    assert '"type": "MegatronLR"' in text


def test_bert(bert_corpus: Path) -> None:
    text = plan("bert_bitpipe.sh", bert_corpus)
    assert "schedule  bitpipe, 8 micro-batches of 4 " in text
    assert sum(parameters(text)) == pytest.approx(2 * 12 * 64 * 2560**2, rel=0.03)


def test_two_hosts_and_further_flags(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNODES", "2")
    text = plan("gpt_dpp.sh", corpus, "--train-iters", "7")
    assert "cross hosts" in text and '"train_iters": 7' in text
