"""Interface of all tokenizers, and the code shared by those based on the ``tokenizers`` library."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Tokenizer(ABC):
    """Conversion of text to token ids and back.

    Attributes:
        vocab_size: largest token id + 1.
        eod_id: id of the end-of-document token.
        fingerprint: 16 hex digits of the sha256 of vocabulary and merges; equal if all ids have the same meaning.
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
    """Tokenizer based on the ``tokenizers`` library.

    Attributes:
        vocab: token -> id, including special tokens.
    """

    def __init__(self, backend: Any) -> None:
        """Wrap a ``tokenizers.Tokenizer``."""
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
        """Encode special tokens in texts as their ids from now on."""
        self._backend.encode_special_tokens = False

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of every text, computed on all cores."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` without special tokens."""
        return self._backend.decode(list(ids), skip_special_tokens=True)


def fingerprint_of(definition: object) -> str:
    """Return 16 hex digits of the sha256 of a JSON value that defines the token ids."""
    return hashlib.sha256(json.dumps(definition, separators=(",", ":")).encode()).hexdigest()[:16]
