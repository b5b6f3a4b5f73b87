"""Reader of `.bin/.idx` files: comparison with megatron-core's reader, and errors."""

import struct
import warnings
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_ext.errors import ConfigError
from ds_ext.recipes.data.indexed import IndexedTokens, IndexedWriter


@pytest.fixture(scope="session")
def megatron() -> Any:
    """Return megatron-core's indexed_dataset module, whose import takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.datasets.indexed_dataset")


def write(module: Any, prefix: Path, documents: list[list[list[int]]], dtype: type) -> None:
    """Write documents, which are lists of sequences, which are lists of tokens."""
    builder = module.IndexedDatasetBuilder(str(prefix) + ".bin", dtype=dtype)
    for sequences in documents:
        builder.add_document(
            np.array([*chain.from_iterable(sequences)], dtype), [len(sequence) for sequence in sequences]
        )
    builder.finalize(str(prefix) + ".idx")


@pytest.fixture
def prefix(megatron: Any, tmp_path: Path) -> Path:
    write(megatron, tmp_path / "text_document", [[[1, 2, 3]], [[4]], [[5, 6]]], np.uint16)
    return tmp_path / "text_document"


@pytest.mark.parametrize(("dtype", "largest"), [(np.uint16, 65_499), (np.int32, 2_000_000)])
def test_same_content_as_in_megatron(megatron: Any, tmp_path: Path, dtype: type, largest: int) -> None:
    generator = np.random.default_rng(0)
    documents = [
        [
            generator.integers(0, largest + 1, generator.integers(0, 40)).tolist()
            for _ in range(generator.integers(1, 4))
        ]
        for _ in range(50)
    ]
    write(megatron, tmp_path / "d", documents, dtype)

    ours, theirs = IndexedTokens(tmp_path / "d"), megatron.IndexedDataset(str(tmp_path / "d"))

    assert ours.num_documents == len(theirs.document_indices) - 1 == 50
    assert ours.tokens.dtype == dtype
    for number, (first, last) in enumerate(pairwise(theirs.document_indices)):
        expected = np.concatenate([theirs[sequence] for sequence in range(first, last)])
        np.testing.assert_array_equal(ours.document(number), expected)
    assert len(ours.tokens) == sum(len(sequence) for sequences in documents for sequence in sequences)

    writer = IndexedWriter(tmp_path / "ours", dtype)
    for sequences in documents:
        writer.add_document(np.array([*chain.from_iterable(sequences)]), [*map(len, sequences)])
    writer.close()
    for suffix in (".idx", ".bin"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"d{suffix}").read_bytes()


# Index of two documents, [1, 2, 3], [500] and [7, 65000], in uint16. megatron-core 0.16.1, 0.17.1, 0.18.2 and 0.19.2
# write the same bytes.
INDEX = (
    "4d4d4944494458000001000000000000000803000000000000000300000000000000030000000100000002000000"
    "000000000000000006000000000000000800000000000000000000000000000002000000000000000300000000000000"
)


def test_files_of_other_megatrons(tmp_path: Path) -> None:
    tokens = np.array([1, 2, 3, 500, 7, 65000], np.uint16)
    (tmp_path / "theirs.idx").write_bytes(bytes.fromhex(INDEX))
    (tmp_path / "theirs.bin").write_bytes(tokens.tobytes())
    theirs = IndexedTokens(tmp_path / "theirs")
    assert theirs.tokens.dtype == np.uint16 and theirs.sequence_lengths.tolist() == [3, 1, 2]
    assert [theirs.document(n).tolist() for n in range(2)] == [[1, 2, 3, 500], [7, 65000]]
    writer = IndexedWriter(tmp_path / "ours", np.uint16)
    writer.add_document(tokens[:4], [3, 1])
    writer.add_document(tokens[4:], [2])
    writer.close()
    for suffix in (".idx", ".bin"):
        ours, written = (tmp_path / f"{name}{suffix}" for name in ("ours", "theirs"))
        assert ours.read_bytes() == written.read_bytes()


def test_empty_dataset_can_be_opened(megatron: Any, tmp_path: Path) -> None:
    write(megatron, tmp_path / "d", [[[]]], np.int32)
    assert len(IndexedTokens(tmp_path / "d").tokens) == 0


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_error_for_missing_file_has_the_command_to_create_it(prefix: Path, suffix: str) -> None:
    missing = prefix.with_suffix(suffix)
    missing.unlink()
    with pytest.raises(ConfigError, match=rf"{missing}.*ds_ext prepare .*--output {prefix.parent}"):
        IndexedTokens(prefix)


def test_other_file_is_refused(prefix: Path) -> None:
    index = prefix.with_suffix(".idx")
    index.write_bytes(b"TNTIDX\0\0\0" + index.read_bytes()[9:])
    with pytest.raises(ConfigError, match=r"\.idx.*TNTIDX"):
        IndexedTokens(prefix)


@pytest.mark.parametrize(("suffix", "kept"), [(".idx", 0), (".idx", 20), (".idx", 50), (".bin", 4)])
def test_incomplete_file_is_refused_with_its_size(prefix: Path, suffix: str, kept: int) -> None:
    path = prefix.with_suffix(suffix)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=rf"{path}.*got {kept} "):
        IndexedTokens(prefix)


def test_borders_out_of_order_are_refused(prefix: Path) -> None:
    path = prefix.with_suffix(".idx")
    content = bytearray(path.read_bytes())
    struct.pack_into("<q", content, len(content) - 3 * 8, 3)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)):
        IndexedTokens(prefix)
