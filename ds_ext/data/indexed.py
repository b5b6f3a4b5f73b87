"""Reader of Megatron's `.bin/.idx` pair: tokens back to back, and where each document starts.

The `.idx` file: magic `MMIDIDX`, version 1, a dtype code, the number of sequences, the number of document
borders, then the sequence lengths (int32), their byte offsets (int64) and the document borders (int64, in
sequences). Reading it here saves every training process the import of megatron-core, which takes seconds.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_ext.errors import ConfigError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
PREPARE_COMMAND = "python -m ds_ext prepare --source stdlib --output"


class IndexedTokens:
    """The documents of one `.bin/.idx` pair, memory-mapped.

    Attributes:
        tokens: all tokens in the file's own dtype, documents back to back.
        document_starts: int64, `num_documents + 1` offsets into `tokens`.
    """

    def __init__(self, prefix: str | Path) -> None:
        """Open `prefix.bin` and `prefix.idx`.

        Raises:
            ConfigError: a file is missing, is of another kind, or is cut.
        """
        self.prefix = Path(prefix)
        index_path = Path(f"{self.prefix}.idx")
        data_path = Path(f"{self.prefix}.bin")
        require_files(self.prefix)
        self.dtype, lengths, borders = _read_index(index_path)
        sequence_starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        self.document_starts: NDArray[np.int64] = sequence_starts[borders]
        expected_bytes = int(sequence_starts[-1]) * self.dtype.itemsize
        found_bytes = data_path.stat().st_size
        if found_bytes != expected_bytes:
            raise ConfigError(
                f"{data_path} has {found_bytes} bytes, its index describes {expected_bytes}: the copy is "
                "incomplete or the two files are of different data. Copy both again, or prepare the data "
                "again."
            )
        # A file of no bytes cannot be mapped.
        self.tokens: NDArray[Any] = (
            np.memmap(data_path, dtype=self.dtype, mode="r") if found_bytes else np.empty(0, self.dtype)
        )

    @property
    def num_documents(self) -> int:
        return len(self.document_starts) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def document(self, index: int) -> NDArray[Any]:
        """Tokens of document `index`, a view of the file."""
        return self.tokens[self.document_starts[index] : self.document_starts[index + 1]]


def require_files(prefix: Path) -> None:
    """Raise ConfigError, with the command that makes them, unless both files of the pair are there."""
    for path in (Path(f"{prefix}.bin"), Path(f"{prefix}.idx")):
        if not path.is_file():
            raise ConfigError(f"there is no data file {path}. Prepare one: {PREPARE_COMMAND} {prefix.parent}")


def _read_index(path: Path) -> tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64]]:
    """Token dtype, length of each sequence, and the sequence that each document begins with, plus the end."""
    content = path.read_bytes()
    if len(content) < HEADER.size:
        raise ConfigError(
            f"{path} is cut: {len(content)} bytes, the header alone has {HEADER.size}. Copy or prepare it "
            "again."
        )
    magic, version, code, num_sequences, num_borders = HEADER.unpack_from(content)
    if magic != MAGIC or version != 1 or code not in DTYPES:
        raise ConfigError(
            f"{path} is not a Megatron index (magic {magic!r}, version {version}, dtype code {code}; "
            f"expected {MAGIC!r}, 1 and one of {sorted(DTYPES)}). Make one with: {PREPARE_COMMAND} "
            f"{path.parent}"
        )
    # Files for several kinds of input carry one more byte per sequence at the end, which text does not need.
    expected_bytes = HEADER.size + 12 * num_sequences + 8 * num_borders
    if len(content) < expected_bytes:
        raise ConfigError(
            f"{path} is cut: {len(content)} bytes of {expected_bytes}. Copy or prepare it again."
        )
    lengths = np.frombuffer(content, np.int32, num_sequences, HEADER.size)
    borders = np.frombuffer(content, np.int64, num_borders, HEADER.size + 12 * num_sequences)
    if num_borders == 0 or borders[0] != 0 or borders[-1] != num_sequences or np.any(np.diff(borders) < 0):
        raise ConfigError(
            f"{path} is damaged: its document borders do not cover its {num_sequences} sequences in order."
        )
    return np.dtype(DTYPES[code]), lengths, borders
