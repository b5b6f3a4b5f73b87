"""``meta.json`` of prepared data, and checks of the data against the tokenizer and the model."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...model.data_layout import DATA_NAME, META_NAME, files_checksum
from .blend import parse_data_path
from .indexed import IndexedTokens, require_files
from .tokenizer_base import Tokenizer

PROBED_BLOCKS = 256
PROBED_BLOCK_TOKENS = 4096


def read_meta(data_path: str | Sequence[str]) -> dict[str, Any] | None:
    """Return ``meta.json`` of the data; for a blend, the entries common to all parts. None if a part has no such file.

    Keys: format, arguments, source, documents, sentences (BERT only), tokens, bytes, max_token_id,
    unigram_entropy_nats, vocab_size, eod_id, tokenizer (file name), tokenizer_fingerprint, versions; for text also
    special_tokens (those in the text, with counts); for chat also without_assistant, without_assistant_lines (the first
    ones), assistant_tokens, longer_than, ignored_keys (rows by key), loss_mask (file name).
    """
    _, prefixes = parse_data_path(data_path)
    for prefix in prefixes:
        require_files(prefix)
    metas = [meta for _, meta in _parts(data_path) if meta is not None]
    if not metas or len(metas) < len(prefixes):
        return None
    return {key: value for key, value in metas[0].items() if all(meta.get(key) == value for meta in metas)}


def loss_mask_prefix(prefix: Path) -> Path | None:
    meta = _read_one(prefix)
    return None if meta is None or "loss_mask" not in meta else prefix.parent / meta["loss_mask"]


def has_chat(data_path: str | Sequence[str]) -> bool:
    return any(meta is not None and "loss_mask" in meta for _, meta in _parts(data_path))


def check_tokenizer(data_path: str | Sequence[str], tokenizer: Tokenizer) -> None:
    """Raise ConfigError unless the data was made with ``tokenizer``. Without ``meta.json``, compare token ids only."""
    for prefix, meta in _parts(data_path):
        if meta is None:
            check_vocab_size([str(prefix)], tokenizer.vocab_size)
        elif meta["tokenizer_fingerprint"] != tokenizer.fingerprint:
            raise ConfigError(
                f"tokenizer: fingerprint does not match the data {prefix} (got vocabulary {tokenizer.vocab_size}, "
                f"fingerprint {tokenizer.fingerprint}; the data has vocabulary {meta['vocab_size']}, fingerprint "
                f"{meta['tokenizer_fingerprint']}). Use {prefix.parent / meta['tokenizer']}, or prepare the data again "
                "with `python -m ds_ext prepare --tokenizer THIS_TOKENIZER --force`."
            )


def check_one_tokenizer(data_path: str | Sequence[str]) -> None:
    metas = [(prefix, meta) for prefix, meta in _parts(data_path) if meta is not None]
    for prefix, meta in metas[1:]:
        if meta["tokenizer_fingerprint"] != metas[0][1]["tokenizer_fingerprint"]:
            raise ConfigError(
                f"--data-path: the parts of a blend need the same tokenizer (got fingerprint "
                f"{metas[0][1]['tokenizer_fingerprint']} in {metas[0][0]}, {meta['tokenizer_fingerprint']} in "
                f"{prefix}). Prepare all parts with the same --tokenizer."
            )


def check_vocab_size(data_path: str | Sequence[str], vocab_size: int) -> None:
    for prefix, meta in _parts(data_path):
        largest = _probe_max_token(prefix) if meta is None else meta["max_token_id"]
        if largest >= vocab_size:
            origin = "" if meta is None else f"; the tokenizer of the data has {meta['vocab_size']}"
            raise ConfigError(
                f"{prefix}: token id {largest} is outside the vocabulary (got {vocab_size} tokens{origin}). Use a "
                f"vocabulary of at least {largest + 1} tokens, or the tokenizer of the data."
            )


def fingerprint(data_path: str | Sequence[str]) -> str:
    """Return a checksum of weights, file sizes and 64 evenly spaced blocks of 4 KiB per file.

    The checksum includes the loss masks of chat data. It does not depend on the folder, and takes milliseconds for
    files of any size.
    """
    weights, prefixes = parse_data_path(data_path)
    masks = [mask for mask in map(loss_mask_prefix, prefixes) if mask is not None]
    files = [Path(f"{prefix}{suffix}") for prefix in (*prefixes, *masks) for suffix in (".idx", ".bin")]
    return f"{files_checksum(files, zlib.crc32(' '.join(map(str, weights)).encode())):08x}"


def _parts(data_path: str | Sequence[str]) -> list[tuple[Path, dict[str, Any] | None]]:
    """Return the prefix and the ``meta.json`` of each part of a blend."""
    return [(prefix, _read_one(prefix)) for prefix in parse_data_path(data_path)[1]]


def _probe_max_token(prefix: Path) -> int:
    """Return the largest token id in evenly spaced blocks, which is fast for files of any size."""
    tokens = IndexedTokens(prefix).tokens
    step = max(PROBED_BLOCK_TOKENS, len(tokens) // PROBED_BLOCKS)
    starts = range(0, len(tokens), step)
    return max((int(tokens[start : start + PROBED_BLOCK_TOKENS].max()) for start in starts), default=0)


def _read_one(prefix: Path) -> dict[str, Any] | None:
    path = prefix.parent / META_NAME
    # The file describes only the data that `prepare` wrote; the folder may contain other prefixes.
    if prefix.name != DATA_NAME or not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"{path}: not valid JSON ({error}). Prepare the data again with --force."
        ) from error
