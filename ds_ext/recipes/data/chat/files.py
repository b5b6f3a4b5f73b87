"""Prepared chat files: tokens of conversations, and their loss mask."""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from ....errors import ConfigError
from ..indexed import DocumentWriter
from ..sources import located
from .template import ChatTemplate, Conversation

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
    writer = DocumentWriter(folder, vocab_size, has_mask=True)
    num_bytes = 0
    dropped: list[str] = []
    ignored: Counter[str] = Counter()
    remaining = iter(conversations)
    while batch := list(islice(remaining, BATCH_CONVERSATIONS)):
        examples = template.encode(batch)
        for conversation, example in zip(batch, examples, strict=True):
            if example.counted[1:].any():
                with located(conversation.position):
                    writer.add([example.tokens], example.counted)
                num_bytes += example.num_bytes
            else:
                dropped.append(conversation.position)
            ignored.update(template.ignored_keys(conversation))
        advance(sum(example.num_bytes for example in examples))
    if not writer.lengths:
        raise ConfigError(
            f"--source: no conversation has text of the assistant (got {len(dropped)} conversations). Check the roles."
        )
    longer_than = {limit: sum(length > limit + 1 for length in writer.lengths) for limit in COMMON_LENGTHS}
    return {
        **writer.close(),
        "without_assistant": len(dropped),
        "without_assistant_lines": dropped[:NAMED_CONVERSATIONS],
        "longer_than": {
            str(limit): count for limit, count in longer_than.items() if count or limit == COMMON_LENGTHS[0]
        },
        "bytes": num_bytes,
        "ignored_keys": dict(ignored.most_common()),
    }


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
