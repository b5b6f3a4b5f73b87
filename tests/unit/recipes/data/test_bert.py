"""BERT data: sentences, WordPiece, and reproducible samples that match the text."""

import argparse
import itertools
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_ext.errors import ConfigError
from ds_ext.recipes.data import megatron_bert, prepare
from ds_ext.recipes.data.bert import NO_LABEL, BertOptions, bert_tokenizer, build_bert_datasets
from ds_ext.recipes.data.datasets import BlendedDataset
from ds_ext.recipes.data.indexed import IndexedTokens
from ds_ext.recipes.data.meta import read_meta
from ds_ext.recipes.data.tokenizer import load_tokenizer
from ds_ext.recipes.data.wordpiece import (
    MAX_SENTENCE_WORDS,
    SPECIAL_TOKENS,
    WordPieceTokenizer,
    split_sentences,
    train_wordpiece,
)

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def sentence(document: int, number: int) -> str:
    """Return a sentence that occurs once in the corpus and contains words of several pieces."""
    words = [NUMBERS[(document * 7 + number * 3 + place) % 10] for place in range(3 + number % 5)]
    return f"Stage{document} of pipe{number} takes {' and '.join(words)}."


DOCUMENTS = [[sentence(document, number) for number in range(8 + document % 9)] for document in range(40)]


def prepared(folder: Path, *options: str) -> Path:
    """Run `prepare` on the documents above and return its folder."""
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": "\n".join(texts)}) + "\n" for texts in DOCUMENTS))
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    output = folder / "data"
    assert prepare.run(parser.parse_args(["--source", str(source), "--output", str(output), *options])) == 0
    return output


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("bert"), "--tokenizer-type", "wordpiece", "--vocab-size", "150")


Build = Callable[..., BlendedDataset[Any]]


@pytest.fixture(scope="module")
def build(data: Path) -> Build:
    """Return build(samples, seed=..., seq_length=..., **options), which builds the training split."""
    tokenizer = bert_tokenizer(str(data))

    def make(
        samples: int, seed: int = 1, seq_length: int = 48, split: str = "1", **options: Any
    ) -> BlendedDataset[Any]:
        arguments = (seq_length, (samples, 0, 0), seed, tokenizer, BertOptions(**options))
        return build_bert_datasets(str(data), split, *arguments)[0]

    return make


def flat(dataset: BlendedDataset[Any]) -> list[list[int]]:
    return [
        torch.cat([*x, *(part.reshape(-1) for part in y)]).tolist()
        for x, y in map(dataset.__getitem__, range(len(dataset)))
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        (
            "It costs 3.5 units, e.g. here. (Really.) Yes.",
            ["It costs 3.5 units, e.g. here.", "(Really.)", "Yes."],
        ),
        ("A line\ngoes on here.\n\nAnother paragraph", ["A line\ngoes on here.", "Another paragraph"]),
        ('He said "No." Then "Why?" she asked.', ['He said "No."', 'Then "Why?" she asked.']),
        (" \n\n \n", []),
        ("x.y = z. Äpfel. 3 of them.", ["x.y = z.", "Äpfel. 3 of them."]),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert split_sentences(text) == expected


def test_a_long_listing_is_divided_at_line_ends() -> None:
    lines = [f"    call({i}, of, five, words)" for i in range(40)]
    pieces = split_sentences("\n".join(lines))
    assert [line.strip() for line in "\n".join(pieces).split("\n")] == [line.strip() for line in lines]
    assert len(pieces) > 3 and all(len(piece.split()) <= MAX_SENTENCE_WORDS for piece in pieces)


@given(st.text(alphabet="aB.?!\"') \n", max_size=300))
def test_no_word_is_lost(text: str) -> None:
    assert " ".join(split_sentences(text)).split() == text.split()


def test_word_piece_files_are_equivalent(data: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(data)
    assert isinstance(tokenizer, WordPieceTokenizer)
    assert [tokenizer.special_ids[name] for name in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert tokenizer.vocab_size == 150
    text = "Stage7 takes [MASK] and NINETEEN more."
    ids = tokenizer.encode(text)
    assert not {tokenizer.special_ids[name] for name in ("[PAD]", "[MASK]", "[CLS]", "[SEP]")} & set(ids)
    assert any(word.startswith("##") for word, token_id in tokenizer.vocab.items() if token_id in ids)
    assert tokenizer.decode(tokenizer.encode("Two and ten.")) == "two and ten."
    for path in (data / "vocab.txt", data / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert loaded.encode(text) == ids and loaded.fingerprint == tokenizer.fingerprint
    cased = tmp_path / "vocab.txt"
    cased.write_text("\n".join([*SPECIAL_TOKENS, "Two", "two"]) + "\n")
    assert load_tokenizer(cased).encode("Two two TWO") == [5, 6, 1]


def test_a_vocabulary_without_special_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("[UNK]\ntwo\n[CLS]\n[PAD]\n[SEP]\n")
    with pytest.raises(ConfigError, match=r"vocab\.txt:.* 5 .*\[MASK\]"):
        load_tokenizer(path)
    path.write_text("\n".join(reversed(SPECIAL_TOKENS)) + "\n")
    with pytest.raises(ConfigError, match=r"\[PAD\].* 0\b.* 4\b"):
        load_tokenizer(path)
    with pytest.raises(ConfigError, match=r"--vocab-size.* 5 .*got 5"):
        train_wordpiece(["one two"], 5)


def test_every_training_of_a_tokenizer_is_equal() -> None:
    texts = [" ".join(sentences) for sentences in DOCUMENTS]
    first, *others = (train_wordpiece(texts, 300).vocab for _ in range(4))
    assert len(first) > 100 and sorted(first.values()) == [*range(len(first))]
    assert others == [first] * 3


def test_prepared_documents_have_one_sequence_per_sentence(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, indexed, meta = (
        load_tokenizer(data),
        IndexedTokens(data / "text_document"),
        read_meta(str(data)),
    )
    assert meta is not None
    assert meta["documents"] == indexed.num_documents == len(DOCUMENTS)
    assert meta["sentences"] == sum(map(len, DOCUMENTS))
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    sequences = iter(IndexedDataset(str(data / "text_document")))
    for number, texts in enumerate(DOCUMENTS):
        expected = tokenizer.encode_batch(texts)
        assert [next(sequences).tolist() for _ in texts] == expected
        assert indexed.document(number).tolist() == list(itertools.chain(*expected))


def test_a_sample_is_two_segments_of_a_document_with_masked_whole_words(data: Path, build: Build) -> None:
    tokenizer = bert_tokenizer(str(data))
    word_of = {token_id: word for word, token_id in tokenizer.vocab.items()}
    cls, sep, mask = (tokenizer.special_ids[name] for name in ("[CLS]", "[SEP]", "[MASK]"))
    indexed = IndexedTokens(data / "text_document")
    texts = [f" {' '.join(map(str, indexed.document(number)))} " for number in range(len(DOCUMENTS))]
    masked = becomes_mask = stays = total = 0
    for (tokens_S, types_S, seen_S), (labels_S, swapped) in map(
        build(400, short_seq_prob=0.0).__getitem__, range(400)
    ):
        assert tokens_S.shape == types_S.shape == seen_S.shape == labels_S.shape == (48,)
        end = int(seen_S.sum())
        assert seen_S[:end].all() and not tokens_S[end:].any() and not types_S[end:].any()
        # A masked word is not replaced by padding or a frame token.
        chosen_S = labels_S != NO_LABEL
        assert not chosen_S[end:].any() and tokens_S[:end].all()
        restored = torch.where(chosen_S, labels_S, tokens_S)[:end].tolist()
        border = int((types_S[:end] == 0).sum())
        assert restored[0] == cls and restored[border - 1] == restored[-1] == sep
        first, second = restored[1 : border - 1], restored[border:-1]
        assert sep not in first + second and types_S[border:end].all()
        for segment in (first, second):
            assert any(f" {' '.join(map(str, segment))} " in text for text in texts)
        whole = (second + first) if swapped else (first + second)
        if end < 45:  # nothing was truncated, so the segments are consecutive
            assert any(f" {' '.join(map(str, whole))} " in text for text in texts)
        for place in range(1, end - 1):
            if word_of[restored[place]].startswith("##") and place not in (1, border):
                assert chosen_S[place] == chosen_S[place - 1], "a word is masked whole or not at all"
        total += end
        masked += int(chosen_S.sum())
        becomes_mask += int((tokens_S == mask).sum())
        stays += int((tokens_S == labels_S).sum())
    assert 0.10 < masked / total < 0.15
    assert becomes_mask / masked == pytest.approx(0.8, abs=0.03)
    assert stays / masked == pytest.approx(0.1, abs=0.03)


def test_half_of_the_samples_are_swapped(build: Build) -> None:
    dataset = build(600)
    assert sum(int(dataset[i][1][1]) for i in range(600)) / 600 == pytest.approx(0.5, abs=0.08)


def test_same_arguments_same_samples_and_each_argument_matters(build: Build) -> None:
    expected = flat(build(60))
    assert flat(build(60)) == expected
    for other in (
        build(60, seed=2),
        build(60, mask_prob=0.3),
        build(60, short_seq_prob=0.9),
        build(60, split="9,1"),
    ):
        assert flat(other) != expected


def test_a_longer_run_starts_with_the_samples_of_a_shorter_one(data: Path, build: Build) -> None:
    """Check several epochs in any order, without writing files and without a process group."""
    before = sorted(path.name for path in data.parent.rglob("*"))
    long, short = build(700), build(100)
    late = [long[i] for i in (699, 350)]
    assert flat(short) == flat(long)[:100]
    for first, second in zip(late, (long[699], long[350]), strict=True):
        assert torch.equal(first[0][0], second[0][0])
    with pytest.raises(IndexError, match=r"700.*700"):
        long[700]
    assert sorted(path.name for path in data.parent.rglob("*")) == before
    assert not torch.distributed.is_initialized()


def test_an_epoch_has_every_sentence_once(build: Build) -> None:
    part: Any = build(1).parts[0]
    index = part._masked.sample_index
    for epoch in range(3):
        rows = index._epoch(epoch)
        places = sorted((int(first), int(end)) for first, end, _ in rows)
        assert places[0][0] == 0 and places[-1][1] == sum(map(len, DOCUMENTS))
        assert all(end == following for (_, end), (following, _) in itertools.pairwise(places))
        assert all(end - first >= 2 for first, end in places)
    assert not np.array_equal(index._epoch(0)[:10], index._epoch(1)[:10])


def test_short_samples_and_samples_without_pairs(build: Build) -> None:
    (short, _), (usual, _) = (
        (float(np.mean([int(d[i][0][2].sum()) for i in range(100)])), d)
        for d in (build(100, short_seq_prob=1.0), build(100, short_seq_prob=0.0))
    )
    assert short < usual - 5
    dataset = build(20, binary_head=False)
    for i in range(20):
        (_, types_S, _), labels = dataset[i]
        assert len(labels) == 1 and not types_S.any()


def test_a_blend_interleaves_its_parts_by_weight(data: Path) -> None:
    data_path = ["0.25", str(data), "0.75", str(data)]
    tokenizer = bert_tokenizer(data_path)
    blend, *_ = build_bert_datasets(data_path, "1", 48, (40, 0, 0), 1, tokenizer, BertOptions())
    alone, *_ = build_bert_datasets(str(data), "1", 48, (40, 0, 0), 1, tokenizer, BertOptions())
    single = flat(alone)
    counts = [flat(blend).count(sample) for sample in single[:10]]
    assert counts == [2] * 10 and flat(blend).count(single[29]) == 1 and len(blend) == 40


def test_other_data_and_tokenizers_are_refused(data: Path, tmp_path: Path) -> None:
    gpt = prepared(tmp_path, "--vocab-size", "300")
    with pytest.raises(ConfigError, match=r"--data-path.*--tokenizer-type wordpiece --source"):
        bert_tokenizer(str(gpt))
    with pytest.raises(ConfigError, match=rf"--tokenizer.*{gpt}"):
        bert_tokenizer(str(data), str(gpt))
    other = tmp_path / "vocab.txt"
    other.write_text("\n".join([*SPECIAL_TOKENS, "two"]) + "\n")
    with pytest.raises(ConfigError, match=str(data)):
        bert_tokenizer(str(data), str(other))


def test_data_without_samples_is_refused(
    data: Path, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"--mask-prob.*got 0\.0"):
        build(1, mask_prob=0.0)
    with pytest.raises(ConfigError, match=r"--short-seq-prob.*got 2"):
        build(1, short_seq_prob=2)
    with pytest.raises(ConfigError, match=r"--mask-prob.* 9 .*--seq-length 10\b"):
        build(1, seq_length=9)
    with pytest.raises(ConfigError, match=r"--split.*train.*got 0\b"):
        build(1, split="0,1")

    # Two documents of one sentence, then one document with a sentence of 600 tokens, as Megatron writes them.
    for lengths, borders, numbers in (
        ([5, 5], [0, 1, 2], r"got 2\b.*\b2\b.*\b0\b.*\b512\b"),
        ([5, 600], [0, 2], r"got 1\b.*\b0\b.*\b1\b.*\b512\b"),
    ):
        prefix = tmp_path / "long"
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        for first, end in itertools.pairwise(borders):
            builder.add_document(np.full(sum(lengths[first:end]), 7, np.uint16), lengths[first:end])
        builder.finalize(f"{prefix}.idx")
        tokenizer = bert_tokenizer(str(prefix), str(data))
        with pytest.raises(ConfigError, match=numbers):
            build_bert_datasets(str(prefix), "1", 48, (1, 0, 0), 1, tokenizer, BertOptions())

    monkeypatch.setattr(megatron_bert, "package_version", lambda name: None)
    with pytest.raises(ConfigError, match=r"megatron-core.*0\.16.*pip install 'ds_ext\[data\]'"):
        build(1)


@pytest.mark.parametrize(
    ("version", "triton", "is_supported"),
    [("0.15.3", None, False), ("0.16.1", None, True), ("0.19.2", None, False), ("0.19.2", "3.9.0", True)],
)
def test_versions_of_megatron(
    monkeypatch: pytest.MonkeyPatch, version: str, triton: str | None, is_supported: bool
) -> None:
    versions = {"megatron-core": version, "triton": triton}
    monkeypatch.setattr(megatron_bert, "package_version", versions.get)
    with nullcontext() if is_supported else pytest.raises(ConfigError, match=re.escape(version)):
        megatron_bert.require_megatron()
