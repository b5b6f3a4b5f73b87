"""What a resumed run says of data that are not those of the checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ds_ext.training.loop import changed_data, data_flags

GPT: dict[str, Any] = {"data_path": ["a"], "split": "969,30,1", "seq_length": 128, "seed": 1234}


def flags(**changed: Any) -> dict[str, Any]:
    return data_flags(argparse.Namespace(**GPT | changed, lr=0.1))


def test_the_same_data_written_otherwise_are_the_same(tmp_path: Path) -> None:
    assert flags(split="96.9/3/0.1", data_path=[str(Path("a").absolute())]) == flags()
    assert flags(data_path=["0.3 a 0.7 b"]) == flags(data_path=["3", "a", "7", "b"])
    assert changed_data(flags(), flags()) == []


def test_each_flag_that_decides_the_samples_is_told() -> None:
    before = flags(mask_prob=0.15)
    now = flags(data_path=["b"], split="900,100", seq_length=64, seed=5, mask_prob=0.2)
    path, split, length, seed, share = changed_data(before, now)
    assert path.startswith(f"note: --data-path was {Path('a').absolute()}") and "not seen yet" in path
    assert split.startswith("note: --split was 0.969,0.03,0.001, is 0.9,0.1,0: ") and "validation" in split
    assert length.startswith("note: --seq-length was 128, is 64: ")
    assert seed.startswith("note: --seed was 1234, is 5: another order")
    assert share.startswith("note: --mask-prob was 0.15, is 0.2: ")
    # A checkpoint that does not say, as those of other programs.
    assert changed_data({}, now) == []
