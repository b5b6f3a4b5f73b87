"""Chat files: jsonl lines with ``messages``, and the prepared tokens with their loss mask."""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ....errors import ConfigError
from ..layout import DATA_NAME, LOSS_MASK_NAME
from .template import ChatTemplate, Conversation

BATCH_CONVERSATIONS = 1000
COMMON_LENGTHS = tuple(2**power for power in range(9, 18))


def read_conversations(path: Path) -> Iterator[Conversation]:
    """Yield the conversations of a file with one JSON object per line, in file order. Raises ConfigError."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _conversation(line, f"{path}, line {number}")


def _conversation(line: str, position: str) -> Conversation:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{position}: not JSON ({error}). Write one JSON object per line.") from error
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        content = f"the keys {', '.join(record)}" if isinstance(record, dict) else type(record).__name__
        raise ConfigError(
            f"{position}: no list of messages under 'messages' (got {content}). Write "
            '{"messages": [{"role": "user", "content": ...}, ...]}.'
        )
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(
                f"{position}: a message without a role (got {message!r}). Write "
                '{"role": "user" or "assistant", "content": ...}.'
            )
        if message.get("weight", 1) != 1:
            raise ConfigError(
                f"{position}: weights of messages are not supported (got {message['weight']!r}). Remove the key."
            )
    tools = record.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ConfigError(f"{position}: 'tools' must be a list of objects (got {tools!r}). Remove the key.")
    return Conversation(messages, tools, position)


def write_conversations(
    conversations: Iterable[Conversation],
    template: ChatTemplate,
    vocab_size: int,
    builder: Callable[..., Any],
    folder: Path,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Write tokens and loss mask of conversations to two pairs of files. Return the counts for meta.json.

    Conversations without a token of the assistant are dropped and counted.

    Args:
        conversations: from :func:`read_conversations`.
        template: tokenizer with its chat template.
        vocab_size: largest token id + 1.
        builder: megatron-core's IndexedDatasetBuilder.
        folder: folder of the files.
        advance: function that takes the bytes of text since its last call.

    Raises:
        ConfigError: no conversation has a token of the assistant, or a token id is outside the vocabulary.
    """
    import numpy as np

    # Megatron uses two bytes per token for vocabularies below this size.
    tokens_file = builder(f"{folder / DATA_NAME}.bin", dtype=np.uint16 if vocab_size < 65500 else np.int32)
    mask_file = builder(f"{folder / LOSS_MASK_NAME}.bin", dtype=np.uint8)
    frequencies = np.zeros(vocab_size, dtype=np.int64)
    lengths: list[int] = []
    num_bytes = max_token_id = dropped = 0
    remaining = iter(conversations)
    while batch := list(islice(remaining, BATCH_CONVERSATIONS)):
        encoded = template.encode(batch)
        for conversation, example in zip(batch, encoded, strict=True):
            if not example.counted[1:].any():
                dropped += 1
                continue
            tokens = np.array(example.tokens)
            if tokens.max() >= vocab_size:
                raise ConfigError(
                    f"{conversation.position}: token id {tokens.max()} is outside the vocabulary of tokenizer.json "
                    f"(got {vocab_size} tokens). Save the tokenizer again with save_pretrained()."
                )
            tokens_file.add_document(tokens, [len(tokens)])
            mask_file.add_document(example.counted, [len(tokens)])
            frequencies += np.bincount(tokens[example.counted == 1], minlength=vocab_size)
            max_token_id = max(max_token_id, int(tokens.max()))
            num_bytes += example.num_bytes
            lengths.append(len(tokens))
        advance(sum(example.num_bytes for example in encoded))
    if not lengths:
        raise ConfigError(
            f"--source: no conversation has text of the assistant (got {dropped} conversations). Check the roles."
        )
    tokens_file.finalize(f"{folder / DATA_NAME}.idx")
    mask_file.finalize(f"{folder / LOSS_MASK_NAME}.idx")
    shares = frequencies[frequencies > 0] / frequencies.sum()
    return {
        "documents": len(lengths),
        "without_assistant": dropped,
        "tokens": sum(lengths),
        "assistant_tokens": int(frequencies.sum()),
        "longer_than": {
            str(limit): longer
            for limit in COMMON_LENGTHS
            if (longer := sum(length > limit + 1 for length in lengths)) or limit == COMMON_LENGTHS[0]
        },
        "bytes": num_bytes,
        "max_token_id": max_token_id,
        "unigram_entropy_nats": float(-(shares * np.log(shares)).sum()),
        "loss_mask": LOSS_MASK_NAME,
    }


def summary(meta: dict[str, Any]) -> str:
    """Return the lines that ``prepare`` prints for chat data."""
    longer = ", ".join(f"{limit}: {count}" for limit, count in meta["longer_than"].items())
    return (
        f"conversations {meta['documents']}, without assistant (dropped) {meta['without_assistant']}, tokens "
        f"{meta['tokens']}, assistant tokens {meta['assistant_tokens'] / meta['tokens']:.1%}, vocabulary "
        f"{meta['vocab_size']}, unigram entropy of assistant tokens {meta['unigram_entropy_nats']:.3f} nats\n"
        f"conversations longer than --seq-length {longer}"
    )
