"""Megatron's ``.bin/.idx`` files, which contain concatenated tokens and the document boundaries.

Layout of the ``.idx`` file: magic ``MMIDIDX``, version 1, dtype code, number of sequences, number of document
boundaries, then sequence lengths (int32), byte offsets of the sequences (int64) and document boundaries (int64, in
sequences).
Importing megatron-core takes seconds; this module saves them in every process.
"""

import struct
from collections.abc import Sequence
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...model.data_layout import DATA_NAME, LOSS_MASK_NAME

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
PREPARE_COMMAND = "python -m ds_ext prepare --source stdlib --output"


class IndexedTokens:
    """Documents of one ``.bin/.idx`` pair, memory-mapped.

    Attributes:
        tokens: all tokens in the dtype of the file, document after document.
        document_starts: int64, ``num_documents + 1`` offsets into ``tokens``.
        sequence_lengths: int32, number of tokens of every sequence.
        document_borders: int64, first sequence of every document, and the number of sequences.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        require_files(self.prefix)
        data_path = Path(f"{self.prefix}.bin")
        dtype, self.sequence_lengths, self.document_borders = _read_index(Path(f"{self.prefix}.idx"))
        sequence_starts = np.concatenate(([0], np.cumsum(self.sequence_lengths, dtype=np.int64)))
        self.document_starts: NDArray[np.int64] = sequence_starts[self.document_borders]
        expected_bytes = int(sequence_starts[-1]) * dtype.itemsize
        num_bytes = data_path.stat().st_size
        if num_bytes != expected_bytes:
            raise ConfigError(
                f"{data_path}: the size does not match the index (got {num_bytes} bytes, expected {expected_bytes} "
                "bytes). Copy or prepare both files again."
            )
        # An empty file cannot be mapped.
        self.tokens: NDArray[Any] = (
            np.memmap(data_path, dtype=dtype, mode="r") if num_bytes else np.empty(0, dtype)
        )

    @property
    def num_documents(self) -> int:
        return len(self.document_starts) - 1

    def document(self, index: int) -> NDArray[Any]:
        """Return the tokens of a document as a view of the file."""
        return self.tokens[self.document_starts[index] : self.document_starts[index + 1]]


class IndexedWriter:
    """Writer of ``prefix.bin`` and, at :meth:`close`, ``prefix.idx``."""

    def __init__(self, prefix: Path, dtype: type[np.integer[Any]]) -> None:
        self._prefix, self._dtype = prefix, np.dtype(dtype)
        self._file = BufferedWriter(FileIO(f"{prefix}.bin", "w"))
        self._lengths: list[int] = []
        self._borders = [0]

    def add_document(self, tokens: NDArray[Any], lengths: Sequence[int]) -> None:
        """Append a document: the tokens of its sequences, and their lengths."""
        self._file.write(np.asarray(tokens, self._dtype).tobytes())
        self._lengths += lengths
        self._borders.append(len(self._lengths))

    def close(self) -> None:
        self._file.close()
        lengths = np.array(self._lengths, np.int32)
        offsets = (np.cumsum(lengths, dtype=np.int64) - lengths) * self._dtype.itemsize
        code = next(code for code, dtype in DTYPES.items() if dtype == self._dtype)
        with Path(f"{self._prefix}.idx").open("wb") as file:
            file.write(HEADER.pack(MAGIC, 1, code, len(lengths), len(self._borders)))
            for part in (lengths, offsets, np.array(self._borders, np.int64)):
                file.write(part.tobytes())


class DocumentWriter:
    """Writer of the tokens of documents and, for chat data, of their loss mask.

    Attributes:
        lengths: number of tokens of every document.
    """

    def __init__(self, folder: Path, vocab_size: int, has_mask: bool = False) -> None:
        # Megatron uses two bytes per token for vocabularies below this size.
        self._tokens_file = IndexedWriter(folder / DATA_NAME, np.uint16 if vocab_size < 65500 else np.int32)
        self._mask_file = IndexedWriter(folder / LOSS_MASK_NAME, np.uint8) if has_mask else None
        self._frequencies = np.zeros(vocab_size, dtype=np.int64)  # of the tokens that count as labels
        self._max_token_id = 0
        self.lengths: list[int] = []

    def add(self, sequences: Sequence[Sequence[int]], counted: NDArray[np.uint8] | None = None) -> None:
        """Append a document. ``counted`` is 1 for each token that counts as a label, else 0."""
        tokens = np.concatenate([np.array(sequence, np.int64) for sequence in sequences])
        vocab_size, largest = len(self._frequencies), int(tokens.max())
        if largest >= vocab_size:
            raise ConfigError(
                f"token id {largest} is outside the vocabulary of the tokenizer (got {vocab_size} tokens). Save the "
                "tokenizer again with save_pretrained()."
            )
        self._tokens_file.add_document(tokens, [len(sequence) for sequence in sequences])
        if self._mask_file is not None and counted is not None:
            self._mask_file.add_document(counted, [len(counted)])
        labels = tokens if counted is None else tokens[counted == 1]
        self._frequencies += np.bincount(labels, minlength=vocab_size)
        self._max_token_id = max(self._max_token_id, largest)
        self.lengths.append(len(tokens))

    def close(self) -> dict[str, Any]:
        """Complete the files. Return the counts for meta.json."""
        self._tokens_file.close()
        if self._mask_file is not None:
            self._mask_file.close()
        labels = self._frequencies.sum()
        shares = self._frequencies[self._frequencies > 0] / labels
        return {
            "documents": len(self.lengths),
            "tokens": sum(self.lengths),
            "max_token_id": self._max_token_id,
            "unigram_entropy_nats": float(-(shares * np.log(shares)).sum()),
            **({"assistant_tokens": int(labels), "loss_mask": LOSS_MASK_NAME} if self._mask_file else {}),
        }


def require_files(prefix: Path) -> None:
    for path in (Path(f"{prefix}.bin"), Path(f"{prefix}.idx")):
        if not path.is_file():
            raise ConfigError(f"--data-path: no data file {path}. Run `{PREPARE_COMMAND} {prefix.parent}`.")


def require_windows(name: str, indexed: IndexedTokens, documents: range, seq_length: int) -> None:
    """Raise ConfigError if the split ``name`` has too few tokens for one sample."""
    starts = indexed.document_starts
    tokens = int(starts[documents.stop] - starts[documents.start])
    if tokens <= seq_length:
        raise ConfigError(
            f"--split: the {name} split of {indexed.prefix} is too small for one sample (got {tokens} tokens in "
            f"{len(documents)} of {indexed.num_documents} documents, needs {seq_length + 1} tokens). Increase its "
            f"share, or prepare more text{', or set --eval-iters 0' * (name == 'valid')}."
        )


def _read_index(path: Path) -> tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64]]:
    """Return token dtype, sequence lengths and document boundaries of an ``.idx`` file."""
    num_bytes = path.stat().st_size
    if num_bytes < HEADER.size:
        raise ConfigError(
            f"{path}: the file is incomplete (got {num_bytes} bytes, the header alone has {HEADER.size} bytes). "
            "Copy or prepare it again."
        )
    content = np.memmap(path, dtype=np.uint8, mode="r")
    magic, version, code, num_sequences, num_borders = HEADER.unpack(content[: HEADER.size].tobytes())
    if magic != MAGIC or version != 1 or code not in DTYPES:
        raise ConfigError(
            f"{path}: not a Megatron index (got magic {magic!r}, version {version}, dtype code {code}; expected "
            f"{MAGIC!r}, 1 and one of {sorted(DTYPES)}). Run `{PREPARE_COMMAND} {path.parent}`."
        )
    # Multimodal files end with one more byte per sequence, which text does not need.
    expected_bytes = HEADER.size + 12 * num_sequences + 8 * num_borders
    if num_bytes < expected_bytes:
        raise ConfigError(
            f"{path}: the file is incomplete (got {num_bytes} bytes, expected {expected_bytes} bytes). Copy or "
            "prepare it again."
        )
    lengths = np.frombuffer(content, np.int32, num_sequences, HEADER.size)
    borders = np.frombuffer(content, np.int64, num_borders, HEADER.size + 12 * num_sequences)
    if num_borders == 0 or borders[0] != 0 or borders[-1] != num_sequences or np.any(np.diff(borders) < 0):
        raise ConfigError(
            f"{path}: document boundaries do not cover the sequences in order (got {num_borders} boundaries, "
            f"{num_sequences} sequences). Copy or prepare the file again."
        )
    return np.dtype(DTYPES[code]), lengths, borders
