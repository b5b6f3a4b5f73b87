"""Prepared chat files: tokens of conversations, and their loss mask."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import ConfigError
from ....model.data_layout import DATA_NAME, LOSS_MASK_NAME
from ..indexed import IndexedWriter
from .template import ChatTemplate, Conversation, EncodedConversation

BATCH_CONVERSATIONS = 1000
NAMED_CONVERSATIONS = 5  # of the dropped ones
NAMED_KEYS = 20  # of the ignored ones
COMMON_LENGTHS = tuple(2**power for power in range(9, 18))


def write_conversations(
    conversations: Iterable[Conversation],
    template: ChatTemplate,
    vocab_size: int,
    folder: Path,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Write tokens and loss mask of conversations to two pairs of files. Return the counts for meta.json.

    Conversations without a token of the assistant are dropped and counted; the lines of the first ones are kept.
    ``advance`` takes the bytes of text since its last call.
    """
    writer = _Writer(folder, vocab_size)
    dropped: list[str] = []
    ignored: Counter[str] = Counter()
    remaining = iter(conversations)
    while batch := list(islice(remaining, BATCH_CONVERSATIONS)):
        examples = template.encode(batch)
        for conversation, example in zip(batch, examples, strict=True):
            if example.counted[1:].any():
                writer.add(example, conversation.position)
            else:
                dropped.append(conversation.position)
            ignored.update(template.ignored_keys(conversation))
        advance(sum(example.num_bytes for example in examples))
    if not writer.lengths:
        raise ConfigError(
            f"--source: no conversation has text of the assistant (got {len(dropped)} conversations). Check the roles."
        )
    return {**writer.finish(dropped), "ignored_keys": dict(ignored.most_common())}


class _Writer:
    def __init__(self, folder: Path, vocab_size: int) -> None:
        # Megatron uses two bytes per token for vocabularies below this size.
        dtype = np.uint16 if vocab_size < 65500 else np.int32
        self._tokens_file = IndexedWriter(folder / DATA_NAME, dtype)
        self._mask_file = IndexedWriter(folder / LOSS_MASK_NAME, np.uint8)
        self._frequencies = np.zeros(vocab_size, dtype=np.int64)  # of the assistant's tokens
        self._max_token_id = 0
        self._num_bytes = 0
        self.lengths: list[int] = []

    def add(self, example: EncodedConversation, position: str) -> None:
        tokens = np.array(example.tokens)
        vocab_size = len(self._frequencies)
        if tokens.max() >= vocab_size:
            raise ConfigError(
                f"{position}: token id {tokens.max()} is outside the vocabulary of the tokenizer "
                f"(got {vocab_size} tokens). Save the tokenizer again with save_pretrained()."
            )
        self._tokens_file.add_document(tokens, [len(tokens)])
        self._mask_file.add_document(example.counted, [len(tokens)])
        self._frequencies += np.bincount(tokens[example.counted == 1], minlength=vocab_size)
        self._max_token_id = max(self._max_token_id, int(tokens.max()))
        self._num_bytes += example.num_bytes
        self.lengths.append(len(tokens))

    def finish(self, dropped: Sequence[str]) -> dict[str, Any]:
        self._tokens_file.close()
        self._mask_file.close()
        longer_than = {limit: sum(length > limit + 1 for length in self.lengths) for limit in COMMON_LENGTHS}
        return {
            "documents": len(self.lengths),
            "without_assistant": len(dropped),
            "without_assistant_lines": dropped[:NAMED_CONVERSATIONS],
            "tokens": sum(self.lengths),
            "assistant_tokens": int(self._frequencies.sum()),
            "longer_than": {
                str(limit): count
                for limit, count in longer_than.items()
                if count or limit == COMMON_LENGTHS[0]
            },
            "bytes": self._num_bytes,
            "max_token_id": self._max_token_id,
            "unigram_entropy_nats": unigram_entropy(self._frequencies),
            "loss_mask": LOSS_MASK_NAME,
        }


def unigram_entropy(frequencies: NDArray[np.int64]) -> float:
    """Return the entropy, in nats, for the number of each token."""
    shares = frequencies[frequencies > 0] / frequencies.sum()
    return float(-(shares * np.log(shares)).sum())


def summary(meta: dict[str, Any]) -> str:
    longer = ", ".join(f"{limit}: {count}" for limit, count in meta["longer_than"].items())
    lines = meta.get("without_assistant_lines", [])
    more = ", ..." if len(lines) < meta["without_assistant"] else ""
    dropped = f"dropped: {'; '.join(lines)}{more}\n" if lines else ""
    keys = [f"{key} ({rows:,} rows)" for key, rows in meta.get("ignored_keys", {}).items()]
    more = ", ..." if len(keys) > NAMED_KEYS else ""
    ignored = f"\nignored keys: {', '.join(keys[:NAMED_KEYS])}{more}" if keys else ""
    return (
        f"conversations {meta['documents']}, without assistant (dropped) {meta['without_assistant']}, tokens "
        f"{meta['tokens']}, share of assistant tokens {meta['assistant_tokens'] / meta['tokens']:.1%}, vocabulary "
        f"{meta['vocab_size']}, unigram entropy of assistant tokens {meta['unigram_entropy_nats']:.3f} nats\n"
        f"{dropped}conversations longer than --seq-length {longer}{ignored}"
    )
