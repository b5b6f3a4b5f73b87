"""Rows of chat files as conversations: ``messages`` as in OpenAI's API, ShareGPT's and Alpaca's keys.

Rows that mark bad answers, as in data for DPO and KTO, are refused.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ....errors import ConfigError
from ..sources import read_rows, row_files
from .template import ASSISTANT, REASONING_KEYS, Conversation

FORMATS = (
    '{"messages": [{"role": "user", "content": ...}, ...]}, {"conversations": [{"from": "human", "value": ...}, ...]} '
    'or {"instruction": ..., "input": ..., "output": ...}'
)
FUNCTION_CALL = "function_call"
ALPACA_KEYS = ("instruction", "input", "output", "history")
TOOL_KEYS = ("tools", "functions")
# ShareGPT's sender -> role.
SENDERS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("human", "user"), "user"),
        **dict.fromkeys(("gpt", "chatgpt", ASSISTANT, FUNCTION_CALL), ASSISTANT),
        **dict.fromkeys(("observation", "tool"), "tool"),
        "system": "system",
    }
)
SYSTEM_KEYS = ("system", "system_prompt", "system_message")
PREFERENCE_KEYS = (
    *("chosen", "rejected", "rejected_response", "rejected_messages", "rejected_output"),
    *("preferred_output", "non_preferred_output"),
)
LABEL_KEYS = ("label", "kto_tag", "preferred", "is_preferred", "is_chosen")
BAD_LABELS = ("false", "0", "0.0", "-1", "no", "bad", "rejected", "negative", "undesirable")  # of answers
OPTIONS_KEY = "chat_template_kwargs"  # of trl
# Starts of words in keys that mark what to train, and that mark what not to train.
TRAINED, EXCLUDED = ("loss", "weight", "train"), ("mask", "ignore", "exclude", "skip", "noloss")
NEGATIONS = ("no", "noloss", "not", "without")
ALWAYS_MARKS = ("loss", "mask", "noloss", "weight")
MEDIA = ("image", "img", "video", "audio", "pixel")
TEXT_VALUES: Mapping[str, int] = MappingProxyType(
    {**dict.fromkeys(("true", "yes", "1", "1.0"), 1), **dict.fromkeys(("false", "no", "0", "0.0"), 0)}
)


def read_conversations(source: Path) -> Iterator[Conversation]:
    """Return the conversations of a file, or of all files with rows in a folder. Iterating raises ConfigError."""
    return (_conversation(row, position) for path in row_files(source) for position, row in read_rows(path))


def _conversation(row: Any, position: str) -> Conversation:
    """Return the conversation of a row. ``position`` is its file and line, for errors."""
    if not isinstance(row, dict):
        raise ConfigError(f"{position}: not a conversation (got {type(row).__name__}). Write {FORMATS}.")
    _require_targets(row, position)
    source_keys, raw_messages = _messages(row, position)
    messages = [_message(message, position) for message in raw_messages]
    prompts = {key: row[key] for key in SYSTEM_KEYS if row.get(key)}
    if prompts:
        if len(prompts) > 1 or messages[0]["role"] == "system":
            others = " and a first message" if messages[0]["role"] == "system" else ""
            raise ConfigError(
                f"{position}: two system prompts (got {', '.join(prompts)}{others}). Remove one."
            )
        messages.insert(0, {"role": "system", "content": next(iter(prompts.values()))})
    options = row.get(OPTIONS_KEY) or {}
    options = _without_nulls(_parsed(options, OPTIONS_KEY, position) if isinstance(options, str) else options)
    if not isinstance(options, dict):
        raise ConfigError(f"{position}: {OPTIONS_KEY!r} must be an object (got {options!r}). Remove the key.")
    used = {*source_keys, *SYSTEM_KEYS, *LABEL_KEYS, *TOOL_KEYS, OPTIONS_KEY}
    unused = {key for key, value in row.items() if key not in used and _is_unused(key, value)}
    used = {"role", "content", "tool_calls", "tool_call_id", *REASONING_KEYS}
    items = (item for message in messages for item in message.items())
    unused |= {f"messages.{key}" for key, value in items if key not in used and _is_unused(key, value)}
    tools = options.pop("tools", None) or _tools(row, position)
    return Conversation(messages, tools, position, options, frozenset(unused))


def _tools(row: Mapping[str, Any], position: str) -> list[dict[str, Any]] | None:
    """Return the tools of a row. OpenAI's older key for them is ``functions``."""
    tools: list[dict[str, Any]] = []
    for key in TOOL_KEYS:
        values = row.get(key) or []
        values = (_parsed(values, key, position) or []) if isinstance(values, str) else _without_nulls(values)
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise ConfigError(
                f"{position}: {key!r} must be a list of objects (got {values!r}). Remove the key."
            )
        if values and tools:
            raise ConfigError(f"{position}: two lists of tools (got 'tools' and 'functions'). Remove one.")
        tools = tools or (
            values if key == "tools" else [{"type": "function", "function": value} for value in values]
        )
    return tools or None


def _require_targets(row: Mapping[str, Any], position: str) -> None:
    """Raise ConfigError for a row with answers that a model should avoid."""
    problem = next((f"the key {key}" for key in PREFERENCE_KEYS if row.get(key) is not None), None)
    labels = {key: row[key] for key in LABEL_KEYS if str(row.get(key)).strip().lower() in BAD_LABELS}
    problem = problem or next((f"{key}: {value!r}" for key, value in labels.items()), None)
    if problem is not None:
        raise ConfigError(
            f"{position}: training would not avoid the rejected answers of preference data (got {problem}). Keep the "
            "good answers only, as 'messages' without this key."
        )
    _require_full_loss(row, position)
    _require_no_media(row, position)


@lru_cache(1000)
def _words(key: str) -> list[str]:
    return re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower())


def _marks(key: str, value: Any) -> tuple[list[Any], int | None]:
    """Return the marks under a key, and the mark that means trained as usual; None: unclear."""
    words = _words(key)
    marking = [word for word in words if word.startswith((*TRAINED, *EXCLUDED))]
    items = value if isinstance(value, list) else [value]
    marks = [TEXT_VALUES.get(str(item).lower(), item) for item in items if item is not None]
    # Of some keys, other values are names or counts, as those of training_set.
    is_other = not any(word.startswith(ALWAYS_MARKS) for word in words) and all(
        isinstance(mark, str | int | float) and mark not in (0, 1) for mark in marks
    )
    if not marking or is_other or "attention" in words:
        return [], None
    excluded = [word for word in marking if word.startswith(EXCLUDED)]
    if words[0] in (*NEGATIONS, *EXCLUDED) or any(word.endswith("ed") for word in excluded):
        return marks, 0
    if excluded == marking:
        return marks, None if any(word.startswith("mask") for word in excluded) else 0
    return marks, 1


def _require_full_loss(node: Mapping[str, Any], position: str, is_trained: bool = True) -> None:
    """Raise ConfigError if a row, a message or a part of its content has a mark that training would ignore.

    ``is_trained``: the role is the assistant's.
    """
    for key, value in node.items():
        marks, usual = _marks(key, value)
        if is_trained and any(mark != usual for mark in marks):
            raise ConfigError(
                f"{position}: all of the assistant's text is trained (got {key}: {value!r}). Remove the key, or what "
                "must not be trained."
            )
        if not is_trained and usual == 1 and "weight" not in key.lower() and any(marks):
            raise ConfigError(
                f"{position}: only the assistant's messages are trained (got {key}: {value!r} of the role "
                f"{node['role']!r}). Remove the key."
            )


def _require_no_media(node: Mapping[str, Any], position: str) -> None:
    for key, value in node.items():
        words = _words(f"{key} {value}" if key == "type" else key)
        if value and any(word.startswith(MEDIA) for word in words):
            raise ConfigError(
                f"{position}: only text is supported (got {key}: {str(value)[:80]!r}). Remove the key, or the row."
            )


def _is_unused(key: str, value: Any) -> bool:
    """Return whether an unknown key has a value that would be missed."""
    return value not in (None, "", [], {}) and not _marks(key, value)[0]


def _without_nulls(value: Any) -> Any:
    """Remove the keys whose value is null, which files with columns write for absent keys."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _messages(row: Mapping[str, Any], position: str) -> tuple[Sequence[str], list[Any]]:
    """Return the used keys and the messages of a row. ShareGPT's messages have the keys ``from`` and ``value``."""
    for key in ("messages", "conversations"):
        if isinstance(row.get(key), list) and row[key]:
            return [key], row[key]
    if "instruction" in row and "output" in row:
        question = [part for part in (row["instruction"], row.get("input")) if part]
        history = row.get("history") or []
        texts = [*question, row["output"], *(text for turn in history for text in turn)]
        if not all(isinstance(text, str) for text in texts) or any(len(turn) != 2 for turn in history):
            raise ConfigError(
                f"{position}: the parts of a conversation must be strings (got {texts!r}). Write {FORMATS}."
            )
        return ALPACA_KEYS, [
            {"role": role, "content": text}
            for turn in (*history, ("\n".join(question), row["output"]))
            for role, text in zip(("user", ASSISTANT), turn, strict=True)
        ]
    raise ConfigError(f"{position}: no conversation (got the keys {', '.join(row)}). Write {FORMATS}.")


def _message(message: Any, position: str) -> dict[str, Any]:
    message = _without_nulls(message)
    if isinstance(message, dict) and "from" in message:
        message = _from_sharegpt(message, position)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ConfigError(
            f"{position}: a message without a role (got {message!r}). Write "
            '{"role": "user" or "assistant", "content": ...}.'
        )
    is_trained = message["role"] == ASSISTANT
    _require_full_loss(message, position, is_trained)
    _require_no_media(message, position)
    content = message.setdefault("content", None)
    for part in content if isinstance(content, list) else []:
        if isinstance(part, dict):
            _require_full_loss({"role": message["role"], **part}, position, is_trained)
            _require_no_media(part, position)
    calls = message.get("tool_calls", [])
    if FUNCTION_CALL in message:  # OpenAI's older key
        if calls:
            raise ConfigError(
                f"{position}: calls of functions under two keys (got {FUNCTION_CALL} and tool_calls). Remove one."
            )
        calls = [message.pop(FUNCTION_CALL)]
    if calls:
        message["tool_calls"] = [_call(call, position) for call in calls]
    elif content is None:
        raise ConfigError(
            f"{position}: a message without content (got role {message['role']!r}). Write text, or remove it."
        )
    return message


def _from_sharegpt(message: dict[str, Any], position: str) -> dict[str, Any]:
    """Return a message with role and content; a call of functions becomes tool calls."""
    sender, value = message["from"], message.get("value")
    if sender not in SENDERS:
        raise ConfigError(
            f"{position}: unknown sender (got from: {sender!r}). Use one of {', '.join(SENDERS)}."
        )
    others = {key: other for key, other in message.items() if key not in ("from", "value")}
    if sender != FUNCTION_CALL:
        return {**others, "role": SENDERS[sender], "content": value}
    calls = _parsed(value, FUNCTION_CALL, position)
    calls = calls if isinstance(calls, list) else [calls]
    return {**others, "role": ASSISTANT, "content": "", "tool_calls": calls}


def _call(call: Any, position: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f"{position}: a tool call without the name of a function (got {call!r}). Write "
            '{"type": "function", "function": {"name": ..., "arguments": {...}}}.'
        )
    if isinstance(function.get("arguments"), str):
        _parsed(function["arguments"], "arguments", position)
    others = call if "function" in call else {}
    return {"type": "function", **others, "function": function}


def _parsed(text: Any, key: str, position: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{position}: {key!r} is not JSON (got {text!r}: {error}). Correct it.") from None
