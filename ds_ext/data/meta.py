"""`meta.json` beside prepared data: what it was made from; checks that it fits tokenizer and model."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_ext.data.blend import parse_data_path
from ds_ext.data.indexed import IndexedTokens, require_files
from ds_ext.data.layout import DATA_NAME, META_NAME
from ds_ext.data.tokenizer_base import Tokenizer
from ds_ext.errors import ConfigError

PROBED_BLOCKS = 256
PROBED_BLOCK_TOKENS = 4096
COMPARED_BLOCKS = 64
COMPARED_BLOCK_BYTES = 4096


def read_meta(data_path: str | Sequence[str]) -> dict[str, Any] | None:
    """`meta.json` of the data, None when there is none; of a blend, what all parts agree on.

    Raises ConfigError when the data files themselves are missing, or the file is damaged.

    Keys: source, documents, tokens, bytes, vocab_size, eod_id, max_token_id, tokenizer (a file name beside
    it), tokenizer_fingerprint, unigram_entropy_nats, versions, arguments.
    """
    _, prefixes = parse_data_path(data_path)
    for prefix in prefixes:
        require_files(prefix)
    metas = [_read_one(prefix) for prefix in prefixes]
    first = metas[0]
    if first is None or None in metas:
        return None
    return {
        key: value for key, value in first.items() if all(meta and meta.get(key) == value for meta in metas)
    }


def check_tokenizer(data_path: str | Sequence[str], tokenizer: Tokenizer) -> None:
    """Raise ConfigError when data and tokenizer do not belong together; without `meta.json`, by the ids."""
    _, prefixes = parse_data_path(data_path)
    for prefix in prefixes:
        meta = _read_one(prefix)
        if meta is None:
            check_vocab_size([str(prefix)], tokenizer.vocab_size)
        elif meta["tokenizer_fingerprint"] != tokenizer.fingerprint:
            raise ConfigError(
                f"the tokenizer does not match the data {prefix}: the data was made with vocabulary "
                f"{meta['vocab_size']}, fingerprint {meta['tokenizer_fingerprint']}; this tokenizer has "
                f"vocabulary {tokenizer.vocab_size}, fingerprint {tokenizer.fingerprint}. Use "
                f"{prefix.parent / meta['tokenizer']}, or prepare the data again with `python -m ds_ext "
                "prepare --tokenizer THIS_TOKENIZER --force`."
            )


def check_vocab_size(data_path: str | Sequence[str], vocab_size: int) -> None:
    """Raise ConfigError when the data holds a token id that a model of `vocab_size` tokens cannot embed."""
    _, prefixes = parse_data_path(data_path)
    for prefix in prefixes:
        meta = _read_one(prefix)
        largest = _probe_max_token(prefix) if meta is None else meta["max_token_id"]
        if largest >= vocab_size:
            known = "" if meta is None else f" (its tokenizer has {meta['vocab_size']} tokens)"
            raise ConfigError(
                f"the data {prefix} holds token id {largest}{known}, the model has a vocabulary of "
                f"{vocab_size}. Give the model at least {largest + 1} tokens, or use the tokenizer that the "
                "data was made with."
            )


def fingerprint(data_path: str | Sequence[str]) -> str:
    """Return a checksum of weights, sizes of files and 64 blocks of 4 KiB of each file, spread evenly.

    The same data in different folders have the same one; it takes milliseconds for files of any size.
    """
    weights, prefixes = parse_data_path(data_path)
    crc = zlib.crc32(" ".join(map(str, weights)).encode())
    for path in (Path(f"{prefix}{suffix}") for prefix in prefixes for suffix in (".idx", ".bin")):
        size = path.stat().st_size
        crc = zlib.crc32(str(size).encode(), crc)
        with path.open("rb") as file:
            last = max(0, size - COMPARED_BLOCK_BYTES)
            for block in range(COMPARED_BLOCKS):
                file.seek(last * block // (COMPARED_BLOCKS - 1))
                crc = zlib.crc32(file.read(COMPARED_BLOCK_BYTES), crc)
    return f"{crc:08x}"


def _probe_max_token(prefix: Path) -> int:
    """Largest id in blocks spread evenly over the file, which is quick for files of any size."""
    tokens = IndexedTokens(prefix).tokens
    step = max(PROBED_BLOCK_TOKENS, len(tokens) // PROBED_BLOCKS)
    starts = range(0, len(tokens), step)
    return max((int(tokens[start : start + PROBED_BLOCK_TOKENS].max()) for start in starts), default=0)


def _read_one(prefix: Path) -> dict[str, Any] | None:
    path = prefix.parent / META_NAME
    # A folder may hold other prefixes beside the prepared one; the file speaks for that one only.
    if prefix.name != DATA_NAME or not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"{path} is not valid JSON: {error}. Prepare the data again with --force."
        ) from error
