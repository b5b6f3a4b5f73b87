"""GPT samples: reproducible, every token once per epoch; splits, blends, checks of data against tokenizer."""

import json
import struct
import time
from collections import Counter
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ext.errors import ConfigError
from ds_ext.recipes.data.blend import BlendTable, parse_data_path
from ds_ext.recipes.data.gpt import GPTDataset, build_gpt_datasets
from ds_ext.recipes.data.indexed import IndexedTokens
from ds_ext.recipes.data.meta import check_one_tokenizer, check_tokenizer, check_vocab_size, read_meta
from ds_ext.recipes.data.tokenizer import train_bpe
from ds_ext.recipes.data.tokenizer_base import Tokenizer
from tests.processor import python_s

EOD = 0


def write_documents(prefix: Path, lengths: list[int], first_token: int = 1) -> np.ndarray:
    """Write documents of consecutive numbers that end with token 0; every other token occurs once."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    numbers = iter(range(first_token, first_token + sum(lengths)))
    documents = [[next(numbers) for _ in range(length - 1)] + [EOD] for length in lengths]
    tokens = np.array([*chain.from_iterable(documents)], np.int32)
    tokens.tofile(f"{prefix}.bin")
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])) * 4
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, len(lengths), len(lengths) + 1)
    borders = np.arange(len(lengths) + 1, dtype=np.int64)
    arrays = (np.array(lengths, np.int32), starts.astype(np.int64), borders)
    Path(f"{prefix}.idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    return tokens


def dataset(prefix: Path, num_samples: int, seq_length: int = 8, seed: int = 1) -> Any:
    indexed = IndexedTokens(prefix)
    return GPTDataset(indexed, range(indexed.num_documents), seq_length, num_samples, seed)


def all_samples(data: Any) -> list[list[int]]:
    return [data[i][0].tolist() for i in range(len(data))]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_documents(tmp_path / "a", [7, 30, 1, 1, 12, 50, 3, 25, 1, 70])
    return tmp_path / "a"


def test_labels_are_the_tokens_shifted_by_one(prefix: Path) -> None:
    for tokens, labels in (dataset(prefix, 24)[i] for i in range(24)):
        assert tokens.shape == labels.shape == (8,)
        assert str(tokens.dtype) == "torch.int64"
        assert tokens[1:].tolist() == labels[:-1].tolist()


def test_an_epoch_has_every_token_once_as_label_but_first_and_tail(prefix: Path) -> None:
    data = dataset(prefix, 0)
    assert data.num_tokens == 200
    assert data.samples_per_epoch == 24
    data = dataset(prefix, 24)
    labels = Counter(token for i in range(24) for token in data[i][1].tolist() if token != EOD)
    assert max(labels.values()) == 1
    # Of 200 tokens 192 are labels, except the first and the last 7; at most 10 of them end documents.
    assert 192 - 10 <= len(labels) <= 192


def test_documents_stay_whole_and_end_with_their_token(prefix: Path) -> None:
    data = dataset(prefix, 24)
    for i in range(24):
        tokens, labels = (part.tolist() for part in data[i])
        for token, label in zip(tokens, labels, strict=True):
            assert label in (token + 1, EOD) or token == EOD


def test_window_across_many_short_documents(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [1] * 40)
    assert all_samples(dataset(tmp_path / "a", 4)) == [[EOD] * 8] * 4


def test_same_arguments_same_samples_and_each_argument_matters(prefix: Path) -> None:
    reference = all_samples(dataset(prefix, 60))
    assert all_samples(dataset(prefix, 60)) == reference
    assert all_samples(dataset(prefix, 60, seed=2)) != reference
    indexed = IndexedTokens(prefix)
    other_split = GPTDataset(indexed, range(indexed.num_documents), 8, 60, 1, name="valid")
    assert all_samples(other_split) != reference


def test_longer_run_starts_with_the_samples_of_a_shorter_one(prefix: Path) -> None:
    assert all_samples(dataset(prefix, 100))[:60] == all_samples(dataset(prefix, 60))


def test_epochs_differ_in_windows_not_only_in_order(prefix: Path) -> None:
    samples = all_samples(dataset(prefix, 48))
    first, second = ({tuple(sample) for sample in part} for part in (samples[:24], samples[24:]))
    assert len(first - second) > 12


def test_access_in_any_order(prefix: Path) -> None:
    expected = all_samples(dataset(prefix, 100))
    data = dataset(prefix, 100)
    for i in (99, 0, 50, 24, 23, 99, 1):
        assert data[i][0].tolist() == expected[i]
    with pytest.raises(IndexError, match=r"100.*100"):
        data[100]


def test_ten_million_tokens_are_indexed_without_a_python_loop_over_tokens(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [2000] * 5000)
    started_s = time.process_time()
    data = dataset(tmp_path / "a", 1_000_000, seq_length=128)
    assert data[5][0].shape == (128,)
    assert data[900_000][0].shape == (128,)
    assert time.process_time() - started_s < 8 * python_s()


def test_split_shares_documents_without_overlap(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [20] * 100)
    train, valid, test = build_gpt_datasets(str(tmp_path / "a"), "80,15,5", 7, (200, 40, 10), seed=3)
    tokens_of = [
        {token for sample in all_samples(data) for token in sample} - {EOD} for data in (train, valid, test)
    ]
    # Document d contains the numbers 19*d+1 .. 19*d+19.
    assert [(min(tokens) - 1) // 19 for tokens in tokens_of] == [0, 80, 95]
    assert [(max(tokens) - 1) // 19 for tokens in tokens_of] == [79, 94, 99]


def test_split_without_samples_may_be_empty(prefix: Path) -> None:
    train, valid, test = build_gpt_datasets(str(prefix), "1", 8, (10, 0, 0), seed=0)
    assert [len(data) for data in (train, valid, test)] == [10, 0, 0]
    with pytest.raises(ConfigError, match=r"--split.*valid.*\b0\b.*\b0\b.*\b9\b"):
        build_gpt_datasets(str(prefix), "100,0,0", 8, (10, 5, 0), seed=0)


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "0,0", "90,-1", "nan", "inf"])
def test_bad_split_is_refused(prefix: Path, split: str) -> None:
    with pytest.raises(ConfigError, match="--split"):
        build_gpt_datasets(str(prefix), split, 8, (1, 0, 0), seed=0)


@pytest.mark.parametrize(("seq_length", "seed"), [(0, 1), (8, -1)])
def test_numbers_out_of_range_are_refused(prefix: Path, seq_length: int, seed: int) -> None:
    with pytest.raises(ConfigError, match=f"{seq_length}.*{seed}"):
        dataset(prefix, 1, seq_length, seed)


def test_blend_draws_by_weight_from_each_part_in_its_own_order(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", [50] * 20)
    write_documents(tmp_path / "b" / "text_document", [50] * 20, first_token=5000)
    blend = f"0.3 {tmp_path}/a 0.7 {tmp_path}/b"
    train, _, _ = build_gpt_datasets(blend, "100", 8, (200, 0, 0), seed=5)
    from_list, _, _ = build_gpt_datasets(blend.split(), "100", 8, (200, 0, 0), seed=5)
    assert all_samples(from_list) == all_samples(train)
    only_b, _, _ = build_gpt_datasets(str(tmp_path / "b"), "100", 8, (140, 0, 0), seed=5)
    from_b = [sample for sample in all_samples(train) if max(sample) >= 5000]
    assert from_b == all_samples(only_b)


@given(
    weights=st.lists(
        st.fractions(min_value=Fraction(1, 100), max_value=50, max_denominator=100), min_size=1, max_size=6
    ),
    num_samples=st.integers(0, 300),
)
def test_blend_keeps_every_share_within_one_sample(weights: list[Fraction], num_samples: int) -> None:
    table = BlendTable(weights, num_samples)
    counts = [0] * len(weights)
    for index in range(num_samples):
        source, place = table.locate(index)
        assert place == counts[source]
        counts[source] += 1
        for weight, count in zip(weights, counts, strict=True):
            assert abs(count - weight / sum(weights) * (index + 1)) < 1
    assert counts == table.counts


def test_data_path_accepts_folders_prefixes_and_files(tmp_path: Path) -> None:
    write_documents(tmp_path / "folder" / "text_document", [5])
    write_documents(tmp_path / "with space", [5])
    prefixes = {
        str(tmp_path / "folder"): tmp_path / "folder" / "text_document",
        str(tmp_path / "folder" / "text_document"): tmp_path / "folder" / "text_document",
        str(tmp_path / "folder" / "text_document.bin"): tmp_path / "folder" / "text_document",
        str(tmp_path / "with space.idx"): tmp_path / "with space",
        str(tmp_path / "with space"): tmp_path / "with space",
    }
    for path, prefix in prefixes.items():
        assert parse_data_path(path) == ([1], [prefix])
        assert parse_data_path([path]) == ([1], [prefix])
    assert parse_data_path([]) == ([], [])
    assert parse_data_path("0.3 a_document 0.7 b_document")[0] == [Fraction(3, 10), Fraction(7, 10)]


@pytest.mark.parametrize("data_path", ["", "a b", "0.3 a 0.7", "-1 a 2 b", "0 a 1 b", "1/0 a 1 b"])
def test_bad_blend_is_refused(data_path: str) -> None:
    with pytest.raises(ConfigError, match="--data-path"):
        parse_data_path(data_path)


def test_missing_data_names_the_file_and_the_command(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "text_document.bin"
    with pytest.raises(ConfigError, match=rf"{missing}.*prepare .*--output {tmp_path}/no"):
        build_gpt_datasets(str(tmp_path / "no"), "100", 8, (1, 0, 0), seed=0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["some words of a small corpus, and some more words of it"], vocab_size=280)


def with_meta(folder: Path, tokenizer: Tokenizer, **changes: Any) -> str:
    write_documents(folder / "text_document", [20] * 10)
    meta = {
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": "tokenizer.json",
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "max_token_id": 200,
    }
    (folder / "meta.json").write_text(json.dumps(meta | changes))
    return str(folder)


def test_matching_tokenizer_passes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    check_tokenizer(with_meta(tmp_path, tokenizer), tokenizer)


def test_other_tokenizer_is_refused_with_both_sizes_and_fingerprints(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = with_meta(tmp_path, tokenizer, vocab_size=4096, tokenizer_fingerprint="0123456789abcdef")
    expected = ("4096", "0123456789abcdef", str(tokenizer.vocab_size), tokenizer.fingerprint)
    with pytest.raises(ConfigError) as error:
        check_tokenizer(path, tokenizer)
    assert all(part in str(error.value) for part in expected)
    with pytest.raises(ConfigError, match="0123456789abcdef"):
        check_tokenizer(f"0.5 {with_meta(tmp_path / 'good', tokenizer)} 0.5 {path}", tokenizer)


def test_parts_of_a_blend_have_one_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    a, b = with_meta(tmp_path / "a", tokenizer), with_meta(tmp_path / "b", tokenizer)
    check_one_tokenizer(f"1 {a} 2 {b}")
    other = with_meta(tmp_path / "c", tokenizer, tokenizer_fingerprint="0123456789abcdef")
    with pytest.raises(ConfigError, match=rf"{tokenizer.fingerprint}.*0123456789abcdef"):
        check_one_tokenizer(f"1 {a} 2 {other}")


def test_token_ids_are_compared_without_meta(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_documents(tmp_path / "small", [200])
    check_tokenizer(str(tmp_path / "small"), tokenizer)
    write_documents(tmp_path / "large", [5] * 40 + [200])
    # 40 documents of four numbers, then one of 199.
    with pytest.raises(ConfigError, match=rf"\b359\b.*\b{tokenizer.vocab_size}\b.*\b360\b"):
        check_tokenizer(str(tmp_path / "large"), tokenizer)


def test_model_vocabulary_must_include_the_largest_id(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = with_meta(tmp_path, tokenizer)
    check_vocab_size(path, 201)
    with pytest.raises(ConfigError, match=r"\b200\b.*\b200\b.*\b201\b"):
        check_vocab_size(path, 200)


def test_meta_of_blend_has_the_entries_common_to_all_parts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    a, b = with_meta(tmp_path / "a", tokenizer), with_meta(tmp_path / "b", tokenizer, max_token_id=150)
    meta = read_meta(f"1 {a} 2 {b}")
    assert meta is not None
    assert meta["vocab_size"] == tokenizer.vocab_size
    assert "max_token_id" not in meta
    write_documents(tmp_path / "c", [5])
    assert read_meta(str(tmp_path / "c")) is None
    assert read_meta(f"1 {a} 2 {tmp_path}/c") is None


def test_meta_of_missing_data(tmp_path: Path, tokenizer: Tokenizer) -> None:
    a = with_meta(tmp_path / "a", tokenizer)
    missing = tmp_path / "b"
    for path in (str(missing), f"1 {a} 2 {missing}"):
        with pytest.raises(ConfigError, match=rf"{missing}/text_document\.bin.*prepare .*{missing}"):
            read_meta(path)
    (tmp_path / "a" / "text_document.idx").unlink()
    with pytest.raises(ConfigError, match=r"text_document\.idx.*ds_ext prepare"):
        read_meta(a)


def test_damaged_meta_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = with_meta(tmp_path, tokenizer)
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(ConfigError, match=r"meta\.json.*JSON"):
        read_meta(path)
