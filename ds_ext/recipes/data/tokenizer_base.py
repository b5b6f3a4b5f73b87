"""Base of all tokenizers: the library ``tokenizers``, fingerprints, and files."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError

END_OF_DOCUMENT = "<|endoftext|>"
END_OF_DOCUMENT_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eod|>", "[EOD]")
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # which use tokenizer.json as it is
TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
# Key in it: tokenizer.json splits texts as transformers does, and not as the file from which it was made.
REPLACED = "split_by_transformers"


class Tokenizer:
    """Conversion of text to token ids and back, here by the library ``tokenizers``.

    Attributes:
        vocab: token -> id, with special tokens.
        vocab_size: largest token id + 1.
        fingerprint: 16 hex digits of the sha256 of vocabulary and merges, and of the splitting rules if transformers
            replaces those of ``tokenizer.json``; equal if all ids have the same meaning.
        special_tokens: texts of the special tokens, such as <|im_end|>.
    """

    vocab: dict[str, int]
    end_names: tuple[str, ...] = END_OF_DOCUMENT_NAMES

    def __init__(
        self, backend: Any, origin: str, end_of_document: str | None = None, is_replaced: bool = False
    ) -> None:
        """Wrap a ``tokenizers.Tokenizer``, and change it: special tokens are text, and lengths are not limited.

        Args:
            origin: name in errors.
            end_of_document: declared end-of-document token; None: use a well-known name.
            is_replaced: transformers splits texts differently than the file.
        """
        backend.encode_special_tokens = True  # that is, as plain text
        # A tokenizer.json may have the lengths of another program, as that of sentence-transformers.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added_tokens = backend.get_added_tokens_decoder().values()
        self.special_tokens = tuple(token.content for token in added_tokens if token.special)
        self.vocab = backend.get_vocab(with_added_tokens=True)
        names = [name for name in (end_of_document, *self.end_names) if name in self.vocab]
        if not names:
            raise ConfigError(
                f"{origin}: no end-of-document token (got {len(self.vocab)} tokens). Add one of "
                f"{', '.join(self.end_names)} as a special token."
            )
        self.vocab_size = max(self.vocab.values()) + 1
        self.eod_id = self.vocab[names[0]]
        self._declared = (
            {"tokenizer_class": GENERIC_CLASSES[0], "eos_token": names[0]} if end_of_document else {}
        )
        self._declared |= {REPLACED: True} if is_replaced else {}
        serialized = json.loads(backend.to_str())
        definition = _definition(self.vocab, serialized["model"])
        self.fingerprint = fingerprint_of([definition, splitting(serialized)] if is_replaced else definition)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without an end-of-document token.

        Special tokens in it are plain text, unless :meth:`parse_special_tokens` was called.
        """
        return self.encode_batch([text])[0]

    def parse_special_tokens(self) -> None:
        """Encode special tokens in texts as their ids from now on. Raises ConfigError if the library cannot."""
        self._backend.encode_special_tokens = False

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return ``encode`` of every text, computed on all cores."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_documents(self, texts: Sequence[str]) -> list[list[list[int]]]:
        """Return the sequences of each document: one per document, with an end-of-document token."""
        return [[[*ids, self.eod_id]] for ids in self.encode_batch(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` without special tokens."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def save(self, folder: Path) -> list[str]:
        """Write the files of the tokenizer into ``folder``. Return their names; the first is the one to load.

        A tokenizer_config.json in the folder keeps its values, and gets those that the tokenizer needs.
        """
        self._backend.save(str(folder / TOKENIZER_JSON))
        self._backend.model.save(str(folder))
        config = folder / TOKENIZER_CONFIG
        if self._declared:
            old = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
            config.write_text(json.dumps({**self._declared, **old}, indent=2) + "\n", encoding="utf-8")
        declared = [TOKENIZER_CONFIG] if self._declared else []
        others = [name for name in ("vocab.json", "merges.txt") if (folder / name).exists()]
        return [TOKENIZER_JSON, *declared, *others]


def _definition(vocab: Mapping[str, int], model: Mapping[str, Any]) -> list[Any]:
    """Return the vocabulary, and the merges unless the model is WordPiece."""
    tokens = sorted(vocab.items())
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", [])]
    return tokens if model["type"] == "WordPiece" else [tokens, merges]


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
