"""Data of a resumed run: its size, and notes on flags that differ from those of the checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_ext.engine.checkpoint.file import write_plain
from ds_ext.engine.checkpoint.folder import publish, start_writing
from ds_ext.engine.checkpoint.save import STATE_FILE
from ds_ext.model.config import TransformerConfig
from ds_ext.recipes.training.data_flags import changed_data, data_flags
from ds_ext.recipes.training.job import TrainingJob

GPT: dict[str, Any] = {"data_path": ["a"], "split": "969,30,1", "seq_length": 128, "seed": 1234}


def flags(**changed: Any) -> dict[str, Any]:
    return data_flags(argparse.Namespace(**GPT | changed, lr=0.1))


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "text_document.bin").write_bytes(bytes(8))


def test_equal_data_in_another_form_are_equal() -> None:
    assert flags(split="96.9/3/0.1", data_path=[str(Path("a").absolute())]) == flags()
    assert flags(data_path=["0.3 a 0.7 b"]) == flags(data_path=["3", "a", "7", "b"])
    assert changed_data(flags(), flags()) == []


def test_every_changed_flag_has_a_note() -> None:
    before = flags(mask_prob=0.15)
    now = flags(data_path=["b"], split="900,100", seq_length=64, seed=5, mask_prob=0.2)
    starts = [
        f"note: --data-path was {Path('a').absolute()}",
        "note: --split was 0.969,0.03,0.001, is 0.9,0.1,0: ",
        "note: --seq-length was 128, is 64: ",
        "note: --seed was 1234, is 5: ",
        "note: --mask-prob was 0.15, is 0.2: ",
    ]
    Path("a/text_document.bin").write_bytes(bytes(6))
    replaced = flags(data_path=["a"], mask_prob=0.15)
    assert [note.split()[1] for note in changed_data(before, replaced)] == ["--data-path"]
    notes = changed_data(before, now)
    assert [note.startswith(start) for note, start in zip(notes, starts, strict=True)] == [True] * 5
    assert changed_data({}, now) == []  # a checkpoint of another program


@pytest.mark.parametrize(
    ("batch", "steps", "samples"),
    [(16, 4, 48 + 16), (4, 8, 48 + 5 * 4), (4, 3, 48), (48, 5, 48 + 2 * 48)],
    ids=["same", "smaller", "no step left", "larger"],
)
def test_the_data_begin_with_the_samples_of_the_checkpoint(batch: int, steps: int, samples: int) -> None:
    written, state = start_writing(Path("saved"), "step_3"), {"step": 3, "consumed_samples": 48}
    files = {STATE_FILE: write_plain(written / STATE_FILE, state)}
    publish(written, "step_3", {"files": files, "job": {}})
    plan: Any = SimpleNamespace(sizes=SimpleNamespace(train_batch_size=batch, micro_batch_size=2))
    args = argparse.Namespace(train_iters=steps, eval_iters=2, load="saved", data_path=["x"])
    job = TrainingJob(args, plan, TransformerConfig(1, 8, 1, 8, 8), [], [], [0, 1])
    train, valid = job.micro_batches(lambda sizes: [range(size) for size in sizes])
    assert valid is not None
    assert [len(one.dataset) for one in (train, valid)] == [samples, 2 * batch]
    args.load = None
    train, _ = job.micro_batches(lambda sizes: [range(size) for size in sizes])
    assert len(train.dataset) == batch * steps
