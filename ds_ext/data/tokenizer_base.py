"""Interface of all tokenizers, and what their implementations share."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_ext.errors import ConfigError


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        vocab_size: largest token id + 1.
        eod_id: id of the token that ends a document.
        fingerprint: 16 hex digits of the sha256 of vocabulary and merges; equal when the ids mean the same.
    """

    vocab_size: int
    eod_id: int
    fingerprint: str

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without an end-of-document token; special tokens spelt out in it stay text."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts at once, on all cores."""

    def encode_documents(self, texts: Sequence[str]) -> list[list[list[int]]]:
        """The sequences of each document as the data files hold them: here one, ended by the end-of-document token."""
        return [[[*ids, self.eod_id]] for ids in self.encode_batch(texts)]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens are left out."""

    @abstractmethod
    def save(self, folder: Path) -> list[str]:
        """Write the tokenizer's files into `folder` and return their names, the one to load first."""


def fingerprint_of(definition: object) -> str:
    """16 hex digits for what decides the meaning of token ids, given as JSON values."""
    return hashlib.sha256(json.dumps(definition, separators=(",", ":")).encode()).hexdigest()[:16]


def tokenizers_library() -> Any:
    """The package `tokenizers`. Raises ConfigError when it is missing."""
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ConfigError("the `tokenizers` package is missing: pip install tokenizers") from error
    return tokenizers
