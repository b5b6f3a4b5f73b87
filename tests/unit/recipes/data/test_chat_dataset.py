"""Samples of chat data: whole conversations, every one once per epoch, with the labels of the assistant."""

from __future__ import annotations

import itertools
import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_ext.errors import ConfigError
from ds_ext.recipes.data.chat.dataset import ChatDataset, pad_conversations
from ds_ext.recipes.data.gpt import build_gpt_datasets, describe_data, mean_tokens, samples_per_epoch
from ds_ext.recipes.data.indexed import IndexedTokens
from ds_ext.recipes.data.meta import fingerprint, has_chat
from ds_ext.recipes.data.packing import IGNORE_INDEX, DocumentOptions
from tests.unit.recipes.data.test_gpt import write_documents

Mask = Sequence[bool]
WITH_STARTS = DocumentOptions(starts=True, eod_id=0)


def write_pair(prefix: Path, documents: Sequence[np.ndarray], code: int) -> None:
    lengths = [len(document) for document in documents]
    Path(f"{prefix}.bin").write_bytes(b"".join(document.tobytes() for document in documents))
    starts = np.cumsum([0, *lengths[:-1]]) * documents[0].itemsize
    borders = np.arange(len(lengths) + 1, dtype=np.int64)
    arrays = (np.array(lengths, np.int32), starts.astype(np.int64), borders)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(borders))
    Path(f"{prefix}.idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))


def write_chat(folder: Path, masks: Sequence[Mask]) -> Path:
    """Write conversations of consecutive numbers from 1 on, each number once, with these loss masks."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = itertools.count(1)
    tokens = [np.array([next(numbers) for _ in mask], np.int32) for mask in masks]
    write_pair(folder / "text_document", tokens, 4)
    write_pair(folder / "loss_mask", [np.array(mask, np.uint8) for mask in masks], 1)
    (folder / "meta.json").write_text(json.dumps({"loss_mask": "loss_mask"}))
    return folder


def dataset(
    folder: Path, num_samples: int, seq_length: int = 8, seed: int = 1, name: str = "train"
) -> ChatDataset:
    indexed, mask = IndexedTokens(folder / "text_document"), IndexedTokens(folder / "loss_mask")
    return ChatDataset(indexed, mask, range(indexed.num_documents), seq_length, num_samples, seed, name)


def samples_of(data: ChatDataset, count: int | None = None) -> list[tuple[list[int], list[int], list[int]]]:
    rows = []
    for i in range(len(data) if count is None else count):
        inputs, labels = data[i]
        rows.append((inputs[0].tolist(), inputs[1].tolist(), labels.tolist()))
    return rows


# At least two tokens, and the assistant's last token at 1 or later, as `prepare` writes them.
MASKS = st.lists(
    st.lists(st.booleans(), min_size=2, max_size=14).filter(lambda mask: any(mask[1:])),
    min_size=1,
    max_size=30,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(masks=MASKS, seed=st.integers(0, 5))
def test_every_conversation_is_in_an_epoch_once(tmp_path: Path, masks: list[list[bool]], seed: int) -> None:
    folder = write_chat(tmp_path, masks)
    kept = [mask for mask in masks if any(mask[1:9])]
    if not kept:
        with pytest.raises(ConfigError, match="--split"):
            dataset(folder, 1, name="valid")
        return
    data = dataset(folder, 10_000, seed=seed, name="valid")  # the train split refuses to drop many
    assert data.num_conversations == len(kept)
    assert data.num_dropped == len(masks) - len(kept)
    assert data.num_truncated == sum(len(mask) > 9 for mask in kept)
    firsts = np.cumsum([1, *map(len, masks)]).tolist()
    counted = {
        first + i
        for first, mask in zip(firsts, masks, strict=False)
        for i in range(1, min(9, len(mask)))
        if mask[i]
    }
    position = 0
    for _ in range(3):  # epochs
        seen: list[int] = []
        labels_seen: set[int] = set()
        while len(seen) < len(kept):
            ((tokens, starts, labels),) = [samples_of_one(data, position)]
            position += 1
            for start in sorted(set(starts)):
                at = [i for i in range(8) if starts[i] == start]
                assert at == list(range(start, start + len(at)))
                if tokens[start] == 0:  # padding, at the end
                    assert at[-1] == 7 and {tokens[i] for i in at} == {0}
                    assert {labels[i] for i in at} == {IGNORE_INDEX}
                    continue
                number = firsts.index(tokens[start])
                seen.append(number)
                assert len(at) == min(8, len(masks[number]) - 1)
                for offset, i in enumerate(at):
                    assert tokens[i] == firsts[number] + offset
                    follows = tokens[i] + 1 if masks[number][offset + 1] else IGNORE_INDEX
                    assert labels[i] == follows
            assert any(label != IGNORE_INDEX for label in labels)
            labels_seen.update(set(labels) - {IGNORE_INDEX})
        assert sorted(seen) == [number for number, mask in enumerate(masks) if any(mask[1:9])]
        assert labels_seen == counted


def samples_of_one(data: ChatDataset, index: int) -> tuple[list[int], list[int], list[int]]:
    inputs, labels = data[index]
    return inputs[0].tolist(), inputs[1].tolist(), labels.tolist()


def varied(count: int) -> list[list[bool]]:
    generator = np.random.default_rng(0)
    return [[False, *[True] * int(generator.integers(1, 9))] for _ in range(count)]


def test_samples_depend_only_on_seed_and_index(tmp_path: Path) -> None:
    folder = write_chat(tmp_path, varied(40))
    expected = samples_of(dataset(folder, 90))
    assert samples_of(dataset(folder, 200), 90) == expected
    assert samples_of(dataset(folder, 90, seed=2)) != expected
    resumed = dataset(folder, 200)
    for index in (89, 0, 45, 88, 3):
        assert samples_of_one(resumed, index) == expected[index]
    with pytest.raises(IndexError):
        resumed[200]


def test_splits_and_blends(tmp_path: Path) -> None:
    folder = write_chat(tmp_path / "chat", varied(40))
    train, valid, _ = build_gpt_datasets(str(folder), "8,2", 8, (30, 6, 0), 1, WITH_STARTS)
    used = [
        {token for inputs, _ in map(data.__getitem__, range(len(data))) for token in inputs[0].tolist()} - {0}
        for data in (train, valid)
    ]
    assert max(used[0]) < min(used[1])

    write_documents(tmp_path / "text", [20] * 10, first_token=5000)
    blend = f"0.5 {folder} 0.5 {tmp_path / 'text'}"
    assert has_chat(blend) and has_chat(str(folder)) and not has_chat(str(tmp_path / "text"))
    mixed, _, _ = build_gpt_datasets(blend, "1", 8, (20, 0, 0), 1, WITH_STARTS)
    alone, _, _ = build_gpt_datasets(str(folder), "1", 8, (10, 0, 0), 1, WITH_STARTS)
    from_chat = [inputs[0].tolist() for inputs, _ in (mixed[i] for i in range(20)) if inputs[0].max() < 5000]
    assert from_chat == [alone[i][0][0].tolist() for i in range(10)]
    for path in (str(folder), blend):
        with pytest.raises(ConfigError, match="starts"):
            build_gpt_datasets(path, "1", 8, (20, 0, 0), 1)


@pytest.mark.parametrize("dropped", [2, 3])
def test_more_than_a_hundredth_of_dropped_conversations_is_refused(tmp_path: Path, dropped: int) -> None:
    short, long = [False, True, True], [*[False] * 12, True, False]
    folder = write_chat(tmp_path, [*[short] * (200 - dropped), *[long] * dropped])
    if dropped == 2:
        assert dataset(folder, 1).num_dropped == 2
        return
    with pytest.raises(ConfigError, match=r"--seq-length: 3 of 200 .* Use 12 "):
        dataset(folder, 1)
    assert dataset(folder, 1, seq_length=12).num_dropped == 0


def test_conversations_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every conversation once per epoch, with its own length; padding is no label."""
    monkeypatch.setattr("ds_ext.recipes.data.chat.dataset.MOST_DROPPED", 1.0)
    folder = write_chat(
        tmp_path, [[False, True, False], [True, False, False, False, True], [False] * 4 + [True] * 3]
    )
    alone = DocumentOptions(packs=False)
    train, valid, _ = build_gpt_datasets(str(folder), "1", 5, (6, 0, 0), 1, alone)
    samples: list[Any] = [train[index] for index in range(6)]
    expected = {
        1: ([1, 2], [2, -100]),
        4: ([4, 5, 6, 7], [-100] * 3 + [8]),
        9: ([9, 10, 11, 12, 13], [-100] * 3 + [13, 14]),
    }
    for epoch in (samples[:3], samples[3:]):
        assert {int(tokens[0]): (tokens.tolist(), labels.tolist()) for tokens, labels in epoch} == expected
    assert samples_per_epoch(train) == 3 and mean_tokens(train) == pytest.approx((2 + 4 + 5) / 3)
    assert mean_tokens(valid) == 0
    assert re.findall(r"\d+", describe_data(train)[0])[:5] == ["3", "5", "4", "1", "0"]
    ids, labels = pad_conversations([samples[0], samples[1], samples[2]])
    assert ids.shape == labels.shape == (3, 5)
    assert int((labels != IGNORE_INDEX).sum()) == 4 and int((ids == 0).sum()) == 3 + 1
    assert pad_conversations([samples[0]], length=9)[0].shape == (1, 9)
    shapes = [tensor.shape for tensor in pad_conversations(samples[:3], multiple=4)]
    assert shapes == [(3, 8)] * 2
    part: Any
    (part,) = build_gpt_datasets(str(folder), "1", 3, (2, 0, 0), 1, alone)[0].parts
    assert (part.num_conversations, part.num_dropped) == (1, 2)


def test_mask_of_other_conversations_is_refused(tmp_path: Path) -> None:
    folder = write_chat(tmp_path, [[False, True], [False, True, True]])
    write_pair(folder / "loss_mask", [np.zeros(3, np.uint8), np.zeros(2, np.uint8)], 1)
    with pytest.raises(ConfigError, match=r"loss_mask"):
        dataset(folder, 1)


def test_fingerprint_covers_the_mask(tmp_path: Path) -> None:
    folder = write_chat(tmp_path, [[False, True], [False, True, True]])
    before = fingerprint(str(folder))
    assert fingerprint(str(folder)) == before
    write_pair(folder / "loss_mask", [np.array([0, 1], np.uint8), np.array([0, 1, 0], np.uint8)], 1)
    assert fingerprint(str(folder)) != before


def test_packing_fills_samples(tmp_path: Path) -> None:
    data = dataset(write_chat(tmp_path, varied(400)), 100, seq_length=64)
    tokens = sum(len(mask) - 1 for mask in varied(400))
    assert data.summary().startswith(f"400 conversations in {-(-tokens // 64)} samples")
