"""File names in a folder of prepared data, and a checksum of large files."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

DATA_NAME = "text_document"
LOSS_MASK_NAME = "loss_mask"
META_NAME = "meta.json"
TOKENIZER_NAMES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt")
COMPARED_BLOCKS = 64
COMPARED_BLOCK_BYTES = 4096


def files_checksum(files: Iterable[Path], crc: int) -> int:
    """Return ``crc`` continued by the sizes and 64 evenly spaced blocks of 4 KiB of every file."""
    for path in files:
        size = path.stat().st_size
        crc = zlib.crc32(str(size).encode(), crc)
        with path.open("rb") as file:
            last = max(0, size - COMPARED_BLOCK_BYTES)
            for block in range(COMPARED_BLOCKS):
                file.seek(last * block // (COMPARED_BLOCKS - 1))
                crc = zlib.crc32(file.read(COMPARED_BLOCK_BYTES), crc)
    return crc
