"""Interface of all tokenizers, and the code shared by those based on the ``tokenizers`` library."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TOKENIZER_CONFIG = "tokenizer_config.json"
# Key in it: tokenizer.json splits texts as transformers does, and not as the file from which it was made.
REPLACED = "split_by_transformers"


class Tokenizer(ABC):
    """Conversion of text to token ids and back.

    Attributes:
        vocab_size: largest token id + 1.
        fingerprint: 16 hex digits of the sha256 of vocabulary and merges, and of the splitting rules if transformers
            replaces those of ``tokenizer.json``; equal if all ids have the same meaning.
        special_tokens: texts of the special tokens, such as <|im_end|>.
    """

    vocab_size: int
    eod_id: int
    fingerprint: str
    special_tokens: tuple[str, ...]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without an end-of-document token.

        Special tokens in it are plain text, unless :meth:`parse_special_tokens` was called.
        """
        return self.encode_batch([text])[0]

    @abstractmethod
    def parse_special_tokens(self) -> None:
        """Encode special tokens in texts as their ids from now on. Raises ConfigError if the library cannot."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return ``encode`` of every text, computed on all cores."""

    def encode_documents(self, texts: Sequence[str]) -> list[list[list[int]]]:
        """Return the sequences of each document: one per document, with an end-of-document token."""
        return [[[*ids, self.eod_id]] for ids in self.encode_batch(texts)]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` without special tokens."""

    @abstractmethod
    def save(self, folder: Path) -> list[str]:
        """Write the files of the tokenizer into ``folder``. Return their names; the first is the one to load."""


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer based on the ``tokenizers`` library. ``vocab`` includes special tokens."""

    def __init__(self, backend: Any, is_replaced: bool = False) -> None:
        """Wrap a ``tokenizers.Tokenizer``. ``is_replaced``: transformers splits texts differently than the file."""
        self._is_replaced = is_replaced
        backend.encode_special_tokens = True  # that is, as plain text
        # A tokenizer.json may have the lengths of another program, as that of sentence-transformers.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added_tokens = backend.get_added_tokens_decoder().values()
        self.special_tokens = tuple(token.content for token in added_tokens if token.special)
        self.vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self.vocab.values(), default=-1) + 1

    def parse_special_tokens(self) -> None:
        self._backend.encode_special_tokens = False

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def _declare(self, folder: Path, **values: Any) -> list[str]:
        """Add values to tokenizer_config.json, if there are any, but change none. Return its name."""
        values |= {REPLACED: True} if self._is_replaced else {}
        path = folder / TOKENIZER_CONFIG
        if not values:
            return []
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps({**values, **old}, indent=2) + "\n", encoding="utf-8")
        return [TOKENIZER_CONFIG]

    def _fingerprint_of(self, definition: object) -> str:
        """Return the fingerprint of the vocabulary, and of the splitting rules if transformers replaced them."""
        parts = splitting(json.loads(self._backend.to_str())) if self._is_replaced else None
        return fingerprint_of([definition, parts] if self._is_replaced else definition)


def splitting(serialized: Mapping[str, Any]) -> dict[str, Any]:
    """Return the splitting rules in a ``tokenizer.json``, except vocabulary and merges, and options that are off."""
    model = {key: value for key, value in serialized["model"].items() if key not in ("vocab", "merges")}
    return _options({**{key: serialized[key] for key in ("normalizer", "pre_tokenizer")}, "model": model})


def _options(value: Any) -> Any:
    if isinstance(value, list):
        return [_options(item) for item in value]
    if not isinstance(value, dict):
        return value
    options = {key: _options(item) for key, item in value.items() if key != "trim_offsets"}  # of offsets only
    return {key: item for key, item in options.items() if item not in (None, "") and item is not False}


def fingerprint_of(definition: object) -> str:
    """Return 16 hex digits of the sha256 of a JSON value that defines the token ids."""
    return hashlib.sha256(json.dumps(definition, separators=(",", ":")).encode()).hexdigest()[:16]
