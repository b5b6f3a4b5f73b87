"""Writer of prepared documents, which counts their tokens for meta.json."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError
from ...model.data_layout import DATA_NAME, LOSS_MASK_NAME
from .indexed import IndexedWriter


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
