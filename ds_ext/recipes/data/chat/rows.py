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
from ..sources import located, read_rows, row_files
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
    """Yield the conversations of a file, or of all files with rows in a folder."""
    for path in row_files(source):
        for position, row in read_rows(path):
            with located(position):
                conversation = _conversation(row, position)
            yield conversation


def _conversation(row: Any, position: str) -> Conversation:
    if not isinstance(row, dict):
        raise ConfigError(f"not a conversation (got {type(row).__name__}). Write {FORMATS}.")
    _require_good_answers(row)
    _require_plain(row)
    source_keys, raw_messages = _messages(row)
    messages = [_message(message) for message in raw_messages]
    prompts = {key: row[key] for key in SYSTEM_KEYS if row.get(key)}
    if prompts:
        if len(prompts) > 1 or messages[0]["role"] == "system":
            others = " and a first message" if messages[0]["role"] == "system" else ""
            raise ConfigError(f"two system prompts (got {', '.join(prompts)}{others}). Remove one.")
        messages.insert(0, {"role": "system", "content": next(iter(prompts.values()))})
    options = _without_nulls(_json_value(row, OPTIONS_KEY)) or {}
    if not isinstance(options, dict):
        raise ConfigError(f"{OPTIONS_KEY!r} must be an object (got {options!r}). Remove the key.")
    used = {*source_keys, *SYSTEM_KEYS, *LABEL_KEYS, *TOOL_KEYS, OPTIONS_KEY}
    unused = {key for key, value in row.items() if key not in used and _is_unused(key, value)}
    used = {"role", "content", "tool_calls", "tool_call_id", *REASONING_KEYS}
    items = (item for message in messages for item in message.items())
    unused |= {f"messages.{key}" for key, value in items if key not in used and _is_unused(key, value)}
    tools = options.pop("tools", None) or _tools(row)
    return Conversation(messages, tools, position, options, frozenset(unused))


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools of a row. OpenAI's older key for them is ``functions``."""
    lists = {key: values for key in TOOL_KEYS if (values := _json_value(row, key))}
    for key, values in lists.items():
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise ConfigError(f"{key!r} must be a list of objects (got {values!r}). Remove the key.")
    if len(lists) > 1:
        raise ConfigError("two lists of tools (got 'tools' and 'functions'). Remove one.")
    functions = lists.get("functions", [])
    return (
        lists.get("tools") or [{"type": "function", "function": function} for function in functions] or None
    )


def _require_good_answers(row: Mapping[str, Any]) -> None:
    problems = [f"the key {key}" for key in PREFERENCE_KEYS if row.get(key) is not None]
    labels = {key: row[key] for key in LABEL_KEYS if str(row.get(key)).strip().lower() in BAD_LABELS}
    problems += [f"{key}: {value!r}" for key, value in labels.items()]
    if problems:
        raise ConfigError(
            f"training would not avoid the rejected answers of preference data (got {problems[0]}). Keep the good "
            "answers only, as 'messages' without this key."
        )


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


def _require_plain(node: Mapping[str, Any], role: str = ASSISTANT) -> None:
    """Raise ConfigError for media, and for marks that training would ignore.

    ``node`` is a row, or a message of ``role`` or a part of its content.
    """
    for key, value in node.items():
        marks, usual = _marks(key, value)
        if role == ASSISTANT and any(mark != usual for mark in marks):
            raise ConfigError(
                f"all of the assistant's text is trained (got {key}: {value!r}). Remove the key, or what must not be "
                "trained."
            )
        if role != ASSISTANT and usual == 1 and "weight" not in key.lower() and any(marks):
            raise ConfigError(
                f"only the assistant's messages are trained (got {key}: {value!r} of the role {role!r}). Remove the "
                "key."
            )
        words = _words(f"{key} {value}" if key == "type" else key)
        if value and any(word.startswith(MEDIA) for word in words):
            raise ConfigError(
                f"only text is supported (got {key}: {str(value)[:80]!r}). Remove the key, or the row."
            )


def _is_unused(key: str, value: Any) -> bool:
    """Return whether an unknown key has a value that would be missed."""
    return value not in (None, "", [], {}) and not _marks(key, value)[0]


def _without_nulls(value: Any) -> Any:
    """Remove the keys whose value is null, which files with columns write for absent keys."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _messages(row: Mapping[str, Any]) -> tuple[Sequence[str], list[Any]]:
    """Return the used keys and the messages of a row. ShareGPT's messages have the keys ``from`` and ``value``."""
    for key in ("messages", "conversations"):
        if isinstance(row.get(key), list) and row[key]:
            return [key], row[key]
    if "instruction" not in row or "output" not in row:
        raise ConfigError(f"no conversation (got the keys {', '.join(row)}). Write {FORMATS}.")
    question = [part for part in (row["instruction"], row.get("input")) if part]
    history = row.get("history") or []
    texts = [*question, row["output"], *(text for turn in history for text in turn)]
    if not all(isinstance(text, str) for text in texts) or any(len(turn) != 2 for turn in history):
        raise ConfigError(f"the parts of a conversation must be strings (got {texts!r}). Write {FORMATS}.")
    return ALPACA_KEYS, [
        {"role": role, "content": text}
        for turn in (*history, ("\n".join(question), row["output"]))
        for role, text in zip(("user", ASSISTANT), turn, strict=True)
    ]


def _message(message: Any) -> dict[str, Any]:
    message = _without_nulls(message)
    if isinstance(message, dict) and "from" in message:
        message = _from_sharegpt(message)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ConfigError(
            f'a message without a role (got {message!r}). Write {{"role": "user" or "assistant", "content": ...}}.'
        )
    content = message.setdefault("content", None)
    parts = content if isinstance(content, list) else []
    for node in (message, *(part for part in parts if isinstance(part, dict))):
        _require_plain(node, message["role"])
    calls = message.get("tool_calls", [])
    if FUNCTION_CALL in message:  # OpenAI's older key
        if calls:
            raise ConfigError(
                f"calls of functions under two keys (got {FUNCTION_CALL} and tool_calls). Remove one."
            )
        calls = [message.pop(FUNCTION_CALL)]
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    elif content is None:
        raise ConfigError(
            f"a message without content (got role {message['role']!r}). Write text, or remove it."
        )
    return message


def _from_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with role and content; a call of functions becomes tool calls."""
    sender, value = message["from"], message.get("value")
    if sender not in SENDERS:
        raise ConfigError(f"unknown sender (got from: {sender!r}). Use one of {', '.join(SENDERS)}.")
    message = {key: other for key, other in message.items() if key not in ("from", "value")}
    message |= {"role": SENDERS[sender], "content": value}
    if sender != FUNCTION_CALL:
        return message
    calls = _parsed(value, FUNCTION_CALL)
    return {**message, "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f"a tool call without the name of a function (got {call!r}). Write "
            '{"type": "function", "function": {"name": ..., "arguments": {...}}}.'
        )
    if isinstance(function.get("arguments"), str):
        _parsed(function["arguments"], "arguments")
    others = call if "function" in call else {}
    return {"type": "function", **others, "function": function}


def _json_value(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key without nulls, or the value of its JSON string."""
    value = row.get(key)
    return _parsed(value, key) if value and isinstance(value, str) else _without_nulls(value)


def _parsed(text: Any, key: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key!r} is not JSON (got {text!r}: {error}). Correct it.") from None
