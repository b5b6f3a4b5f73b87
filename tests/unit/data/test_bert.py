"""BERT's data: sentences, WordPiece, and samples that are what the text says, the same for everyone."""

import argparse
import importlib.metadata
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_ext.data import prepare
from ds_ext.data.bert import (NO_LABEL, BertDataset, BertOptions, bert_tokenizer, build_bert_datasets)
from ds_ext.data.indexed import IndexedTokens
from ds_ext.data.meta import read_meta
from ds_ext.data.sentences import (LONGEST_WORDS, split_sentences)
from ds_ext.data.tokenizer import load_tokenizer
from ds_ext.data.wordpiece import (SPECIAL_TOKENS, WordPieceTokenizer, train_wordpiece)
from ds_ext.errors import ConfigError

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def sentence(document: int, number: int) -> str:
    """A sentence that occurs once in the corpus, with words of more than one piece among its own."""
    words = [NUMBERS[(document * 7 + number * 3 + place) % 10] for place in range(3 + number % 5)]
    return f"Stage{document} of pipe{number} takes {' and '.join(words)}."


DOCUMENTS = [[sentence(document, number) for number in range(8 + document % 9)] for document in range(40)]


def prepared(folder: Path, *words: str) -> Path:
    """A folder made by `prepare` from the documents above."""
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": "\n".join(texts)}) + "\n" for texts in DOCUMENTS))
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    output = folder / "data"
    assert prepare.run(parser.parse_args(["--source", str(source), "--output", str(output), *words])) == 0
    return output


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("bert"), "--tokenizer-type", "wordpiece", "--vocab-size", "150")


Build = Callable[..., BertDataset]


@pytest.fixture(scope="module")
def build(data: Path) -> Build:
    """The training split of the corpus: build(samples, seed=..., seq_length=..., **options)."""
    tokenizer = bert_tokenizer(str(data))

    def make(
        samples: int, seed: int = 1, seq_length: int = 48, split: str = "1", **options: Any
    ) -> BertDataset:
        wanted = BertOptions(**options)
        return build_bert_datasets(str(data), split, seq_length, (samples, 0, 0), seed, tokenizer, wanted)[0]

    return make


def flat(dataset: BertDataset) -> list[list[int]]:
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


def test_a_long_listing_is_cut_at_the_ends_of_its_lines() -> None:
    lines = [f"    call({i}, of, five, words)" for i in range(40)]
    pieces = split_sentences("\n".join(lines))
    assert [line.strip() for line in "\n".join(pieces).split("\n")] == [line.strip() for line in lines]
    assert len(pieces) > 3 and all(len(piece.split()) <= LONGEST_WORDS for piece in pieces)


@given(st.text(alphabet="aB.?!\"') \n", max_size=300))
def test_no_word_is_lost(text: str) -> None:
    assert " ".join(split_sentences(text)).split() == text.split()


def test_word_piece_files_say_the_same(data: Path, tmp_path: Path) -> None:
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
        again = load_tokenizer(path)
        assert again.encode(text) == ids and again.fingerprint == tokenizer.fingerprint
    cased = tmp_path / "vocab.txt"
    cased.write_text("\n".join([*SPECIAL_TOKENS, "Two", "two"]) + "\n")
    assert load_tokenizer(cased).encode("Two two TWO") == [5, 6, 1]


def test_a_vocabulary_that_is_none_for_bert_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("[UNK]\ntwo\n[CLS]\n[PAD]\n[SEP]\n")
    with pytest.raises(ConfigError, match=r"vocab.txt has no \[MASK\] in its vocabulary of 5"):
        load_tokenizer(path)
    path.write_text("\n".join(reversed(SPECIAL_TOKENS)) + "\n")
    with pytest.raises(ConfigError, match=r"has \[PAD\] as token 4; it must be token 0"):
        load_tokenizer(path)
    with pytest.raises(ConfigError, match=r"more than 5 .*; got 5"):
        train_wordpiece(["one two"], 5)


def test_prepared_documents_hold_a_sequence_for_every_sentence(
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
        # No word stands in for a masked one that would be taken for padding or a frame.
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
        if end < 45:  # nothing was trimmed, so the two belong together
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


def test_a_longer_run_begins_with_the_samples_of_a_shorter_one(data: Path, build: Build) -> None:
    """Over several epochs, in any order; nothing is written beside the data and no process group is needed."""
    before = sorted(path.name for path in data.parent.rglob("*"))
    long, short = build(700), build(100)
    late = [long[i] for i in (699, 350)]
    assert flat(short) == flat(long)[:100]
    for found, again in zip(late, (long[699], long[350]), strict=True):
        assert torch.equal(found[0][0], again[0][0])
    with pytest.raises(IndexError, match="700 of 700"):
        long[700]
    assert sorted(path.name for path in data.parent.rglob("*")) == before
    assert not torch.distributed.is_initialized()


def test_an_epoch_has_every_sentence_once(build: Build) -> None:
    index = build(1)._parts[0]._masked.sample_index
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


def test_a_blend_takes_its_parts_in_turn(data: Path) -> None:
    tokenizer = bert_tokenizer(["0.25", str(data), "0.75", str(data)])
    words = ["0.25", str(data), "0.75", str(data)]
    blend, *_ = build_bert_datasets(words, "1", 48, (40, 0, 0), 1, tokenizer, BertOptions())
    alone, *_ = build_bert_datasets(str(data), "1", 48, (40, 0, 0), 1, tokenizer, BertOptions())
    single = flat(alone)
    counts = [flat(blend).count(sample) for sample in single[:10]]
    assert counts == [2] * 10 and flat(blend).count(single[29]) == 1 and len(blend) == 40


def test_other_data_and_tokenizers_are_refused(data: Path, tmp_path: Path) -> None:
    gpt = prepared(tmp_path, "--vocab-size", "300")
    with pytest.raises(ConfigError, match=r"one sequence a document.*--tokenizer-type wordpiece --source"):
        bert_tokenizer(str(gpt))
    with pytest.raises(ConfigError, match="is no WordPiece tokenizer"):
        bert_tokenizer(str(data), str(gpt))
    other = tmp_path / "vocab.txt"
    other.write_text("\n".join([*SPECIAL_TOKENS, "two"]) + "\n")
    with pytest.raises(ConfigError, match="does not match the data"):
        bert_tokenizer(str(data), str(other))


def test_what_cannot_be_sampled_is_refused(
    data: Path, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, message in (
        ({"mask_prob": 0.0}, "--mask-prob must be above 0"),
        ({"short_seq_prob": 2}, "from 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(1, **options)
    with pytest.raises(
        ConfigError, match=r"sample of 9 tokens would be masked .* Use --seq-length 10 or more"
    ):
        build(1, seq_length=9)
    with pytest.raises(ConfigError, match=r"train split of .* has no sample: of its 0 documents"):
        build(1, split="0,1")

    # As Megatron's tool writes them: one sentence a document, then one of 600 tokens.
    for lengths, borders, what in (
        ([5, 5], [0, 1, 2], "2 have fewer than 2 sentences, and 0 have"),
        ([5, 600], [0, 2], "0 have fewer than 2 sentences, and 1 have one of more than 512 tokens"),
    ):
        prefix = tmp_path / "long"
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        for first, end in itertools.pairwise(borders):
            builder.add_document(np.full(sum(lengths[first:end]), 7, np.uint16), lengths[first:end])
        builder.finalize(f"{prefix}.idx")
        tokenizer = bert_tokenizer(str(prefix), str(data))
        with pytest.raises(ConfigError, match=what):
            build_bert_datasets(str(prefix), "1", 48, (1, 0, 0), 1, tokenizer, BertOptions())

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(
        ConfigError, match=r"megatron-core 0\.16; installed is none: pip install 'ds_ext\[data\]'"
    ):
        build(1)
